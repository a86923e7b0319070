"""The usage ledger as the rest of the daemon sees it: enter a request, meter seconds and joules, ask how it is."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LOST, DamagedLedgerError, LedgerFile, Metered, move_aside
from launcher.accounts.ledger_file import check as damage_of
from launcher.accounts.report_values import hour_begin, zone_of
from launcher.accounts.request_rows import usable
from launcher.accounts.spent_before import Before, Lookup, read_before
from launcher.accounts.spent_sums import SpentSums
from launcher.base.clock import Clock, Moment, store_reading
from launcher.base.database import MirroredTable, is_damage, is_proven
from launcher.base.errors import LauncherError, reason
from launcher.base.writer import Problem, Sink
from launcher.config.schema import Usage

log = logging.getLogger("launcher.usage")

# Between two batches: SIGKILL loses what has waited for less.
BATCH_S: Final = 0.1
# While the file cannot be written; some 60 MB. What comes after is lost, and counted.
MOST_WAITING: Final = 100_000
# The longest pause after failures: each try opens the file, and reads the tables that are in memory.
LONGEST_RETRY_S: Final = 8.0
# Entries of one transaction: Python's lock is held for a few milliseconds at a time.
_SLICE: Final = 2_000
# Of one turn, so that a backlog does not take the event loop's time for seconds.
_SLICES: Final = 10
_PRUNE_S: Final = 60.0
# Between two looks at the file's size. A system call gives Python's lock away, and beside a busy event loop it takes
# milliseconds to come back.
_MEASURE_S: Final = 1.0
# Between two stores of the clock's reading. After SIGKILL and a longer time small steps are hidden (launcher.base.clock).
_CLOCK_S: Final = 600.0
_DAY_S: Final = 86_400
# What a batch raises whose entries cannot be encoded, summed up or bound to a statement: another try would fail as well.
_UNUSABLE: Final = (
    TypeError, ValueError, OverflowError, sqlite3.InterfaceError, sqlite3.ProgrammingError, sqlite3.IntegrityError,
)  # fmt: skip

Sample = tuple[float, str, str, float]  # Unix time, what, name, amount


def clock_path(ledger: Path) -> Path:
    """The file of the clock's last reading, for the daemon's next process."""
    return ledger.with_name(f"{ledger.name}.clock")


class Ledger(Sink[EndedRequest]):
    """Raises LauncherError for a zone that this machine does not know. An entry is in the file BATCH_S after its `put`, and
    until then only in memory. `mirrored`: tables of others in the same file; where [usage] keeps no ledger, only they are
    written."""

    def __init__(
        self, settings: Usage, path: Path, clock: Clock | None = None, mirrored: Sequence[MirroredTable] = ()
    ) -> None:
        keeps = settings.enabled
        super().__init__(
            log, f"the {'usage ledger' if keeps else 'history'} '{path}'", most=MOST_WAITING, every_s=BATCH_S,
            longest_retry_s=LONGEST_RETRY_S,
            meanwhile="requests are served, their entries wait in memory" if keeps else "it is kept in memory",
        )  # fmt: skip
        self.path = path
        self.recorded = 0
        """Entries written since the start."""
        self.moved_to: Path | None = None
        """A broken file of the ledger that was moved aside since the start, by its new name."""
        self.file_bytes = 0
        self._clock = clock or Clock()
        self.spent = SpentSums()
        """The sums of budgets and caps, in the same file."""
        self._mirrored = (self.spent, *mirrored)
        self._clock_path = clock_path(path)
        self._clock_stored: Moment | None = None
        self._clock_told = False
        self._zone = settings.zone
        self._keeps_requests = keeps
        self._hour_of = partial(hour_begin, zone=zone_of(settings.zone))
        self._lookup: Lookup | None = None
        self._answered: tuple[Lookup, Before] | None = None
        self._keep_s = settings.keep_days * _DAY_S
        self._samples: list[Sample] = []
        self._told_left_out = False
        self._file: LedgerFile | None = None
        self._unsummed: list[EndedRequest] = []
        """Entries that the file before had not summed up, should it prove to be damaged."""
        self._again = 0
        """How many of the next entries were `recorded` in a file that was moved aside."""
        self._prune_at = self._measure_at = 0.0
        self._suspected = self._read_damage = False
        self._unusable = 0
        self._told_lost = 0
        """The part of `lost` that the file tells of, or will."""
        self._lost_in: Counter[int] = Counter()
        """By hour: lost entries that the file does not tell of yet."""

    # --- the event loop's side -----------------------------------------------------------------------

    def meter(self, amounts: Iterable[tuple[str, str, float]]) -> None:
        """Add to the sums of the current hour: what, name, amount. Beyond MOST_WAITING they are left out, and
        that is said once."""
        if len(self._samples) < MOST_WAITING:
            now = self._clock.wall()
            self._samples.extend((now, what, name, amount) for what, name, amount in amounts)
            self._told_left_out = False
        elif not self._told_left_out:
            log.error(
                "%s lacks seconds of slots and energy from now on: %d amounts wait", self.title, MOST_WAITING
            )
            self._told_left_out = True

    @property
    def lost(self) -> int:
        """Entries that could not be written, or were too many to wait in memory."""
        return self.refused + self._unusable

    def read(self, lookup: Lookup, within_s: float) -> Before:
        """The spending before, as far as the file tells of it within that time. Blocks: not for the event loop."""
        self._lookup = lookup
        self.flush(within_s)
        problem = self.problem
        why = "its disk does not answer" if problem is None else problem.text
        answered = self._answered
        if answered is not None and answered[0] is lookup:
            return answered[1]
        return Before.unknown(lookup.now.wall, lookup.endpoints, why)

    def suspect(self) -> None:
        """Somebody read damage: the file is checked in the next turn, and moved aside where it has any."""
        self._suspected = True

    # --- the thread's side ---------------------------------------------------------------------------

    def write(self) -> Problem | None:
        self._store_clock(_CLOCK_S)
        try:
            return self._write()
        finally:
            self._answer()

    def _write(self) -> Problem | None:
        if self.refused and not self._told_lost:
            log.error("usage ledger: entries are lost, %d so far", self.refused)
        self._count_lost()
        if self._suspected:
            self._suspected = False
            self._close()
            if why := self._damage():
                raise DamagedLedgerError(self.path, why)
        unusable = self._unusable
        for _ in range(_SLICES):
            if not self._write_slice(self._opened()):
                break
        file = self._file or self._opened()
        self._prune(file)
        if time.monotonic() >= self._measure_at:
            self._measure_at = time.monotonic() + _MEASURE_S
            self.file_bytes = file.size
        if new := self._unusable - unusable:
            why = f"{new} entries have values that no file takes"
            text = f"cannot write {new} entries into {self.title}"
            return Problem(why, text, "report this with the daemon's log")
        return None

    def end(self, until: float) -> Problem | None:
        problem, left = None, inf
        try:
            while self.waiting < left and time.monotonic() < until:
                left = self.waiting
                problem = self.write()
        finally:
            self._store_clock(0.0)
            self._close()
        return problem

    def _answer(self) -> None:
        """Answer `read`; also while the file can be read, but not written."""
        lookup, self._lookup = self._lookup, None
        if lookup is None:
            return
        self.spent.read(self.path)
        before = read_before(self.path, zone_of(self._zone), lookup)
        self._answered = lookup, before
        if before.keys.damaged and not self._read_damage:
            self._suspected = True
        self._read_damage = before.keys.damaged

    def _store_clock(self, every_s: float) -> None:
        now, last = self._clock.now(), self._clock_stored
        if last is not None and now.steps == last.steps and now.steady - last.steady < every_s:
            return
        self._clock_stored = now
        try:
            store_reading(self._clock_path, self._clock.reading)
        except OSError as error:
            if not self._clock_told:
                log.warning(
                    "cannot store the clock's reading in '%s': %s; after a restart nobody knows whether it was set",
                    self._clock_path, reason(error),
                )  # fmt: skip
            self._clock_told = True

    def _damage(self) -> str:
        """The damage of the file, which must be closed; "" for none, and where it cannot be read."""
        try:
            return damage_of(self.path)
        except LauncherError:
            return ""

    def _opened(self) -> LedgerFile:
        if self._file is not None and self._file.replaced:
            log.error("usage ledger '%s' was removed by somebody; a new one begins", self.path)
            self._close()
        if self._file is None:
            zone = self._zone if self._keeps_requests else None
            self._file = LedgerFile(self.path, zone, self._hour_of, self._clock.wall(), self._mirrored)
            self._unsummed = []
        return self._file

    def _write_slice(self, file: LedgerFile) -> bool:
        """Whether there may be more to write."""
        batch, samples = self.take(_SLICE), self._samples[:_SLICE]
        if not (batch or samples or self._lost_in or any(table.waiting for table in self._mirrored)):
            return False
        try:
            file.write(batch, self._metered(samples))
        except _UNUSABLE:
            self._close()
            # The batch is not at fault where what it is added to is damaged.
            if why := self._damage():
                raise DamagedLedgerError(self.path, why) from None
            log.exception("usage ledger: entries cannot be written")
            self._remove_unusable(batch)
            del self._samples[: len(samples)]
            return False
        again = min(self._again, len(batch))
        self._again -= again
        self.recorded += len(batch) - again
        self.done()
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

    def failed(self, error: Exception) -> Problem:
        """A damaged file is moved aside, anything else is tried again."""
        self._close()
        if is_damage(error) and (damage := str(error) if is_proven(error) else self._damage()):
            return self._move_aside(damage)
        if isinstance(error, sqlite3.Error):
            remedy = f"see that the file system of '{self.path.parent}' has space and can be written"
            return Problem(str(error), f"cannot write {self.title}: {error}", remedy)
        problem = super().failed(error)
        if isinstance(error, OSError):
            remedy = (
                f"let the daemon's user write in '{self.path.parent}', or name another file in [usage] path"
            )
            return problem._replace(remedy=remedy)
        return problem

    def _move_aside(self, damage: str) -> Problem:
        path = self.path
        for table in self._mirrored:
            table.rescue(path)
        try:
            moved = move_aside(path, self._clock.wall())
        except LauncherError as refused:
            return super().failed(refused)
        except OSError as error:
            text = f"cannot move the broken usage ledger '{path}' aside: {reason(error)}"
            return Problem(
                reason(error), text, f"move it away, or let the daemon's user write in '{path.parent}'"
            )
        self.moved_to = moved
        self._again += len(self._unsummed)
        self.done([*self._unsummed, *self._taken])
        self._unsummed = []
        return Problem(
            damage,
            f"{self.title} was broken: {damage}",
            f"it is now '{moved}', and a new one begins"
            + (
                f"; to restore a backup: stop the daemon, numa-launcher usage restore BACKUP, start it; what can be read of "
                f"the broken one: sqlite3 '{moved}' .recover"
                if self._keeps_requests
                else ""
            ),
        )

    def recovered(self) -> str:
        lost = f"; entries lost since the start: {self.lost}" if self._keeps_requests else ""
        return f"{super().recovered()}{lost}"

    def _count_lost(self) -> None:
        """Their requests ended a moment ago, or while a turn hung."""
        if new := self.lost - self._told_lost:
            self._told_lost += new
            self._lost_in[self._hour_of(self._clock.wall())] += new

    def _remove_unusable(self, batch: Sequence[EndedRequest]) -> None:
        """Entries that no file can take; all of them where none is found, so that the same error does not come again."""
        left = [entry for entry in batch if usable(entry)]
        if len(left) == len(batch):
            left = []
        self._unusable += len(batch) - len(left)
        self.done(left)
        self._count_lost()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            self._unsummed = file.unsummed
            try:
                file.close()
            except sqlite3.Error as error:
                log.warning("usage ledger '%s': cannot close: %s", self.path, error)
