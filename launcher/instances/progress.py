"""Whether an instance with work in flight makes progress. Pure; watch.py probes, this judges.

A hung engine may answer its health path (vllm#36451), and a busy one may not. Progress is what its own counters show, and
the events that the proxy relays from it. Comments are no events: a hung engine's API server goes on writing them.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.telemetry.engine_metrics import EngineMetrics

# At this cpu pressure (PSI, some avg60, percent) an instance may be slow for want of cpu time.
STARVED_PERCENT: Final = 60.0
# A starved instance gets this many times stall_timeout_s.
STARVED_PATIENCE: Final = 4.0


class Observation(Struct, frozen=True):
    at: float
    responsive: bool
    """The health path answered in time, with any status."""
    counters: EngineMetrics | None
    """None: the engine has none, or did not answer."""
    in_flight: int
    """Requests that the proxy has on it."""
    relayed: int
    """Reads that brought a part of a response from this instance, comments excepted; one for each event of most streams."""

    @property
    def busy(self) -> bool:
        engine = self.counters.running + self.counters.waiting if self.counters else 0
        return self.in_flight > 0 or engine > 0


class Progress(Struct, frozen=True):
    last: Observation | None = None
    counted: EngineMetrics | None = None
    """The last counters; None before the first."""
    moved_at: float = 0.0
    """When it last made progress or was idle."""
    proved_at: float = 0.0
    """When it last did work: a token, an engine step, a relayed event."""
    tokens_per_s: float | None = None
    """Between the last two observations with counters."""


def started(now: float) -> Progress:
    """Of an instance whose first completion has just come back."""
    return Progress(moved_at=now, proved_at=now)


def proved(before: Progress, now: float) -> Progress:
    """A completion has just come back."""
    return replace(before, moved_at=now, proved_at=now)


def observe(before: Progress, seen: Observation) -> Progress:
    """`before` with one more observation.

    1. A rise of its own counters, or of the events that the proxy relayed, is progress.
    2. For an instance without counters an answer of its health path is progress. So it is for rounded counters:
       llama-server's metrics page is written by the loop that computes (server-context.cpp, get_metrics).
    3. An idle instance does not stall. One that stalled with work and then stops answering is not taken for idle: the
       proxy has moved its requests to other instances meanwhile (proxy.hung_timeout_s)."""
    old, new = before.counted, seen.counters
    stepped = new is not None and (old is None or (new.generated, new.steps) != (old.generated, old.steps))
    relayed = before.last is None or seen.relayed != before.last.relayed
    worked = stepped or relayed
    unsure = new.rounded if new is not None else before.counted is None
    assumed = unsure and seen.responsive
    rate = before.tokens_per_s
    if new is not None and old is not None and before.last is not None and seen.at > before.last.at:
        rate = max(0, new.generated - old.generated) / (seen.at - before.last.at)
    return replace(
        before,
        last=seen,
        counted=new or old,
        moved_at=seen.at if worked or assumed or _idle(before, seen) else before.moved_at,
        proved_at=seen.at if worked else before.proved_at,
        tokens_per_s=rate,
    )


def _idle(before: Progress, seen: Observation) -> bool:
    stalled = before.last is not None and before.moved_at < before.last.at
    silent = not seen.responsive and seen.counters is None
    return not _busy(before, seen) and not (stalled and silent)


def _busy(before: Progress, seen: Observation) -> bool:
    """Without an answer, the last counters count."""
    if seen.counters is None and before.counted is not None:
        return seen.in_flight > 0 or before.counted.running + before.counted.waiting > 0
    return seen.busy


def patience(stall_timeout_s: float, pressure: float | None) -> float:
    """Seconds without progress that are allowed. `pressure`: cpu PSI, some avg60 in percent; None where it is unknown."""
    starved = pressure is not None and pressure >= STARVED_PERCENT
    return stall_timeout_s * STARVED_PATIENCE if starved else stall_timeout_s


def stall(progress: Progress, now: float, stall_timeout_s: float, pressure: float | None) -> tuple[str, ...]:
    """Evidence of a hang: requests in flight and no progress for longer than `patience`; empty where there is none."""
    stalled_s = now - progress.moved_at
    seen = progress.last
    if seen is None or stalled_s < patience(stall_timeout_s, pressure):
        return ()
    counted = progress.counted
    limit = f"supervision.stall_timeout_s is {stall_timeout_s:.0f}"
    lines = [f"{seen.in_flight} requests in flight and no progress for {stalled_s:.0f} s ({limit})"]
    if counted is not None:
        fresh = "" if seen.counters is not None else " (its /metrics no longer answer)"
        lines.append(
            f"its counters do not rise: {counted.generated} tokens generated, {counted.steps} steps, "
            f"{counted.running} running, {counted.waiting} waiting{fresh}"
        )
    lines.append(f"the proxy relayed {seen.relayed} events from it, none in this time")
    return (*lines, pressure_line(pressure))


def pressure_line(pressure: float | None) -> str:
    if pressure is None:
        return "cpu pressure: unknown (no /proc/pressure/cpu)"
    word = "starved" if pressure >= STARVED_PERCENT else "not starved"
    return f"cpu pressure: tasks waited {pressure:.0f} % of the last minute (/proc/pressure/cpu, some avg60): {word}"


def canary_is_due(progress: Progress, now: float, interval_s: float) -> bool:
    """Whether an instance is idle and its last work is `interval_s` ago."""
    return progress.last is not None and not progress.last.busy and now - progress.proved_at >= interval_s
