"""What the machine is. Knows sysfs, procfs and cgroups under a given root; nothing of models or plans."""
