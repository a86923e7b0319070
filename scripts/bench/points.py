"""One measurement: a proxy between so many clients and the engines, for so many seconds."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bench.load import Bursts, Smalls, Streams, Target, now
from bench.processes import FailedError, Process

SAMPLE_S: Final = 0.25  # between two looks at the memory


@dataclass(frozen=True, slots=True)
class StreamPoint:
    """`streams` at once; the CPU time is per SSE event."""

    streams: int
    tokens: int = 126  # with role, finish and [DONE] 129 events
    body_bytes: int = 1024
    window_s: float = 4.0
    settle_s: float = 1.0  # after the ramp, before the window

    @property
    def label(self) -> str:
        """The name in tables."""
        return f"{self.streams} streams" + ("" if self.body_bytes == 1024 else f", {size(self.body_bytes)}")


@dataclass(frozen=True, slots=True)
class BurstPoint:
    """`streams` that all begin in the same moment, on idle engines, several times; settle_s = 0 counts the first burst."""

    streams: int = 256
    tokens: int = 20
    body_bytes: int = 1024
    window_s: float = 5.0
    settle_s: float = 1.0

    @property
    def label(self) -> str:
        """The name in tables."""
        return f"{'' if self.settle_s else 'first '}burst of {self.streams} streams"


@dataclass(frozen=True, slots=True)
class SmallPoint:
    """Small answers at `rate` a second; the CPU time is per request."""

    body_bytes: int
    rate: float = 1500.0
    connections: int = 64
    window_s: float = 2.5
    settle_s: float = 0.5

    @property
    def label(self) -> str:
        """The name in tables."""
        return f"{size(self.body_bytes)} requests" + ("" if self.rate else ", as many as it can")


Point = StreamPoint | BurstPoint | SmallPoint


def size(number: int) -> str:
    """1024 -> 1 KiB."""
    return f"{number // 1024} KiB" if number < 1 << 20 else f"{number >> 20} MiB"


@dataclass(frozen=True, slots=True)
class Measured:
    """What one measurement gave. Times in seconds, memory in bytes."""

    units: int  # events or requests
    seconds: float
    cpu_s: float | None  # of the proxy, less what it takes idle
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float | None
    gap_p99_s: float | None
    rss_bytes: int | None
    failures: int
    failure: str = ""

    @property
    def cpu_us(self) -> float | None:
        """Per event or request."""
        return None if self.cpu_s is None or not self.units else self.cpu_s / self.units * 1e6


async def measure(
    point: Point, targets: Sequence[Target], proxy: Process | None, idle: float, seed: int
) -> Measured:
    """`idle` is the proxy's CPU share while nothing comes, 0..1. Raises FailedError when nothing is answered."""
    load: Streams | Bursts | Smalls
    match point:
        case StreamPoint():
            load = Streams(point.streams, point.tokens, point.body_bytes, seed)
        case BurstPoint():
            load = Bursts(point.streams, point.tokens, point.body_bytes)
        case SmallPoint():
            load = Smalls(point.connections, point.rate, point.body_bytes)
    record = load.record
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        await load.start(targets)
        if point.settle_s:
            await asyncio.sleep(point.settle_s)
        if proxy:
            proxy.check()
        began, cpu, rss = now(), proxy.cpu_s() if proxy else 0.0, 0
        record.counting = True
        while (left := began + point.window_s - now()) > 0:
            await asyncio.sleep(min(SAMPLE_S, left))
            if proxy:
                rss = max(rss, proxy.rss_bytes())
        record.counting = False
        seconds = now() - began
        spent = proxy.cpu_s() - cpu if proxy else 0.0
    finally:
        gc.enable()
        gc.unfreeze()
        await load.stop()
    units = record.requests if isinstance(point, SmallPoint) else record.events
    if not units or not record.ttft_s:
        why = record.failures[0] if record.failures else "nothing was answered in time"
        raise FailedError(f"{point.label}: {why}")
    return Measured(
        units=units,
        seconds=seconds,
        cpu_s=max(0.0, spent - idle * seconds) if proxy else None,
        ttft_p50_s=quantile(record.ttft_s, 0.5),
        ttft_p99_s=quantile(record.ttft_s, 0.99),
        gap_p50_s=quantile(record.gap_s, 0.5) if record.gap_s else None,
        gap_p99_s=quantile(record.gap_s, 0.99) if record.gap_s else None,
        rss_bytes=rss or None,
        failures=len(record.failures),
        failure=record.failures[0] if record.failures else "",
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The nearest-rank quantile of at least one value."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
