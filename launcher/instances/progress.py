"""Health is progress: whether an instance that has work moves. Pure; watcher.py looks, this judges.

An engine that hangs may answer its health path (vllm#36451), and one that is busy may not. So what counts are its own
counters, and what the proxy relays of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from launcher.telemetry.vllm_metrics import EngineMetrics

# Where tasks wait for a cpu this share of the time (PSI, some avg60, percent), an instance may be slow for want of it.
STARVED_PERCENT: Final = 60.0
# So many times longer may a starved one stand still.
STARVED_PATIENCE: Final = 4.0


@dataclass(frozen=True, slots=True)
class Look:
    """What one probe found."""

    at: float
    responsive: bool
    """The health path answered in time, whatever it said."""
    counters: EngineMetrics | None
    """None: it has none, or did not answer."""
    in_flight: int
    """Requests that the proxy has on it."""
    relayed: int
    """Events that the proxy has relayed from this instance."""

    @property
    def busy(self) -> bool:
        """It has something to do."""
        engine = self.counters.running + self.counters.waiting if self.counters else 0
        return self.in_flight > 0 or engine > 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What is remembered of one life's looks."""

    last: Look | None = None
    counted: EngineMetrics | None = None
    """The last counters seen; None while it has shown none."""
    moved_at: float = 0.0
    """When it last moved, or had nothing to do."""
    proved_at: float = 0.0
    """When it last did work: a token, a step, an event."""
    tokens_per_s: float | None = None
    """Between the last two looks that showed counters."""


def started(now: float) -> Progress:
    """A life that has just answered its first completion."""
    return Progress(moved_at=now, proved_at=now)


def proved(before: Progress, now: float) -> Progress:
    """It has just answered a completion."""
    return replace(before, moved_at=now, proved_at=now)


def observe(before: Progress, look: Look) -> Progress:
    """The memory after one more look.

    1. A counter of its own or of the proxy that rose is progress.
    2. An instance without counters is given the benefit: that it answers its health path counts as progress. So is
       one whose counters are rounded, when it answers with them: llama-server's are told by the loop that computes
       (server-context.cpp, get_metrics posts a task to it).
    3. One that has nothing to do stands still by right; not so one that stood still with work and then says nothing
       at all: the proxy has given its work to others meanwhile (proxy.hung_timeout_s).
    """
    old, new = before.counted, look.counters
    stepped = new is not None and (old is None or (new.generated, new.steps) != (old.generated, old.steps))
    relayed = before.last is None or look.relayed != before.last.relayed
    worked = stepped or relayed
    unsure = new.rounded if new is not None else before.counted is None
    benefit = unsure and look.responsive
    rate = before.tokens_per_s
    if new is not None and old is not None and before.last is not None and look.at > before.last.at:
        rate = max(0, new.generated - old.generated) / (look.at - before.last.at)
    return replace(
        before,
        last=look,
        counted=new or old,
        moved_at=look.at if worked or benefit or _rests(before, look) else before.moved_at,
        proved_at=look.at if worked else before.proved_at,
        tokens_per_s=rate,
    )


def _rests(before: Progress, look: Look) -> bool:
    stood_still = before.last is not None and before.moved_at < before.last.at
    silent = not look.responsive and look.counters is None
    return not _busy(before, look) and not (stood_still and silent)


def _busy(before: Progress, look: Look) -> bool:
    """One whose counters do not answer any more has what it had when they did."""
    if look.counters is None and before.counted is not None:
        return look.in_flight > 0 or before.counted.running + before.counted.waiting > 0
    return look.busy


def patience(stall_timeout_s: float, pressure: float | None) -> float:
    """How long it may stand still. `pressure`: PSI of the cpus, some avg60 in percent; None where it can't be read."""
    starved = pressure is not None and pressure >= STARVED_PERCENT
    return stall_timeout_s * STARVED_PATIENCE if starved else stall_timeout_s


def stall(progress: Progress, now: float, stall_timeout_s: float, pressure: float | None) -> tuple[str, ...]:
    """Evidence that it hangs: work in flight, and nothing has moved for longer than it may. Empty: it does not."""
    still_s = now - progress.moved_at
    look = progress.last
    if look is None or still_s < patience(stall_timeout_s, pressure):
        return ()
    counted = progress.counted
    limit = f"supervision.stall_timeout_s is {stall_timeout_s:.0f}"
    lines = [f"{look.in_flight} requests in flight and no progress for {still_s:.0f} s ({limit})"]
    if counted is not None:
        fresh = "" if look.counters is not None else " (its /metrics do not answer any more)"
        lines.append(
            f"its counters stand still: {counted.generated} tokens generated, {counted.steps} steps, "
            f"{counted.running} running, {counted.waiting} waiting{fresh}"
        )
    lines.append(f"the proxy relayed {look.relayed} events of it, none of them in this time")
    return (*lines, pressure_line(pressure))


def pressure_line(pressure: float | None) -> str:
    """The cpus' pressure for a person."""
    if pressure is None:
        return "cpu pressure: the kernel does not say (/proc/pressure/cpu)"
    word = "starved" if pressure >= STARVED_PERCENT else "not starved"
    return f"cpu pressure: tasks waited {pressure:.0f} % of the last minute (/proc/pressure/cpu, some avg60): {word}"


def canary_is_due(progress: Progress, now: float, interval_s: float) -> bool:
    """An idle instance that has not proved itself for `interval_s` is asked for one token."""
    return progress.last is not None and not progress.last.busy and now - progress.proved_at >= interval_s
