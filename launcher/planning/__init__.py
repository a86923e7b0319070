"""What should run where. Pure: topology + config + model profile in, plan out. Starts nothing."""
