"""Records the history of the machine every 2 s, and answers from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from launcher.base.background import Failures
from launcher.base.errors import LauncherError, reason
from launcher.telemetry.engine_metrics import EngineCounts, EngineRates, Rates
from launcher.telemetry.history import Found, History, Reply
from launcher.telemetry.history_columns import KEPT, Row, SlotValues, rounded
from launcher.telemetry.history_file import HOUR, HistoryFile, MemoryStore
from launcher.telemetry.quantiles import counted

log = logging.getLogger("launcher.history")


# --- What is read every 2 s, and the rows between two readings. ---

# A reading that is up to so many steps late is shown as its mean in each of them; what is later leaves a gap.
_MOST_LATE: Final = 5
# Rates of a shorter time are noise; the clock was set back.
_LEAST_S: Final = 0.5
# A step of the clock that differs from the elapsed time by more: the clock was set.
_CLOCK_S: Final = 1.5
_HOUR_S: Final = 3600


@dataclass(frozen=True, slots=True)
class SlotSample:
    slot: int
    state: str
    in_flight: int
    kv_usage: float | None
    kv_tokens: int | None
    """Capacity of its KV cache."""
    cpus: tuple[int, ...]
    counts: EngineCounts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
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
            tuple(_slot(slot, slots[slot.slot], now.busy) for slot in now.slots),
            counted(now.first_tokens),
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
        slot.slot, slot.state, None if rates is None else rates.output_tokens, slot.in_flight, slot.kv_usage,
        _mean([busy[cpu] for cpu in slot.cpus if cpu in busy]),
    )  # fmt: skip


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None


# Between two tries to open a file that could not be used, and two looks whether it is still there.
LOOK_S: Final = 60.0
_STEP_S: Final = HOUR.step_ms / 1000
# For a row that is being written.
_CLOSE_S: Final = 5.0
_REMEDY: Final = "see that the disk of [telemetry] history_path works"
T = TypeVar("T")


class Recorder:
    """`path`: None keeps the history in memory. `sample` reads the daemon and the machine.

    The file is read and written in one thread, so that a slow disk holds up no request."""

    def __init__(
        self,
        path: Path | None,
        sample: Callable[[], Awaitable[Sample]],
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._path = path
        self._sample = sample
        self._clock = clock
        self._sleep = sleep
        self._sampling = Sampling()
        self._thread = ThreadPoolExecutor(1, "history")
        self._file: HistoryFile | None = None
        self._history: History | None = None
        self._look_at = 0.0
        self.problem = ""
        """Why the history is in memory only; empty where it is in the file."""
        self.failures = Failures(log, "record the history")

    async def run(self) -> None:
        """Until it is cancelled."""
        ms = await self._next(0)
        while True:
            sample = await self._sample()
            await self._in_thread(partial(self._add, self._sampling.rows(sample, ms)))
            self.failures.end()
            ms = await self._next(ms)

    async def _next(self, last: int) -> int:
        """Sleep until a step after `last` ends; its end. The clock may be set meanwhile."""
        now = self._clock()
        wait_s = _STEP_S - now % _STEP_S
        if round((now + wait_s) / _STEP_S) * HOUR.step_ms == last:
            wait_s += _STEP_S  # it woke up a moment before the step's end
        await self._sleep(wait_s)
        return round(self._clock() / _STEP_S) * HOUR.step_ms

    async def answer(self, span: str, after: int, slots: str) -> bytes:
        """The reply of ``GET /v1/history``. Raises LauncherError."""
        found = await self._in_thread(partial(self._find, span, after))
        reply = Reply(found, slots)
        text = bytearray(reply.head)
        for part in reply.parts:
            text += reply.rows(await self._in_thread(partial(self._read, found, *part)), part[1])
        return bytes(text + reply.tail)

    async def close(self) -> None:
        """After `run` has ended. Also without it, and again."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(self._thread.shutdown), _CLOSE_S)
        if self._file is not None:
            self._file.close()
        self._file = self._history = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with it now."""
        failed = f"the history is not recorded: {self.failures.last}" if self.failures.count else ""
        return tuple(filter(None, (self.problem, failed)))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # --- in the thread -------------------------------------------------------------------------

    def _find(self, span: str, after: int) -> Found:
        return self._opened().find(span, after, self._now_ms())

    def _read(self, found: Found, after: int, until: int) -> bytes:
        try:
            return found.ring.read(after, until)
        except OSError as error:
            raise LauncherError(f"cannot read the history '{self._path}': {reason(error)}", _REMEDY) from None

    def _add(self, rows: Sequence[Row]) -> None:
        self._opened().add(rows)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _opened(self) -> History:
        """With the rows so far, where the file was removed or could not be used before."""
        if self._history is None or (self._path is not None and time.monotonic() >= self._look_at):
            self._look_at = time.monotonic() + LOOK_S
            self._look()
        if self._history is None:
            self._history = History(MemoryStore(), self._now_ms())
        return self._history

    def _look(self) -> None:
        before = self._file
        if self._path is None or (before is not None and not before.replaced):
            return
        try:
            file = HistoryFile(self._path)
        except LauncherError as error:
            self._complain(error)
            return
        try:
            history = History(file, self._now_ms())
            if self._history is not None:
                history.take(self._history)
        except OSError as error:
            file.close()
            self._complain(LauncherError(f"cannot read the history '{self._path}': {reason(error)}", _REMEDY))
            return
        self._file, self._history = file, history
        if before is not None:
            before.close()
            log.warning("history '%s' was removed; a new one begins", self._path)
        self._report(file)

    def _complain(self, error: LauncherError) -> None:
        problem = f"{error.message}; {error.remedy}; the history is kept in memory"
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _report(self, file: HistoryFile) -> None:
        if file.moved_to is not None:
            log.warning(
                "history '%s' is broken or of another version: moved to '%s', a new one begins",
                self._path,
                file.moved_to,
            )
        if self.problem:
            log.info("history '%s' is written", self._path)
        self.problem = ""
