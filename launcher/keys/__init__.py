"""API keys: records, their file, what each key may use. Knows no requests in flight."""
