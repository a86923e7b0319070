"""Metrics: the table of our own, and reading and merging those of the engines."""
