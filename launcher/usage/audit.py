"""The audit trail of a running daemon: takes entries at once, and one thread writes them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from launcher.config.schema import Audit
from launcher.errors import reason
from launcher.usage.audit_chain import ControlEntry
from launcher.usage.audit_writer import Writer
from launcher.usage.entry import Entry

log = logging.getLogger("launcher.audit")

# Between writes: what SIGKILL may lose.
TURN_S: Final = 1.0
# Entries that wait for the disk, about 0.5 KB each; more are lost, and counted.
MAX_WAITING: Final = 100_000
# Lines for one write and fsync.
MAX_BATCH: Final = 4096
# Lines encoded before other threads may run: 0.3 ms, where the interpreter itself would let them wait 5 ms.
_LINES_AT_ONCE: Final = 128
# A write that takes longer: the disk hangs.
STALL_S: Final = 5.0
# For the first write at the start of the daemon, and the last at its end.
START_S: Final = 5.0
STOP_S: Final = 10.0

_NOT_OPEN: Final = "it is not open yet"
_FULL: Final = "more entries than could be written"


class AuditState(NamedTuple):
    lines: int
    lost: int
    why: str  # it cannot be written; "" where it can


class AuditTrail:
    """`record` and `control` are called in the event loop, never wait and never raise."""

    def __init__(
        self, folder: Path, settings: Audit, version: str, clock: Callable[[], float] = time.time
    ) -> None:
        self._folder = folder
        self._strict = settings.strict
        self._clock = clock
        self._writer = Writer(folder, settings, version, clock)
        self._waiting: deque[Entry | ControlEntry] = deque()
        self._lost = 0
        """Written by the event loop only."""
        self._lost_recorded = 0
        """Written by the thread only, as all that follows."""
        self._why = _NOT_OPEN
        self._failed_since = clock()
        self._turn_began: float | None = None
        self._first_turn = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)

    # --- the event loop's side -----------------------------------------------------------------------

    def record(self, entry: Entry | ControlEntry) -> None:
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(entry)
        else:
            self._lost += 1

    def refusal(self) -> str | None:
        """With `strict`: why no request may be served now."""
        return (self._problem() or None) if self._strict else None

    @property
    def state(self) -> AuditState:
        return AuditState(self._writer.lines, self._lost + self._writer.unfit, self._problem())

    def _problem(self) -> str:
        began = self._turn_began
        if self._why or began is None or time.monotonic() - began <= STALL_S:
            return self._why
        return f"a write takes longer than {STALL_S:g} s"

    def start(self) -> None:
        """Begin to write; returns when the first line is on the disk, or when it could not be written."""
        self._thread.start()
        self._first_turn.wait(START_S)

    def stop(self) -> None:
        """Write what waits, and the line that says that nothing is missing. Also without `start`, and again."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)
        if left := len(self._waiting) + self._writer.unsaved:
            log.error("audit trail '%s': %d entries could not be written", self._folder, left)

    # --- the thread's side ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(TURN_S if self._first_turn.is_set() else 0):
            self._try(last=False)
            self._first_turn.set()
        self._try(last=True)
        self._writer.close()

    def _try(self, *, last: bool) -> None:
        self._turn_began = time.monotonic()
        try:
            self._turn(last=last)
        except OSError as error:
            self._fail(reason(error), None)
        except Exception as error:  # the thread must not end: nothing would be recorded any longer
            self._fail(f"{type(error).__name__}: {error}", error)
        else:
            if self._why and self._why is not _NOT_OPEN:
                log.info("audit trail '%s' is written again", self._folder)
            self._why = ""
        self._turn_began = None

    def _fail(self, why: str, error: Exception | None) -> None:
        if not self._why or self._why is _NOT_OPEN:
            self._failed_since = self._clock()
            then = "requests are refused" if self._strict else "requests are served unrecorded"
            log.error(
                "cannot write the audit trail in '%s': %s; %s until it can be written again",
                self._folder, why, then, exc_info=error,
            )  # fmt: skip
        self._why = why

    def _turn(self, *, last: bool) -> None:
        writer, waiting = self._writer, self._waiting
        writer.turn()
        while waiting:
            count = min(len(waiting), MAX_BATCH)
            for _ in range(0, count, _LINES_AT_ONCE):
                writer.add(_taken(waiting, _LINES_AT_ONCE))
                time.sleep(0)  # others run
            writer.store()
        if (lost := self._lost + writer.unfit) > self._lost_recorded:
            writer.lost(lost - self._lost_recorded, self._failed_since, self._why or _FULL)
            self._lost_recorded = lost
        if last:
            writer.stopped()
        writer.store()


def _taken(waiting: deque[Entry | ControlEntry], most: int) -> Iterator[Entry | ControlEntry]:
    for _ in range(min(most, len(waiting))):
        yield waiting.popleft()
