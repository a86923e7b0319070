"""Server-sent events: where events end, and the fast path for usual ones."""
