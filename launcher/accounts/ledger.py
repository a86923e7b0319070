"""The usage ledger as the rest of the daemon sees it: enter a request, meter seconds and joules, ask how it is."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LedgerFile, Metered
from launcher.accounts.ledger_reader import is_damage
from launcher.accounts.ledger_repair import check as damage_of
from launcher.accounts.ledger_repair import is_proven, move_aside
from launcher.accounts.ledger_schema import LOST, DamagedLedgerError
from launcher.accounts.report_values import hour_begin, zone_of
from launcher.accounts.sums import check
from launcher.base.clock import Clock
from launcher.base.errors import LauncherError, reason
from launcher.config.schema import Usage

log = logging.getLogger("launcher.usage")


# --- The thread that writes the usage ledger: batches, retries after failures, the bound on what waits in memory.

# Between two batches: SIGKILL loses what has waited for less. After a failure it is the time until the next try.
BATCH_S: Final = 1.0
# While the file cannot be written; some 60 MB. What comes after is lost, and counted.
MOST_WAITING: Final = 100_000
# A turn of the thread that takes longer: the disk hangs, or the file is large and is checked for damage.
STALL_S: Final = 5.0
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
    """Entries that could not be written, and were too many to wait in memory."""
    refused: int = 0
    """Those of them that were not taken, as MOST_WAITING others waited."""
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
    """`entries` and `samples` are appended to by the event loop, up to MOST_WAITING; the writer removes from their fronts
    what is written. `refused` returns how many entries were not taken since the start."""

    def __init__(
        self,
        settings: Usage,
        path: Path,
        entries: list[EndedRequest],
        samples: list[Sample],
        clock: Clock,
        *,
        refused: Callable[[], int],
    ) -> None:
        self._zone = settings.zone
        self._hour_of = partial(hour_begin, zone=zone_of(settings.zone))
        self._keep_s = settings.keep_days * _DAY_S
        self._path = path
        self._entries = entries
        self._samples = samples
        self._refused = refused
        self._clock = clock
        self._file: LedgerFile | None = None
        self._prune_at = 0.0
        self._suspected = False
        self._said = ""
        self._lost_in: Counter[int] = Counter()  # by hour: lost entries that the file does not tell of yet
        self._turns = threading.Condition()
        self._asked = self._answered = 0
        self._stopping = False
        self.state = State()
        self.turn_began: float | None = None
        """When the present turn began, by time.monotonic; None between turns."""

    def run(self) -> None:
        """Until `stop`."""
        while True:
            with self._turns:
                self._turns.wait_for(lambda: self._asked > self._answered or self._stopping, BATCH_S)
                asked, stopping = self._asked, self._stopping
            self.turn_began = time.monotonic()
            self._turn()
            self.turn_began = None
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

    def suspect(self) -> None:
        """Somebody read damage: check the file in the next turn, and move it aside where there is any."""
        self._suspected = True

    def flush(self, within_s: float) -> bool:
        """Write what waits now; whether the ledger has all that was entered before."""
        with self._turns:
            self._asked = mine = self._asked + 1
            self._turns.notify_all()
            return self._turns.wait_for(lambda: self._answered >= mine, within_s) and self.state.ok

    def _turn(self) -> None:
        self._count_refused()
        lost = self.state.lost
        try:
            self._check_suspected()
            for _ in range(_SLICES):
                if not self._write(self._opened()):
                    break
            file = self._opened()
            self._prune(file)
            self._succeeded(file)
        except Exception as error:
            self._failed(error)
        if self.state.ok and self.state.lost > lost:
            self.state = replace(
                self.state,
                problem=f"cannot write {self.state.lost - lost} entries into the usage ledger '{self._path}'",
                remedy="report this with the daemon's log",
            )

    def _check_suspected(self) -> None:
        """Raises DamagedLedgerError."""
        if not self._suspected:
            return
        self._suspected = False
        self._close()
        if why := self._damage():
            raise DamagedLedgerError(self._path, why)

    def _damage(self) -> str:
        """What is damaged in the file, which must be closed; "" for nothing, and where it cannot be read."""
        try:
            return damage_of(self._path)
        except LauncherError:
            return ""

    def _opened(self) -> LedgerFile:
        if self._file is not None and self._file.replaced:
            log.error("usage ledger '%s' was removed by somebody; a new one begins", self._path)
            self._close()
        if self._file is None:
            self._file = LedgerFile(self._path, self._zone, self._hour_of, self._clock.wall())
        return self._file

    def _write(self, file: LedgerFile) -> bool:
        """Whether there may be more to write."""
        batch, samples = self._entries[:_SLICE], self._samples[:_SLICE]
        if not batch and not samples and not self._lost_in:
            return False
        try:
            file.write(batch, self._metered(samples))
        except _UNUSABLE:
            self._close()
            # The batch is not at fault where what it is added to is damaged.
            if why := self._damage():
                raise DamagedLedgerError(self._path, why) from None
            log.exception("usage ledger: entries cannot be written")
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
        before, now = self._clock.delete_before(self._keep_s), self._clock.now().steady
        if before is not None and now >= self._prune_at:
            more = file.prune(before)
            self._prune_at = 0.0 if more else now + _PRUNE_S

    def _failed(self, error: Exception) -> None:
        """What a turn raised: a damaged file is moved aside, anything else is tried again."""
        self._close()
        damage = ""
        if is_damage(error):
            damage = str(error) if is_proven(error) else self._damage()
        if damage:
            self._move_aside(damage)
            return
        path = self._path
        match error:
            case LauncherError():
                self._fail(error.message, error.remedy)
            case sqlite3.Error():
                remedy = f"see that the file system of '{path.parent}' has space and can be written"
                self._fail(f"cannot write the usage ledger '{path}': {error}", remedy)
            case OSError():
                remedy = (
                    f"let the daemon's user write in '{path.parent}', or name another file in [usage] path"
                )
                self._fail(f"cannot write the usage ledger '{path}': {reason(error)}", remedy)
            case _:
                if not self._said:
                    log.error("usage ledger '%s': unexpected error", path, exc_info=error)
                self._fail(
                    f"cannot write the usage ledger '{path}': {error!r}", "report this with the daemon's log"
                )

    def _move_aside(self, damage: str) -> None:
        path = self._path
        try:
            moved = move_aside(path, self._clock.wall())
        except LauncherError as refused:
            self._fail(refused.message, refused.remedy)
        except OSError as failed:
            self._fail(
                f"cannot move the broken usage ledger '{path}' aside: {reason(failed)}",
                f"move it away, or let the daemon's user write in '{path.parent}'",
            )
        else:
            self.state = replace(
                self.state, moved_to=moved, problem=f"the usage ledger '{path}' was broken: {damage}",
                remedy=f"it is now '{moved}', and a new one begins",
            )  # fmt: skip
            log.error(
                "usage ledger '%s' is broken (%s): moved to '%s', a new one begins; to restore a backup: stop the daemon, "
                "numa-launcher usage restore BACKUP, start it; what can be read of the broken one: sqlite3 '%s' .recover",
                path, damage, moved, moved,
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

    def _count_refused(self) -> None:
        if new := self._refused() - self.state.refused:
            self._lose(new, refused=new)

    def _lose(self, count: int, *, refused: int = 0) -> None:
        # Their requests ended a moment ago, or while a turn hung.
        self._lost_in[self._hour_of(self._clock.wall())] += count
        if not self.state.lost:
            log.error("usage ledger: entries are lost, %d so far", count)
        state = self.state
        self.state = replace(state, lost=state.lost + count, refused=state.refused + refused)

    def _remove_unusable(self, batch: list[EndedRequest]) -> None:
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


# For the last batch at the daemon's end; a disk that hangs does not hold up the end for longer.
STOP_S: Final = 10.0


class Ledger:
    """Raises LauncherError for a zone that this machine does not know; nothing else of it raises."""

    def __init__(self, settings: Usage, path: Path, clock: Clock | None = None) -> None:
        self.path = path
        self._clock = clock = clock or Clock()
        self._entries: list[EndedRequest] = []
        self._samples: list[Sample] = []
        self._refused = 0
        self._writer = Writer(
            settings, path, self._entries, self._samples, clock, refused=lambda: self._refused
        )
        self._thread = threading.Thread(target=self._writer.run, name="usage ledger", daemon=True)

    def record(self, ended: EndedRequest) -> None:
        """Enter an ended request. It is in the file a second later, and until then only in memory; beyond MOST_WAITING it
        is lost, and counted."""
        if len(self._entries) < MOST_WAITING:
            self._entries.append(ended)
        else:
            self._refused += 1

    def meter(self, amounts: Iterable[tuple[str, str, float]]) -> None:
        """Add to the sums of the current hour: what, name, amount. Beyond MOST_WAITING they are left out."""
        if len(self._samples) < MOST_WAITING:
            now = self._clock.wall()
            self._samples.extend((now, what, name, amount) for what, name, amount in amounts)

    @property
    def state(self) -> State:
        """As the last turn left it; with entries that were not taken since, and a turn that does not end."""
        writer = self._writer
        state, began = writer.state, writer.turn_began
        if new := self._refused - state.refused:
            state = replace(state, lost=state.lost + new)
        if not state.ok or began is None or time.monotonic() - began <= STALL_S:
            return state
        return replace(
            state, problem=f"the usage ledger '{self.path}' was not written for more than {STALL_S:g} s",
            remedy=f"see whether the disk of '{self.path.parent}' answers",
        )  # fmt: skip

    @property
    def waiting(self) -> int:
        """Entries that are not in the file."""
        return len(self._entries)

    def start(self) -> None:
        self._thread.start()

    def flush(self, within_s: float = 5.0) -> bool:
        """Wait until what was entered is in the file; False where it cannot be written. Blocks: call it in a thread."""
        return self._writer.flush(within_s)

    def suspect(self) -> None:
        """What was read of the file is damaged: it is checked, and moved aside where that is so."""
        self._writer.suspect()

    def stop(self) -> None:
        """Write what waits and end. Blocks, at most STOP_S."""
        self._writer.stop()
        self._thread.join(STOP_S)
