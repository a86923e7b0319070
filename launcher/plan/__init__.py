"""What should run where: topology, configuration and model profiles in, plan and findings out. Pure."""
