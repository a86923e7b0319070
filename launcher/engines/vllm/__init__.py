"""vLLM, with ZenTorch where installed."""
