"""What units print, read back from the journal: it was there before this daemon and is there after it.

One thread reads for all units; a person reads the same lines with `journalctl --unit`. Lines are found by
_SYSTEMD_UNIT, which journald has from systemd when a unit's output is opened. Slice and invocation it looks up
when a line arrives: they are missing where the writer has ended by then.
Source: sd-journal(3), systemd.journal-fields(7), io.systemd.Journal in systemd-journald.service(8).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol

from msgspec import Struct

from launcher.base.background import RETRY_S, Failures

log = logging.getLogger("launcher.host")

# At most so often, however much the host logs: each reading costs the daemon about 50 µs.
READ_S: Final = 0.1
# Lines of all units that are read at once, 50 us of CPU each.
READ_LINES: Final = 1000
# Lines that are passed on in one turn of the event loop, 30 us of CPU each.
LINES_A_TURN: Final = 50
# Where nothing is logged, so long until a wish to stop or to catch up is seen.
WAIT_S: Final = 0.25
# journald answers `Synchronize` once it has written what it had received.
SYNC_S: Final = 3.0
SYNC_SOCKET: Final = "/run/systemd/journal/io.systemd.journal"
SYNC_CALL: Final = b'{"method":"io.systemd.Journal.Synchronize","parameters":{}}\0'
# A line longer than this is cut, as spawn_direct does.
MAX_LINE_BYTES: Final = 8192


class Line(Struct, frozen=True):
    unit: str
    time: float
    """Seconds since the epoch."""
    text: str


class Limit(Protocol):
    """Limits the lines of one unit that are passed on. Called by one thread; `now` in seconds."""

    @property
    def holding(self) -> bool:
        """`take` wants to be called again soon, also without new lines."""

    def take(self, lines: Sequence[Line], now: float) -> Sequence[Line]: ...

    def rest(self) -> Sequence[Line]:
        """All lines that are held back."""


class Feed(Protocol):
    """New lines of a growing set of units. Blocks; raises OSError."""

    def new(self, units: frozenset[str]) -> Iterator[Line]: ...
    def wait(self, seconds: float) -> None: ...
    def close(self) -> None: ...


class Follower:
    """Passes new lines of units to their listeners, as far as the limit of each unit lets them."""

    def __init__(self, open_feed: Callable[[float], Feed] | None = None) -> None:
        """`open_feed`: of lines since then, in seconds since the epoch; None: the journal's."""
        self._loop = asyncio.get_running_loop()
        self._open_feed = open_feed or _Feed
        self._listeners: dict[str, Callable[[Line], None]] = {}
        self._arrived: deque[Line | int] = (
            deque()
        )  # lines, and numbers of wishes that are fulfilled behind them
        # Both are replaced, not changed: the thread reads them.
        self._units: frozenset[str] = frozenset()
        self._limits: dict[str, Limit] = {}
        self._stop = threading.Event()
        self._wanted = 0
        self._done = 0
        self._caught_up = asyncio.Condition()
        self._thread: threading.Thread | None = None
        self.since = time.time()
        """Older lines are `history`."""

    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="journal", daemon=True)
            self._thread.start()

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stop.set()
            await asyncio.to_thread(thread.join)

    def listen(self, unit: str, hear: Callable[[Line], None], limit: Limit) -> None:
        """From now on `hear` gets the unit's lines, in the event loop."""
        self._listeners[unit] = hear
        self._limits = self._limits | {unit: limit}
        self._units |= {unit}

    def ignore(self, unit: str) -> None:
        """End `listen` for a unit."""
        self._listeners.pop(unit, None)
        self._limits = {name: limit for name, limit in self._limits.items() if name != unit}

    async def catch_up(self, within_s: float) -> None:
        """Return when all that units had printed before this call has been handed over, or time is over."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(within_s):
                await _synchronize()
                self._wanted += 1
                wanted = self._wanted
                async with self._caught_up:
                    await self._caught_up.wait_for(lambda: self._done >= wanted)

    def _read(self) -> None:
        feed: Feed | None = None
        failures = Failures(log, "journal: read what instances print")
        while not self._stop.is_set():
            try:
                if feed is None:
                    feed = self._open_feed(self.since)
                wanted = self._wanted
                read = list(islice(feed.new(self._units), READ_LINES))
                all_read = len(read) < READ_LINES
                lines = self._limited(read, rest=all_read and wanted != self._done)
                if lines or (all_read and wanted != self._done):
                    self._loop.call_soon_threadsafe(self._receive, lines, wanted if all_read else None)
                failures.end()
                self._stop.wait(READ_S)
                if all_read:
                    feed.wait(WAIT_S)
            except Exception as error:  # also for an odd entry: the other units still need this task
                if self._loop.is_closed():
                    break
                failures.add(error)
                feed, self.since = None, time.time()
                self._stop.wait(RETRY_S)
        if feed is not None:
            feed.close()

    def _limited(self, lines: Sequence[Line], *, rest: bool) -> list[Line]:
        """The lines to pass on of those that were read; `rest`: with all that is held back."""
        of_unit: dict[str, list[Line]] = {}
        for line in lines:
            of_unit.setdefault(line.unit, []).append(line)
        passed: list[Line] = []
        for unit, limit in self._limits.items():
            if unit in of_unit or limit.holding:
                passed += limit.take(of_unit.get(unit, ()), time.monotonic())
            if rest:
                passed += limit.rest()
        return passed

    def _receive(self, lines: list[Line], wanted: int | None) -> None:
        """`wanted`: all lines have come that this wish, and those before it, waited for."""
        idle = not self._arrived
        self._arrived += lines
        if wanted is not None:
            self._arrived.append(wanted)
        if idle and self._arrived:
            self._deliver()

    def _deliver(self) -> None:
        """One turn's."""
        for _ in range(min(LINES_A_TURN, len(self._arrived))):
            line = self._arrived.popleft()
            if isinstance(line, int):
                self._fulfil(line)
            elif (hear := self._listeners.get(line.unit)) is not None:
                hear(line)
        if self._arrived:
            self._loop.call_soon(self._deliver)

    def _fulfil(self, wanted: int) -> None:
        if wanted != self._done:
            self._done = wanted
            task = self._loop.create_task(self._tell(), name="journal caught up")
            task.add_done_callback(lambda _: None)

    async def _tell(self) -> None:
        async with self._caught_up:
            self._caught_up.notify_all()


class _Feed:
    """New lines of a growing set of units. Blocks; raises OSError."""

    def __init__(self, since: float) -> None:
        self._since = since
        self._reader = _open()
        self._units: frozenset[str] = frozenset()
        self._cursor: str | None = None
        self._lines = _Lines()
        self._rest: Iterator[Line] = iter(())  # of the entry that was read last

    def new(self, units: frozenset[str]) -> Iterator[Line]:
        if units != self._units:
            self._match(units)
        if not units:
            return
        yield from self._rest
        while entry := self._reader.get_next():
            if entry["__CURSOR"] != self._cursor:  # the one that we went back to
                self._cursor = entry["__CURSOR"]
                self._rest = iter([*self._lines.of(entry)])  # a generator would end with the caller's reading
                yield from self._rest

    def _match(self, units: frozenset[str]) -> None:
        """Changed matches need a new position: just after what was read last."""
        self._units = units
        self._reader.flush_matches()
        _add_matches(self._reader, units)
        if self._cursor is None:
            self._reader.seek_realtime(self._since)
        else:
            self._reader.seek_cursor(self._cursor)

    def wait(self, seconds: float) -> None:
        self._reader.wait(seconds)
        self._reader.process()

    def close(self) -> None:
        self._reader.close()


def history(unit: str, invocation: str, count: int, before: float) -> list[Line]:
    """The last `count` lines of a unit's invocation before a time, oldest first. Blocks. Raises OSError."""
    reader = _open()
    try:
        _add_matches(reader, {unit})
        reader.seek_realtime(before)
        entries: list[Mapping[str, Any]] = []
        while len(entries) < count and (entry := reader.get_previous()):
            if str(entry.get("_SYSTEMD_INVOCATION_ID", invocation)).replace("-", "") != invocation:
                break  # an earlier invocation
            entries.append(entry)
        lines = _Lines()
        return [line for entry in reversed(entries) for line in lines.of(entry) if line.time < before][
            -count:
        ]
    finally:
        reader.close()


def _open() -> Any:
    from systemd import journal  # noqa: PLC0415  scripts/quickstart leaves it out for llama.cpp

    return journal.Reader(converters={"MESSAGE": lambda value: value.decode(errors="replace")})


def _add_matches(reader: Any, units: Iterable[str]) -> None:
    for unit in sorted(units):
        reader.add_match(f"_SYSTEMD_UNIT={unit}")
    reader.add_match("_TRANSPORT=stdout")


class _Lines:
    """Journal entries, in order, as the lines that were printed."""

    def __init__(self) -> None:
        self._broken: set[str] = set()
        """Streams whose last entry journald had to cut (LineMax=): their next one is the rest of that line."""

    def of(self, entry: Mapping[str, Any]) -> Iterator[Line]:
        """One entry's; carriage returns of progress bars end a line."""
        stream = str(entry.get("_STREAM_ID"))
        is_rest = stream in self._broken
        if entry.get("_LINE_BREAK") == "line-max":
            self._broken.add(stream)
        else:
            self._broken.discard(stream)
        if is_rest:
            return
        when = entry["__REALTIME_TIMESTAMP"].timestamp()
        for text in str(entry.get("MESSAGE", "")).split("\r"):
            if text.strip():
                cut = text.encode()[:MAX_LINE_BYTES].decode(errors="ignore")
                yield Line(str(entry.get("_SYSTEMD_UNIT", "")), when, cut.rstrip())


async def _synchronize() -> None:
    """Ask journald to write what it has received. Raises OSError, TimeoutError."""
    async with asyncio.timeout(SYNC_S):
        reading, writing = await asyncio.open_unix_connection(SYNC_SOCKET)
        try:
            writing.write(SYNC_CALL)
            await reading.readuntil(b"\0")
        except asyncio.IncompleteReadError:
            return  # too old to know it
        finally:
            writing.close()
