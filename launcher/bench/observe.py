"""What the endpoint's metrics say about a point: KV cache use, prefix hits, and requests per instance."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import msgspec

from launcher.telemetry import vllm_metrics
from launcher.telemetry.metrics import METRICS_AGE_S, SLOT_ENDED

# Of vLLM, on the proxy's page with the slot as a label. The proxy's own counter also counts /tokenize, which the load
# generator asks once.
_FINISHED: Final = "vllm:request_success_total"
_ENDED: Final = f"{SLOT_ENDED}_total"

Read = Callable[[], str | None]
"""Reads the metrics page; None when there is none."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """None: the endpoint does not publish it."""

    kv_use_max: float | None = None
    prefix_hit_share: float | None = None
    requests_by_instance: dict[str, int] | None = None
    failed_at_endpoint: int = 0
    """Requests that the proxy ended as failed. A load generator may count a stream that breaks off as completed."""


class Observer:
    """Reads the page before, during and after one point."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._first = read()
        self._kv_use: float | None = None

    def sample(self, *, measuring: bool) -> None:
        """Before the first request: the page that growth is counted from; the one read at the start may lack the last
        requests of the point before. During the point: the KV cache's use is a gauge."""
        if self._first is None:
            return
        page = self._read()
        if measuring:
            self._take(page)
        elif page is not None:
            self._first = page

    def end(self) -> Observed:
        """After the point, with all of its requests counted."""
        first = self._first
        if first is None:
            return Observed()
        time.sleep(METRICS_AGE_S)
        last = self._read()
        if last is None:
            return Observed()
        self._take(last)
        ended = _growth(first, last, _FINISHED, "slot") or _growth(first, last, _ENDED, "slot")
        outcomes = _growth(first, last, _ENDED, "outcome")
        return Observed(
            kv_use_max=self._kv_use, prefix_hit_share=_hit_share(first, last),
            requests_by_instance=ended or None, failed_at_endpoint=outcomes.get("failed", 0),
        )  # fmt: skip

    def _take(self, page: str | None) -> None:
        metrics = None if page is None else vllm_metrics.parse(page)
        if metrics is not None and metrics.kv_usage is not None:
            self._kv_use = max(self._kv_use or 0.0, metrics.kv_usage)


def _growth(first: str, last: str, name: str, label: str) -> dict[str, int]:
    """Requests counted between two pages, by one label."""
    before = vllm_metrics.sums_by_label(first, name, label)
    after = vllm_metrics.sums_by_label(last, name, label)
    return {key: int(value - before.get(key, 0)) for key, value in after.items()}


def _hit_share(first: str, last: str) -> float | None:
    before, after = vllm_metrics.parse(first), vllm_metrics.parse(last)
    if before is None or after is None:
        return None
    queries = after.prefix_queries - before.prefix_queries
    return (after.prefix_hits - before.prefix_hits) / queries if queries > 0 else None
