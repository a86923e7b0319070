"""What the machine is and how it does: sysfs and procfs to Topology, snapshots, drawings, load, pressure, memory.

Reads under a given root; knows no models, plans or instances.
"""
