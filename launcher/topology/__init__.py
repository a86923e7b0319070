"""What the machine is. Reads sysfs, procfs and cgroups under a given root; knows no models or plans."""
