"""Which instances can start one more request now."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.proxy.balancing.cost_model import CostModel
from launcher.proxy.balancing.upstreams import Upstream


def open_upstreams(candidates: Sequence[Upstream], costs: CostModel, now: float) -> list[Upstream]:
    """Those that would start it at once; an ejection whose time is over ends."""
    opened: list[Upstream] = []
    for upstream in candidates:
        load, outliers = upstream.load, upstream.outliers
        if load.full or upstream.in_flight + load.surplus >= upstream.max_num_seqs:
            continue
        if load.pending and costs.prefills_enough(upstream, now):
            continue
        if outliers.ejected_until is not None:
            outliers.end_pause(now)
        if outliers.ejected_until is None and (not outliers.half_open or outliers.admits):
            opened.append(upstream)
    return opened


def least_busy(candidates: Sequence[Upstream]) -> Upstream | None:
    """The instance with the fewest requests that runs fewer than it can, whatever it prefills."""
    best: Upstream | None = None
    for upstream in candidates:
        load = upstream.load
        below = not load.full and upstream.in_flight + load.surplus < upstream.max_num_seqs
        if below and not upstream.outliers.out and (best is None or upstream.in_flight < best.in_flight):
            best = upstream
    return best
