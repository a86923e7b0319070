"""Connections to instances and to the overflow endpoint: pools, response reading, probes."""
