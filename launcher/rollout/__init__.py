"""From one configuration to another: what differs slot by slot, and the rollout that applies it one slot at a time."""
