"""Connections to instances and to the overflow endpoint."""
