"""The thread that writes the usage ledger: batches, retries after failures, the bound on what waits in memory."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from launcher.config.schema import Usage
from launcher.errors import LauncherError, reason
from launcher.usage.columns import check
from launcher.usage.entry import Entry
from launcher.usage.ledger_file import LedgerFile, Metered, is_broken, move_aside
from launcher.usage.schema import LOST
from launcher.usage.spans import hour_begin, zone_of

log = logging.getLogger("launcher.usage")

# Between two batches: SIGKILL loses what has waited for less. After a failure it is the time until the next try.
BATCH_S: Final = 1.0
# While the file cannot be written; some 60 MB. What comes after is lost, and counted.
MOST_WAITING: Final = 100_000
# Entries of one transaction: Python's lock is held for a few milliseconds at a time.
_SLICE: Final = 2_000
# Of one turn, so that a backlog does not take the event loop's time for seconds.
_SLICES: Final = 10
_PRUNE_S: Final = 60.0
_DAY_S: Final = 86_400
# What a batch raises whose entries cannot be encoded, summed up or bound to a statement: another try would fail as well.
_UNUSABLE: Final = (
    TypeError, ValueError, OverflowError, sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.IntegrityError,
)  # fmt: skip

Sample = tuple[float, str, str, float]  # Unix time, what, name, amount


@dataclass(frozen=True, slots=True)
class State:
    """What the writer has done, replaced as a whole after each turn."""

    recorded: int = 0
    """Entries written since the start."""
    lost: int = 0
    """Entries that could not be written, and did not find room in memory."""
    problem: str = ""
    """Why the ledger cannot be written now; empty where it can."""
    remedy: str = ""
    moved_to: Path | None = None
    """Where a broken file of the ledger has been moved to since the start."""
    file_bytes: int = 0

    @property
    def ok(self) -> bool:
        return not self.problem


class Writer:
    """`entries` and `samples` are appended to by other threads; the writer removes from their fronts what is written."""

    def __init__(
        self,
        settings: Usage,
        path: Path,
        entries: list[Entry],
        samples: list[Sample],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._zone = settings.zone
        self._hour_of = partial(hour_begin, zone=zone_of(settings.zone))
        self._keep_s = settings.keep_days * _DAY_S
        self._path = path
        self._entries = entries
        self._samples = samples
        self._clock = clock
        self._file: LedgerFile | None = None
        self._prune_at = 0.0
        self._said = ""
        self._lost_in: Counter[int] = Counter()  # by hour: lost entries that the file does not tell of yet
        self._turns = threading.Condition()
        self._asked = self._answered = 0
        self._stopping = False
        self.state = State()

    def run(self) -> None:
        """Until `stop`."""
        while True:
            with self._turns:
                self._turns.wait_for(lambda: self._asked > self._answered or self._stopping, BATCH_S)
                asked, stopping = self._asked, self._stopping
            self._turn()
            with self._turns:
                self._answered = asked
                self._turns.notify_all()
            if stopping:
                break
        self._end()

    def stop(self) -> None:
        """Write what waits, close the file, and end."""
        with self._turns:
            self._stopping = True
            self._turns.notify_all()

    def flush(self, within_s: float) -> bool:
        """Write what waits now; whether the ledger has all that was entered before."""
        with self._turns:
            self._asked = mine = self._asked + 1
            self._turns.notify_all()
            return self._turns.wait_for(lambda: self._answered >= mine, within_s) and self.state.ok

    def _turn(self) -> None:
        try:
            for _ in range(_SLICES):
                if not self._write(self._opened()):
                    break
            file = self._opened()
            self._prune(file)
            self._succeeded(file)
        except sqlite3.Error as error:
            self._failed(error)
        except OSError as error:
            self._fail(
                f"cannot write the usage ledger '{self._path}': {reason(error)}",
                f"let the daemon's user write in '{self._path.parent}', or name another file in [usage] path",
            )
        except LauncherError as error:
            self._fail(error.message, error.remedy)
        except Exception as error:
            if not self._said:
                log.exception("usage ledger '%s': unexpected error", self._path)
            self._fail(
                f"cannot write the usage ledger '{self._path}': {error!r}",
                "report this with the daemon's log",
            )
        self._bound()

    def _opened(self) -> LedgerFile:
        if self._file is not None and self._file.replaced:
            log.error("usage ledger '%s' was removed by somebody; a new one begins", self._path)
            self._close()
        if self._file is None:
            self._file = LedgerFile(self._path, self._zone, self._hour_of, self._clock())
        return self._file

    def _write(self, file: LedgerFile) -> bool:
        """Whether there may be more to write."""
        batch, samples = self._entries[:_SLICE], self._samples[:_SLICE]
        if not batch and not samples and not self._lost_in:
            return False
        try:
            file.write(batch, self._metered(samples))
        except _UNUSABLE:
            log.exception("usage ledger: entries cannot be written")
            self._close()
            self._remove_unusable(batch)
            del self._samples[: len(samples)]
            return False
        self.state = replace(self.state, recorded=self.state.recorded + len(batch))
        del self._entries[: len(batch)]
        del self._samples[: len(samples)]
        self._lost_in.clear()
        return len(batch) == _SLICE

    def _metered(self, samples: list[Sample]) -> Metered:
        sums: defaultdict[tuple[str, int, str], float] = defaultdict(float)
        for at, what, name, amount in samples:
            sums[what, self._hour_of(at), name] += amount
        for hour, count in self._lost_in.items():
            sums[LOST, hour, ""] += count
        return sums

    def _prune(self, file: LedgerFile) -> None:
        now = self._clock()
        if not 0 <= self._prune_at - now <= _PRUNE_S:  # also after the clock was set
            more = file.prune(now - self._keep_s)
            self._prune_at = 0.0 if more else now + _PRUNE_S

    def _failed(self, error: sqlite3.Error) -> None:
        self._close()
        if not is_broken(error):
            self._fail(
                f"cannot write the usage ledger '{self._path}': {error}",
                f"see that the file system of '{self._path.parent}' has space and can be written",
            )
            return
        try:
            moved = move_aside(self._path, self._clock())
        except LauncherError as refused:
            self._fail(refused.message, refused.remedy)
        except OSError as failed:
            self._fail(
                f"cannot move the broken usage ledger '{self._path}' aside: {reason(failed)}",
                f"move it away, or let the daemon's user write in '{self._path.parent}'",
            )
        else:
            self.state = replace(self.state, moved_to=moved)
            log.error(
                "usage ledger '%s' is broken (%s): moved to '%s', a new one begins; "
                "what can be read of it: sqlite3 '%s' .recover", self._path, error, moved, moved,
            )  # fmt: skip

    def _fail(self, problem: str, remedy: str) -> None:
        self._close()
        self.state = replace(self.state, problem=problem, remedy=remedy)
        if problem != self._said:
            self._said = problem
            log.error("%s; %s; requests are served, their entries wait in memory", problem, remedy)

    def _succeeded(self, file: LedgerFile) -> None:
        if self._said:
            log.info(
                "usage ledger '%s' is written again; entries lost since the start: %d",
                self._path,
                self.state.lost,
            )
        self._said = ""
        self.state = replace(self.state, problem="", remedy="", file_bytes=file.size)

    def _bound(self) -> None:
        del self._samples[MOST_WAITING:]
        extra = len(self._entries) - MOST_WAITING
        if extra > 0:
            # Other threads append behind these meanwhile.
            del self._entries[MOST_WAITING : MOST_WAITING + extra]
            self._lose(extra)

    def _lose(self, count: int) -> None:
        # Their requests ended a moment ago: every turn looks at the bound.
        self._lost_in[self._hour_of(self._clock())] += count
        if not self.state.lost:
            log.error("usage ledger: entries are lost, %d so far", count)
        self.state = replace(self.state, lost=self.state.lost + count)

    def _remove_unusable(self, batch: list[Entry]) -> None:
        """Entries that no file can take; all of them where none is found, so that the same error does not come again."""
        usable = [entry for entry in batch if check(entry)]
        if len(usable) == len(batch):
            usable = []
        self._entries[: len(batch)] = usable
        self._lose(len(batch) - len(usable))

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except sqlite3.Error as error:
                log.warning("usage ledger '%s': cannot close: %s", self._path, error)

    def _end(self) -> None:
        self._close()
        if self._entries:
            log.error(
                "usage ledger '%s': the daemon stops, %d entries are lost", self._path, len(self._entries)
            )
