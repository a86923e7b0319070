"""Service level objectives: limits on percentiles of latencies, and the requests that meet them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import numpy as np

from launcher.bench.result import Point

Slo = Mapping[str, float]
"""Limits in seconds by name: "ttft_p99" -> 2.0."""

FIGURES: Final = ("ttft", "tpot", "itl", "e2e")
STATISTICS: Final = ("mean", "p50", "p95", "p99")
WANTED: Final = "a list of limits such as ttft_p99=2s,itl_p99=150ms (ttft, tpot, itl or e2e; p50, p95, p99 or mean; s or ms)"
_LIMIT: Final = re.compile(
    r"\s*(?P<figure>[a-z0-9]+)_(?P<statistic>[a-z0-9]+)\s*=\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>s|ms)\s*",
    re.ASCII,
)


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one completed request, in seconds."""

    ttft: float | None
    """None: the response was not streamed."""
    e2e: float
    output_tokens: int
    itl: list[float]
    """Gaps between the parts of the stream; vLLM sends one part per token unless it falls behind."""

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


def parse(text: str) -> dict[str, float]:
    """Raises ValueError with the part that cannot be read."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        found = _LIMIT.fullmatch(part)
        if found is None or found["figure"] not in FIGURES or found["statistic"] not in STATISTICS:
            raise ValueError(part.strip())
        limit = float(found["value"]) / (1000 if found["unit"] == "ms" else 1)
        name = f"{found['figure']}_{found['statistic']}"
        if limit <= 0 or name in limits:
            raise ValueError(part.strip())
        limits[name] = limit
    return limits


def format_slo(slo: Slo) -> str:
    """The inverse of `parse`."""
    return ",".join(f"{name}={limit:g}s" for name, limit in slo.items())


def meets(point: Point, slo: Slo) -> bool:
    """Whether a point meets every limit with no request failed. A figure that was not measured breaks its limit."""
    return point.completed > 0 and not point.failed and all(_value(point, name) <= slo[name] for name in slo)


def _value(point: Point, name: str) -> float:
    figure, _, statistic = name.partition("_")
    percentiles = getattr(point, f"{figure}_s")
    return math.inf if percentiles is None else float(getattr(percentiles, statistic))


def good_requests(requests: Iterable[RequestTimes], slo: Slo) -> int:
    """Requests that meet every limit by themselves.

    TTFT, TPOT and the whole latency are one value per request. A limit of the inter-token latency holds for the same
    statistic over the request's own gaps."""
    return sum(all(_own(request, name) <= limit for name, limit in slo.items()) for request in requests)


def _own(request: RequestTimes, name: str) -> float:
    figure, _, statistic = name.partition("_")
    if figure != "itl":
        value = getattr(request, figure)
        return 0.0 if value is None and figure == "tpot" else math.inf if value is None else float(value)
    if not request.itl:
        return 0.0
    if statistic == "mean":
        return float(np.mean(request.itl))
    return float(np.percentile(request.itl, float(statistic.removeprefix("p"))))
