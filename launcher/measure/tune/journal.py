"""The journal of a tuning run: JSON lines, appended and synced one by one; the run's only state.

A run that was killed continues from it. A last line without its end was being written at that moment: it is cut off."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launcher.base.errors import LauncherError, reason
from launcher.measure.tune.identity import Fingerprint
from launcher.measure.tune.model import Measurement, Stack, Visit, VisitResult

FILE: Final = "journal.jsonl"


class RunBegan(msgspec.Struct, frozen=True, kw_only=True, tag="run-began", tag_field="event"):
    """The first line."""

    id: str
    at: str
    options: dict[str, Any]
    """Of the command line, by name, for `--resume` without them."""
    identity: dict[str, str]
    """What must be the same when the run is resumed: name -> value."""
    fingerprint: Fingerprint | None = None
    """Of this machine; None where another one is tuned."""


class RunResumed(msgspec.Struct, frozen=True, kw_only=True, tag="run-resumed", tag_field="event"):
    at: str


class VisitBegan(msgspec.Struct, frozen=True, kw_only=True, tag="visit-began", tag_field="event"):
    visit: Visit
    at: str


class VisitOverhead(msgspec.Struct, frozen=True, kw_only=True, tag="visit-overhead", tag_field="event"):
    """Time of a visit that measured nothing: its start, or its stop."""

    seconds: float


class RepeatEnded(msgspec.Struct, frozen=True, kw_only=True, tag="repeat-ended", tag_field="event"):
    """One measurement, or the cause of its failure."""

    repeat: int
    measure_s: float
    measurement: Measurement | None = None
    cause: str | None = None


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="answered", tag_field="event"):
    """The greedy answers of a stack."""

    stack: Stack
    answers: list[str]


class VisitEnded(msgspec.Struct, frozen=True, kw_only=True, tag="visit-ended", tag_field="event"):
    result: VisitResult


Record = RunBegan | RunResumed | VisitBegan | VisitOverhead | RepeatEnded | Answered | VisitEnded
_decoder: Final[msgspec.json.Decoder[Record]] = msgspec.json.Decoder(Record)
_encoder: Final = msgspec.json.Encoder()


class Unfinished(Struct, frozen=True):
    """A visit that began and has not ended."""

    began: VisitBegan
    overhead_s: float
    """Of all its starts and stops."""
    repeats: tuple[RepeatEnded, ...]


class Journal:
    """Owned by the one `tune` that holds the lock of the state folder."""

    def __init__(self, path: Path, records: Sequence[Record] = ()) -> None:
        self.path = path
        self._records = list(records)

    @classmethod
    def create(cls, folder: Path, began: RunBegan) -> Journal:
        """The journal of a new run in a new folder. Raises LauncherError."""
        try:
            folder.mkdir(parents=True, mode=0o700)  # --set may hold secrets
        except OSError as error:
            raise _cannot_write(folder, error) from None
        journal = cls(folder / FILE)
        journal.append(began)
        return journal

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """The journal of an earlier run; its torn last line is removed from the file. Raises LauncherError."""
        path = folder / FILE
        try:
            whole, end, _torn = path.read_bytes().rpartition(b"\n")
            os.truncate(path, len(whole) + len(end))
        except OSError as error:
            raise LauncherError(
                f"cannot resume '{folder.name}': cannot open '{path}': {reason(error)}",
                "begin a new run without --resume",
            ) from None
        records = [_read(path, number, line) for number, line in enumerate(whole.split(b"\n"), 1)]
        if not isinstance(records[0], RunBegan):
            raise _unreadable(path, 1, "it is not the beginning of a run")
        return cls(path, records)

    def append(self, record: Record) -> None:
        """Written and synced on return. Raises LauncherError."""
        try:
            with self.path.open("ab") as file:
                file.write(_encoder.encode(record) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from None
        self._records.append(record)

    @property
    def began(self) -> RunBegan:
        first = self._records[0]
        assert isinstance(first, RunBegan)  # noqa: S101  checked by `open`, written by `create`
        return first

    @property
    def history(self) -> list[VisitResult]:
        """Visits that have ended, in their order."""
        return [record.result for record in self._records if isinstance(record, VisitEnded)]

    @property
    def answers(self) -> dict[Stack, list[str]]:
        """By stack, in the order in which they were asked."""
        return {record.stack: record.answers for record in self._records if isinstance(record, Answered)}

    @property
    def unfinished(self) -> Unfinished | None:
        found: Unfinished | None = None
        for record in self._records:
            match record:
                case VisitBegan():
                    if found is None or found.began.visit != record.visit:
                        found = Unfinished(record, 0.0, ())
                case VisitOverhead() if found is not None:
                    found = replace(found, overhead_s=found.overhead_s + record.seconds)
                case RepeatEnded() if found is not None:
                    found = replace(found, repeats=(*found.repeats, record))
                case VisitEnded():
                    found = None
                case _:
                    pass
        return found


def newest(folder: Path) -> Path | None:
    """The folder of the latest run below the tuning folder. Names begin with the time."""
    return max((path.parent for path in folder.glob(f"*/{FILE}")), default=None)


def _read(path: Path, number: int, line: bytes) -> Record:
    try:
        return _decoder.decode(line)
    except msgspec.DecodeError as error:
        raise _unreadable(path, number, str(error)) from None


def _unreadable(path: Path, number: int, why: str) -> LauncherError:
    return LauncherError(
        f"cannot resume '{path.parent.name}': line {number} of '{path}': {why}",
        "begin a new run without --resume",
    )


def _cannot_write(path: Path, error: OSError) -> LauncherError:
    return LauncherError(
        f"cannot write '{path}': {reason(error)}",
        "free disk space or choose another folder with --state-dir; `tune --resume` continues from what is written",
    )
