"""How requests are offered: closed loop, open loop, or a search of the highest rate that meets an SLO. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from launcher.measure.bench.outcomes import RequestTimes, other_work, without_figures
from launcher.measure.bench.result import Point

MAX_CONCURRENCY: Final = 65_536
MAX_RATE: Final = 100_000.0
# An open-loop point covers at least this long, so that the queue of an overloaded endpoint becomes visible.
RATE_POINT_S: Final = 30
# Closed loop: each request slot is used at least so often, so that the start of all at once does not dominate.
ROUNDS: Final = 4
# The search of a rate ends when the rates above and below the answer differ by less than this.
SWEEP_PRECISION: Final = 1.1
SWEEP_POINTS: Final = 20
# The first rate of a search, as a share of the requests per second that the warm-up completed.
SWEEP_START: Final = 0.25
# An endpoint that takes this much longer than the requests' arrivals does not keep up.
BEHIND: Final = 1.1
# Requests that all arrive within this share of one request's time are one burst: a higher rate is the same load.
BURST: Final = 0.1


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of the two, or both: then `concurrency` bounds the requests in flight."""

    concurrency: int | None = None
    """Requests kept in flight."""
    rate: float | None = None
    """Requests started per second; intervals are exponentially distributed (Poisson)."""

    @property
    def label(self) -> str:
        if self.rate is None:
            return f"{self.concurrency} at once"
        return f"{self.rate:.4g}/s" + (f", at most {self.concurrency}" if self.concurrency else "")


def parse_concurrency(text: str) -> tuple[Load, ...]:
    """ "1,4,16" as closed loops. Raises ValueError."""
    return tuple(Load(concurrency=_whole(part)) for part in text.split(","))


def parse_rates(text: str) -> tuple[Load, ...]:
    """ "0.5,1,2" as open loops. Raises ValueError."""
    return tuple(Load(rate=_rate(part)) for part in text.split(","))


def _whole(text: str) -> int:
    value = int(text)
    if not 0 < value <= MAX_CONCURRENCY:
        raise ValueError(text)
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not 0 < value <= MAX_RATE:
        raise ValueError(text)
    return value


def requests_for(load: Load, least: int) -> int:
    """Requests of one point when the user names no number; `least` is the workload's."""
    if load.rate is not None:
        return max(least, math.ceil(load.rate * RATE_POINT_S))
    return max(least, ROUNDS * (load.concurrency or 1))


Tried = Sequence[tuple[float, bool]]
"""Rates in the order they were tried, and whether each met the SLO."""


def next_rate(tried: Tried, first: float) -> float | None:
    """The next rate of the search; None when it has ended.

    1. The first rate is `first`. While every rate met the SLO, the next is twice as high; while none did, half as high.
    2. From then on, the geometric mean of the highest that met it and the lowest that broke it, until they
       differ by less than SWEEP_PRECISION.
    A rate below one that broke the SLO counts as met only if all lower ones did: noise cannot widen the bracket."""
    if not tried:
        return first
    if len(tried) >= SWEEP_POINTS:
        return None
    broken = min((rate for rate, met in tried if not met), default=None)
    met = best_rate(tried)
    if broken is None:
        return max(rate for rate, _ in tried) * 2
    if met is None:
        return broken / 2
    return None if broken / met < SWEEP_PRECISION else math.sqrt(met * broken)


def best_rate(tried: Tried) -> float | None:
    """The highest rate that met the SLO below the lowest that broke it."""
    broken = min((rate for rate, met in tried if not met), default=math.inf)
    return max((rate for rate, met in tried if met and rate < broken), default=None)


def keeps_up(rate: float, requests: int, duration_s: float, latency_s: float) -> bool:
    """Whether the endpoint completed requests as fast as they came, in a point that took `duration_s`.

    The arrivals of n Poisson requests take n / rate, with a standard deviation of sqrt(n) / rate; two of them are
    allowed. The last request ends a latency later: `latency_s`, seconds, at the lowest rate, where nothing waits."""
    arrivals_s = requests / rate
    return duration_s <= arrivals_s * (BEHIND + 2 / math.sqrt(requests)) + latency_s


def is_burst(rate: float, requests: int, latency_s: float) -> bool:
    """Whether all requests of a point arrive at nearly the same time, compared with the time that one takes."""
    return requests / rate < BURST * latency_s


def in_order(loads: Sequence[Load], repeats: int) -> tuple[Load, ...]:
    """All loads, then all again: slow changes of the machine fall on all loads alike."""
    return tuple(loads) * repeats


# --- Service level objectives: limits on percentiles of latencies, and the requests that meet them. ---

Slo = Mapping[str, float]
"""Limits in seconds by name: "ttft_p99" -> 2.0."""

FIGURES: Final = ("ttft", "tpot", "itl", "e2e")
STATISTICS: Final = ("mean", "p50", "p95", "p99")
WANTED: Final = "a list of limits such as ttft_p99=2s,itl_p99=150ms (ttft, tpot, itl or e2e; p50, p95, p99 or mean; s or ms)"
_LIMIT: Final = re.compile(
    r"\s*(?P<figure>[a-z0-9]+)_(?P<statistic>[a-z0-9]+)\s*=\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>s|ms)\s*",
    re.ASCII,
)


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
    """Whether a point meets every limit with no request failed. A figure that was not measured breaks its limit, and so do
    those of a failed run, of other work than was asked for, and of a client that set the pace."""
    if point.failed or without_figures(point) or other_work([point]):
        return False
    return all(_value(point, name) <= slo[name] for name in slo)


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
