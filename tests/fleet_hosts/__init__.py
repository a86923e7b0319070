"""A fleet on one machine: four hosts as namespaces with real daemons, HAProxy and Ray, failures, checked clients."""
