"""Pages that the proxy serves itself: /health, /metrics, /v1/models."""
