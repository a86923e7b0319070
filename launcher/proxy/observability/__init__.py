"""What the proxy counts and logs: counters, histograms, access log, sums for `status`."""
