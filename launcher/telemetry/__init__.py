"""What the daemon says of itself: metrics, merged instance metrics, log events."""
