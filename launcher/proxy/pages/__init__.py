"""Pages that the proxy answers itself: /health, /metrics, /v1/models."""
