"""Requests in flight: executor and registry. Knows upstreams and clients through their ports only."""
