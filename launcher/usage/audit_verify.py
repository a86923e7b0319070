"""Proves that nothing in an audit trail was changed, removed or put in, or names the first line that is wrong."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from launcher.usage import audit_folder as folder_io
from launcher.usage.audit_chain import (
    GENESIS,
    Anchor,
    AnyLine,
    Chain,
    ChainError,
    FileBegan,
    FileName,
    Head,
    Link,
    Lost,
    Pruned,
    Started,
    Stopped,
    Torn,
    parsed,
)

_TORN: Final = b'{"kind":"torn"'


class Place(NamedTuple):
    file: str
    line: int  # 0: the file as a whole

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Wrong(NamedTuple):
    """The first thing that is wrong."""

    place: Place
    what: str


class Report(NamedTuple):
    wrong: Wrong | None
    files: tuple[FileName, ...]
    first: int  # number of the first line
    last: Link  # the last good one
    last_place: Place | None
    last_time: dt.datetime | None
    kinds: dict[str, int]  # lines by kind
    lost: int  # entries that the daemon could not write
    torn_bytes: int
    crashes: int  # starts without a stop before
    notes: tuple[str, ...]  # what is not wrong, and not proved either


class _WrongError(Exception):
    def __init__(self, place: Place, what: str) -> None:
        super().__init__(what)
        self.wrong = Wrong(place, what)


def verify(folder: Path, anchors: Iterable[Anchor] = ()) -> Report:
    """Read a whole trail, also while it is written. Raises OSError."""
    head = folder_io.read_head(folder)  # before the files: what it names must be in them
    reading = _Reading(folder, folder_io.files(folder), head, anchors)
    wrong = None
    try:
        reading.read()
    except _WrongError as error:
        wrong = error.wrong
    return reading.report(wrong)


class _Reading:
    def __init__(
        self, folder: Path, names: list[FileName], head: Head | None, anchors: Iterable[Anchor]
    ) -> None:
        self._folder = folder
        self._names = names
        self._head = head
        self._noted: dict[int, list[tuple[str, str]]] = {}
        """By number of a line: its hash, and where it was noted."""
        self._hashes: set[str] = set()
        for anchor in anchors:
            if anchor.n is None:
                self._hashes.add(anchor.hash)
            else:
                self._noted.setdefault(anchor.n, []).append((anchor.hash, "the anchor"))
        if head is not None and head.n:
            self._noted.setdefault(head.n, []).append((head.last, folder_io.HEAD))
        self._chain = Chain(GENESIS)
        self._began = GENESIS
        """What the first line follows."""
        self._place: Place | None = None
        """Of the last good line."""
        self._headed = False
        """The present file's first line was read."""
        self._time: dt.datetime | None = None
        self._kinds: Counter[str] = Counter()
        self._pruned: Pruned | None = None
        self._running = False
        self._lost = self._torn_bytes = self._crashes = 0
        self._notes: list[str] = []

    def report(self, wrong: Wrong | None) -> Report:
        return Report(
            wrong, tuple(self._names), self._began.n + 1, self._chain.last, self._place, self._time,
            dict(self._kinds), self._lost, self._torn_bytes, self._crashes, tuple(self._notes),
        )  # fmt: skip

    def read(self) -> None:
        before: FileName | None = None
        for name in self._names:
            self._check_number(name, before)
            self._read_file(name)
            before = name
        self._check_beginning()
        self._check_end()

    def _check_number(self, name: FileName, before: FileName | None) -> None:
        if before is not None:
            if name.number != before.number + 1:
                twice = name.number == before.number
                what = (
                    f"has the number of {before}"
                    if twice
                    else f"file {before.number + 1} before it is missing"
                )
                raise _WrongError(Place(str(name), 0), what)
        elif name.number > 1:  # files before it were removed; _check_beginning asks for the record of that
            header = folder_io.begun(self._folder / str(name))
            if header is None:
                raise _WrongError(Place(str(name), 1), "changed: it is not the first line of a file")
            self._began = Link(header.n - 1, header.prev)
            self._chain = Chain(self._began)

    # --- one file ------------------------------------------------------------------------------------

    def _read_file(self, name: FileName) -> None:
        path, at, number = self._folder / str(name), 0, 0
        self._headed = False
        while at >= 0:
            start, at = at, -1
            for offset, raw in folder_io.lines(path, start):
                number += 1
                try:
                    self._take(name, number, raw)
                except ChainError as error:
                    torn = self._torn(path, offset)
                    if torn is not None:
                        at, number = torn[0], number - 1 + torn[1]
                        break
                    if self._unfinished(name, raw):
                        self._notes.append(
                            f"{Place(str(name), number)}: incomplete: it is being written, or the daemon was killed"
                        )
                        return
                    self._refuse(name, number, error)
        if not self._headed and name != self._names[-1]:
            raise _WrongError(Place(str(name), 1), "missing: the file is empty")

    def _take(self, name: FileName, number: int, raw: bytes) -> None:
        """The next line of a file. Raises ChainError."""
        if not raw.endswith(b"\n"):
            raise ChainError("incomplete: its end is missing")
        line, digest = parsed(raw[:-1])
        if not self._headed and not isinstance(line, Torn):
            self._check_header(name, line)
        elif self._headed and isinstance(line, FileBegan):
            raise ChainError(f"is the first line of {FileName(line.number, line.day)}, within this file")
        self._chain.follow(line, digest)
        self._headed = self._headed or isinstance(line, FileBegan)
        self._place, self._time = Place(str(name), number), line.time
        for noted, where in self._noted.pop(line.n, ()):
            if noted != digest:
                self._refuse(
                    name,
                    number,
                    ChainError(f"is not the line {line.n} that {where} names: the trail was written again"),
                )
        self._hashes.discard(digest)
        self._count(line)

    def _check_header(self, name: FileName, line: AnyLine) -> None:
        if not isinstance(line, FileBegan):
            raise ChainError("is not the first line of a file: that one is missing")
        if (line.number, line.day) != name:
            raise ChainError(f"is the first line of {FileName(line.number, line.day)}, not of this file")

    def _refuse(self, name: FileName, number: int, error: ChainError) -> NoReturn:
        place = Place(str(name), number)
        if self._place is not None and error.before:
            place = self._place
        elif self._place is not None and error.gap and not self._headed:  # of the file before
            place = Place(self._place.file, self._place.line + 1)
            raise _WrongError(place, f"missing: {name} begins with a line that {error.what}")
        raise _WrongError(place, error.what)

    def _unfinished(self, name: FileName, raw: bytes) -> bool:
        """Whether this may be a write that was not complete when the trail was read, or when the daemon was killed."""
        return (
            name == self._names[-1]
            and not raw.endswith(b"\n")
            and self._running
            and self._head is not None
            and self._head.n <= self._chain.last.n
        )

    def _torn(self, path: Path, start: int) -> tuple[int, int] | None:
        """Offset of the line that marks all bytes from `start` to itself as an incomplete write, and the lines between."""
        count, last = 0, self._chain.last
        for at, raw in folder_io.lines(path, start):
            if raw.startswith(_TORN) and at > start and raw.endswith(b"\n"):
                try:
                    line, _ = parsed(raw[:-1])
                except ChainError:
                    continue
                if (
                    isinstance(line, Torn)
                    and (line.n - 1, line.prev, line.torn_bytes) == (*last, at - 1 - start)
                    and line.torn_sha256 == folder_io.hash_of(path, start, at - 1)
                ):
                    return at, count
            count += raw.endswith(b"\n")
        return None

    def _count(self, line: AnyLine) -> None:
        self._kinds[str(line.__struct_config__.tag)] += 1
        match line:
            case Started():
                self._crashes += self._running
                self._running = True
                if line.head == "missing":
                    assert self._place is not None  # noqa: S101  of this line
                    raise _WrongError(
                        self._place,
                        f"the daemon found no {folder_io.HEAD} when it started here: lines before it may be missing",
                    )
            case Stopped():
                self._running = False
            case Lost():
                self._lost += line.lost
            case Torn():
                self._torn_bytes += line.torn_bytes
            case Pruned():
                self._pruned = line
            case _:
                pass

    # --- the trail as a whole ------------------------------------------------------------------------

    def _check_beginning(self) -> None:
        """Files may have been removed by keep_days; a later line says so."""
        if not self._names or self._names[0].number == 1:
            return
        first, record = self._names[0], self._pruned
        if record is None or record.through_number < first.number - 1:
            raise _WrongError(
                Place(str(first), 0),
                "files before it are missing, and no line records that keep_days removed them",
            )
        link = Link(record.through_n, record.through_hash)
        if record.through_number == first.number - 1 and link != self._began:
            raise _WrongError(Place(str(first), 1), "does not follow the files that keep_days removed")

    def _check_end(self) -> None:
        last, head = self._chain.last, self._head
        if head is None:
            raise _WrongError(
                Place(folder_io.HEAD, 0),
                "missing or damaged: whether lines are missing at the end cannot be told",
            )
        name = FileName.parse(head.file)
        if head.n and name not in self._names:
            raise _WrongError(Place(head.file, 0), f"missing: {folder_io.HEAD} names it")
        for n, noted in sorted(self._noted.items()):
            if n > last.n:
                place = (
                    self._place
                    if self._place is not None and self._headed
                    else Place(str(self._names[-1]), 0)
                )
                what = f"missing: the trail ends with line {last.n}, and {noted[0][1]} names line {n}"
                raise _WrongError(Place(place.file, place.line + 1), what)
            self._notes.append(f"anchor {n} is of a line that keep_days removed: not compared")
        if self._hashes:
            if self._began.n:
                self._notes.append("an anchor without a number is of no line; keep_days may have removed it")
            else:
                raise _WrongError(Place("anchor", 0), f"no line has the hash {min(self._hashes)}")
