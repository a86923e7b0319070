"""Keeping each slot alive: lifecycle, spawning, health. Knows nothing of the proxy: it emits events."""
