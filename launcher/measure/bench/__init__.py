"""Measuring a running endpoint: workloads, load generators, results, pages."""
