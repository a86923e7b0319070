"""How far a run is, for a live line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """For a live line."""

    what: str
    """warm-up, or the load: "4 at once"."""
    point: int
    """From 1; 0 for the warm-up."""
    points: int | None
    """None: a search does not know."""
    done: int | None
    """Completed requests; None: the load generator does not say."""
    requests: int
    measuring: bool
    """False while the load generator starts."""
    elapsed_s: float
    """Since the first request of the point."""
