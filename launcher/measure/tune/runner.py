"""Performs the visits that the search asks for, and enters each result in the journal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Final, Protocol

from launcher.base.errors import LauncherError, RefusedError, reason
from launcher.measure.tune.journal import (
    Answered,
    Journal,
    RepeatEnded,
    Unfinished,
    VisitBegan,
    VisitEnded,
    VisitOverhead,
)
from launcher.measure.tune.model import (
    Candidate,
    MeasurementFailedError,
    NotStartedError,
    Session,
    Settings,
    Stack,
    Verdict,
    Visit,
    VisitResult,
    Visits,
)
from launcher.measure.tune.search import next_step, verdict_so_far

# A seed for each repeat of each visit: load generators repeat their prompts with the same seed, and 2^31 is the end
# of numpy's seeds on some of them.
_SEEDS: Final = 2**31
_SEED_STEP: Final = 1_000_003
_REPEATS: Final = 1_000


class StoppedError(KeyboardInterrupt):
    """SIGINT or SIGTERM. A KeyboardInterrupt, which event loops and context managers let through."""


class Watcher(Protocol):
    """Told what happens, for the lines that a person reads."""

    def began(self, visit: Visit) -> None: ...

    def ended(self, result: VisitResult) -> None: ...


class Runner:
    def __init__(
        self,
        journal: Journal,
        candidates: Sequence[Candidate],
        settings: Settings,
        visits: Visits,
        watcher: Watcher,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._journal = journal
        self._candidates = candidates
        self._settings = settings
        self._visits = visits
        self._watcher = watcher
        self._clock = clock

    def run(self) -> Verdict:
        """To the search's own end, or to a signal: then the verdict is of what was measured so far."""
        try:
            while True:
                step = next_step(self._journal.history, self._candidates, self._settings)
                if isinstance(step, Verdict):
                    return step
                self._perform(step)
        except KeyboardInterrupt:  # bench raises its own kind
            return verdict_so_far(self._journal.history, self._candidates, self._settings)

    def _perform(self, visit: Visit) -> None:
        self._watcher.began(visit)
        earlier = self._journal.unfinished
        if earlier is None or earlier.began.visit != visit:
            earlier = Unfinished(VisitBegan(visit=visit, at=now()), 0.0, ())
        self._journal.append(earlier.began)
        cause = None
        if len(earlier.repeats) < visit.repeats:  # else it was killed after the last repeat
            try:
                self._measure(visit, done=len(earlier.repeats))
            except NotStartedError as error:
                cause = str(error)
        result = _result_of(self._journal.unfinished or earlier, cause)
        self._journal.append(VisitEnded(result=result))
        self._watcher.ended(result)

    def _measure(self, visit: Visit, *, done: int) -> None:
        begin = self._clock()
        try:
            with self._visits.start(self._candidates[visit.candidate], visit) as session:
                self._enter_overhead(begin)
                try:
                    for repeat in range(done, visit.repeats):
                        self._journal.append(self._repeat(session, visit, repeat))
                finally:
                    begin = self._clock()
                # Last: an engine that fails at a question has given its figures.
                self._ask(session, self._candidates[visit.candidate].layout.stack)
        finally:
            self._enter_overhead(begin)

    def _ask(self, session: Session, stack: Stack | None) -> None:
        """Once for each of several stacks; of one whose engine fails, again at its next visit."""
        several = len({each.layout.stack for each in self._candidates}) > 1
        if stack is None or not several or stack in self._journal.answers:
            return
        with contextlib.suppress(MeasurementFailedError):
            if answers := session.answers():
                self._journal.append(Answered(stack=stack, answers=answers))

    def _enter_overhead(self, since: float) -> None:
        self._journal.append(VisitOverhead(seconds=self._clock() - since))

    def _repeat(self, session: Session, visit: Visit, repeat: int) -> RepeatEnded:
        begin, measurement, cause = self._clock(), None, None
        try:
            measurement = session.measure(repeat, repeat_seed(self._settings.seed, visit, repeat))
        except MeasurementFailedError as error:
            cause = str(error)
        return RepeatEnded(
            repeat=repeat, measure_s=self._clock() - begin, measurement=measurement, cause=cause
        )


def repeat_seed(seed: int, visit: Visit, repeat: int) -> int:
    """Another one for each repeat of a run, the same in each run with the same `seed`."""
    return (seed * _SEED_STEP + visit.number * _REPEATS + repeat) % _SEEDS


def now() -> str:
    """ISO 8601 with the zone."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _result_of(visit: Unfinished, cause: str | None) -> VisitResult:
    measured = [repeat.measurement for repeat in visit.repeats if repeat.measurement is not None]
    if cause is None and not measured:
        cause = next((repeat.cause for repeat in reversed(visit.repeats) if repeat.cause), None)
    return VisitResult(
        visit=visit.began.visit, started_at=visit.began.at, start_s=visit.overhead_s,
        measure_s=sum(repeat.measure_s for repeat in visit.repeats), measurements=measured, cause=cause,
    )  # fmt: skip


# --- Locks that end with the process that holds them, however it ends. ---

# In the abstract namespace (unix(7)): one for all users of the machine, and gone with its process.
_MACHINE: Final = "\0numa-launcher-tune"
_REMEDY: Final = "wait until it has ended, or stop it with Ctrl-C"


@contextlib.contextmanager
def only_run(path: Path) -> Iterator[None]:
    """One `tune` per state folder: the lock of the file at `path`. Raises LauncherError."""
    with _open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = path.read_text(errors="replace").strip()
            raise RefusedError(
                f"cannot tune: another tune (pid {pid}) uses '{path.parent}'", _REMEDY
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())
        file.flush()
        yield


@contextlib.contextmanager
def only_engines() -> Iterator[None]:
    """One `tune` with engines per machine, whatever its state folder. Raises RefusedError."""
    with socket.socket(socket.AF_UNIX) as held:
        try:
            held.bind(_MACHINE)
        except OSError:
            raise RefusedError(
                "cannot tune: another tune measures engines on this machine", _REMEDY
            ) from None
        yield


@contextlib.contextmanager
def until_unlocked(path: Path) -> Iterator[IO[bytes]]:
    """Holds the lock of a file for a program that waits for it (flock(1)). Raises LauncherError."""
    with _open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def unlock(file: IO[bytes]) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("ab")
    except OSError as error:
        raise LauncherError(
            f"cannot open '{path}': {reason(error)}",
            "choose a folder that you may write to, with --state-dir",
        ) from None
