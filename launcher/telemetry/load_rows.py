"""What is read of the machine every 2 s, and the rows of the history between two readings. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.telemetry.engine_metrics import EngineCounts, EngineRates, Rates
from launcher.telemetry.history import HOUR
from launcher.telemetry.history_columns import KEPT, Row, SlotValues, rounded
from launcher.telemetry.quantiles import counted

# A reading that is up to so many steps late is shown as its mean in each of them; what is later leaves a gap.
_MOST_LATE: Final = 5
# Rates of a shorter time are noise; the clock was set back.
_LEAST_S: Final = 0.5
# A step of the clock that differs from the elapsed time by more: the clock was set.
_CLOCK_S: Final = 1.5
_HOUR_S: Final = 3600


class SlotSample(Struct, frozen=True):
    slot: int
    state: str
    in_flight: int
    kv_usage: float | None
    kv_tokens: int | None
    """Capacity of its KV cache."""
    cpus: tuple[int, ...]
    counts: EngineCounts | None


class Sample(Struct, frozen=True, kw_only=True):
    at: float
    """Monotonic."""
    totals: Mapping[str, float]
    """Counters since the daemon's start, by the column of their rate."""
    gauges: Mapping[str, float | None]
    """By column."""
    spent: float | None
    """On overflow since the daemon's start; None without prices."""
    first_tokens: tuple[float, ...]
    """Seconds, of the streams whose first token came since the previous sample."""
    busy: Mapping[int, float]
    """Share of each CPU's time since the previous sample."""
    slots: tuple[SlotSample, ...]


class Sampling:
    """Makes rows of samples. The first sample makes none: rates need two."""

    def __init__(self) -> None:
        self._engines = EngineRates()
        self._before: tuple[Sample, int] | None = None

    def rows(self, now: Sample, ms: int) -> list[Row]:
        """`ms`: the step's end that the sample was taken at."""
        before = self._before
        if before is not None and 0 <= now.at - before[0].at < _LEAST_S:
            return []
        self._before = (now, ms)
        slots = {slot.slot: self._engines.rates(slot.slot, slot.counts, now.at) for slot in now.slots}
        self._engines.keep(frozenset(slots))
        if before is None or now.at < before[0].at:
            return []
        elapsed = now.at - before[0].at
        values = _host(before[0], now, elapsed, slots)
        row = Row(
            ms,
            HOUR.step_ms // 1000,
            tuple(rounded(values[name]) for name in KEPT),
            counted(now.first_tokens),
            tuple(_slot(slot, slots[slot.slot], now.busy) for slot in now.slots),
        )
        late = range(before[1] + HOUR.step_ms, ms, HOUR.step_ms)
        if len(late) >= _MOST_LATE or abs(elapsed - (ms - before[1]) / 1000) > _CLOCK_S:
            late = range(0)
        return [*(replace(row, ms=each, first_tokens={}) for each in late), row]


def _host(
    before: Sample, now: Sample, elapsed: float, engines: Mapping[int, Rates | None]
) -> Mapping[str, float | None]:
    values: dict[str, float | None] = dict.fromkeys(KEPT)
    values |= now.gauges
    for name, total in now.totals.items():
        values[name] = max(0.0, total - before.totals.get(name, 0.0)) / elapsed
    known = [rates for rates in engines.values() if rates is not None]
    if known:
        # Engines count tokens as they come; the proxy when a request has ended.
        values["output_tokens_per_s"] = sum(rates.output_tokens for rates in known)
        values["prefix_queries_per_s"] = sum(rates.prefix_queries for rates in known)
        values["prefix_hits_per_s"] = sum(rates.prefix_hits for rates in known)
    values["first_token_p50_s"], values["first_token_p99_s"] = _quantiles(now.first_tokens)
    values["kv_usage"] = _kv_usage(now.slots)
    values["cpu_busy"] = _mean(now.busy.values())
    if now.spent is not None and before.spent is not None:
        overflow = max(0.0, now.spent - before.spent) / elapsed * _HOUR_S
        values["cost_per_hour"] = (values["cost_per_hour"] or 0.0) + overflow
    return values


def _quantiles(seconds: tuple[float, ...]) -> tuple[float | None, float | None]:
    if not seconds:
        return None, None
    ordered = sorted(seconds)
    return ordered[-(-len(ordered) * 50 // 100) - 1], ordered[-(-len(ordered) * 99 // 100) - 1]


def _kv_usage(slots: Iterable[SlotSample]) -> float | None:
    """Of the host's KV caches together; each counts the same where the size of one is unknown."""
    known = [(slot.kv_usage, slot.kv_tokens) for slot in slots if slot.kv_usage is not None]
    if any(not tokens for _, tokens in known):
        known = [(usage, 1) for usage, _ in known]
    if not known:
        return None
    return sum(usage * (tokens or 0) for usage, tokens in known) / sum(tokens or 0 for _, tokens in known)


def _slot(slot: SlotSample, rates: Rates | None, busy: Mapping[int, float]) -> SlotValues:
    return SlotValues(
        slot.slot,
        slot.state,
        None if rates is None else rounded(rates.output_tokens),
        slot.in_flight,
        rounded(slot.kv_usage),
        rounded(_mean([busy[cpu] for cpu in slot.cpus if cpu in busy])),
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None
