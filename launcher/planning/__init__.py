"""What should run where: topology, configuration and model profile in, plan out. Pure."""
