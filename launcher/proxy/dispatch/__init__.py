"""Requests in flight: admission, executor, registry. Knows upstreams and clients only through their ports."""
