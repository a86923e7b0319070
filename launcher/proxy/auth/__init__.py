"""API keys: records, their file, what each key may use. Knows nothing of requests in flight."""
