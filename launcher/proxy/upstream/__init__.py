"""Connections to instances and to the overflow endpoint: pools, attempts, probes."""
