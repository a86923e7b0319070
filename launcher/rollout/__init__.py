"""Applying a new configuration: the difference slot by slot, and the rollout one slot at a time."""
