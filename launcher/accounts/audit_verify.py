"""Proves that nothing in an audit trail was changed, removed or put in, or names the first line that is wrong."""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import fcntl
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from launcher.accounts.audit_chain import (
    GENESIS,
    MAX_LINE_BYTES,
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
    parsed_head,
    sealed,
)

# --- The folder of an audit trail: its files, its lock, and `audit.head`, which names the last line on the disk.

HEAD: Final = "audit.head"
FILE_MODE: Final = 0o640
FOLDER_MODE: Final = 0o750
# Within one sector, so that a power cut leaves the old content or the new.
_HEAD_BYTES: Final = 512
_READ_BYTES: Final = 1 << 20


class Found(NamedTuple):
    """Where a trail continues."""

    last: Link
    file: FileName | None = None  # None: in a new file
    end: int = 0  # of the last good line in it
    number: int = 0  # of the last file that is known to have been there
    head: str = "found"
    why: str = ""  # what is wrong with what was found, if anything


def files_in(folder: Path) -> list[FileName]:
    """The trail's files, oldest first."""
    return sorted(name for entry in folder.iterdir() if (name := FileName.parse(entry.name)) is not None)


def read_head(folder: Path) -> Head | None:
    """None where it is missing or damaged."""
    for _ in range(5):  # a read beside the daemon's write may see parts of both
        try:
            head = parsed_head((folder / HEAD).read_bytes())
        except FileNotFoundError:
            return None
        if head is not None:
            return head
    return None


def lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Offset and bytes of each line, with its end if it has one. Longer ones come in parts."""
    with path.open("rb") as file:
        file.seek(start)
        at = start
        while raw := file.readline(MAX_LINE_BYTES):
            yield at, raw
            at += len(raw)


def hash_of(path: Path, start: int, end: int) -> str:
    """SHA-256 of a part of a file."""
    digest, left = sha256(), end - start
    with path.open("rb") as file:
        file.seek(start)
        while left > 0 and (part := file.read(min(left, _READ_BYTES))):
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def begun(path: Path) -> FileBegan | None:
    """The first line of a file, where it is a good one."""
    with path.open("rb") as file:
        raw = file.readline(MAX_LINE_BYTES)
    with contextlib.suppress(ChainError):
        line, _ = parsed(raw.rstrip(b"\n"))
        return line if isinstance(line, FileBegan) else None
    return None


class Lock:
    """`audit.head`, open and locked: one process writes a trail."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError, BlockingIOError where another process has it."""
        self._path = folder / HEAD
        try:
            self.fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.fd)
            raise BlockingIOError(errno.EAGAIN, "another process writes this trail") from None

    def content(self) -> bytes:
        return os.pread(self.fd, _HEAD_BYTES, 0)

    def write(self, head: Head) -> None:
        raw = sealed(head)
        if os.pwrite(self.fd, raw.ljust(_HEAD_BYTES - 1) + b"\n", 0) < len(raw):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lost(self) -> bool:
        """Whether the file was removed or replaced."""
        return os.fstat(self.fd).st_nlink == 0

    def close(self) -> None:
        os.close(self.fd)


def recover(folder: Path, raw_head: bytes) -> Found:
    """Where the trail of a folder continues. Lines up to its head are on the disk; behind it may be whole lines, and an
    incomplete one. Raises OSError."""
    names, head = files_in(folder), parsed_head(raw_head)
    if head is None:
        if not names:
            return Found(GENESIS)
        last = _last_in(folder / str(names[-1]))
        return Found(last, head="missing", why=f"{HEAD} is missing or damaged")
    if head.n == 0:
        return _walk(folder, names, GENESIS, 0) if names else Found(GENESIS)
    name = FileName.parse(head.file)
    if name is None or name not in names:
        return Found(head.link, number=0 if name is None else name.number, why=f"{head.file} is missing")
    if not _ends_with(folder / head.file, head):
        return Found(head.link, why=f"{head.file} does not have line {head.n} where {HEAD} says")
    return _walk(folder, names[names.index(name) :], head.link, head.end)


def _walk(folder: Path, names: list[FileName], last: Link, start: int) -> Found:
    """Whole lines behind the head count."""
    chain, end = Chain(last), start
    for name in names:
        end = start
        with contextlib.suppress(ChainError):
            for at, raw in lines(folder / str(name), start):
                if not raw.endswith(b"\n"):
                    break
                chain.follow(*parsed(raw[:-1]))
                end = at + len(raw)
        start = 0
    return Found(chain.last, names[-1], end)


def anchored(folder: Path, head: Head) -> int | None:
    """Where the line that a head names stands in its file, counted from 1; None where it is not there."""
    path = folder / head.file
    if not path.exists() or not _ends_with(path, head):
        return None
    with path.open("rb") as file:
        left, count = head.end, 0
        while left > 0 and (part := file.read(min(left, _READ_BYTES))):
            count += part.count(b"\n")
            left -= len(part)
    return count


def _ends_with(path: Path, head: Head) -> bool:
    """Whether the line that a head names ends where it says."""
    with path.open("rb") as file:
        file.seek(max(0, head.end - MAX_LINE_BYTES))
        raw = file.read(head.end - file.tell())
    ending = f'"hash":"{head.last}"}}\n'.encode()
    return raw.endswith(ending) and path.stat().st_size >= head.end


def _last_in(path: Path) -> Link:
    """The last line of a file that is whole in itself."""
    last = GENESIS
    for _, raw in lines(path):
        with contextlib.suppress(ChainError):
            line, digest = parsed(raw.rstrip(b"\n"))
            last = Link(line.n, digest)
    return last


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
    head = read_head(folder)  # before the files: what it names must be in them
    reading = _Reading(folder, files_in(folder), head, anchors)
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
            self._noted.setdefault(head.n, []).append((head.last, HEAD))
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
            header = begun(self._folder / str(name))
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
            for offset, raw in lines(path, start):
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
        for at, raw in lines(path, start):
            if raw.startswith(_TORN) and at > start and raw.endswith(b"\n"):
                try:
                    line, _ = parsed(raw[:-1])
                except ChainError:
                    continue
                if (
                    isinstance(line, Torn)
                    and (line.n - 1, line.prev, line.torn_bytes) == (*last, at - 1 - start)
                    and line.torn_sha256 == hash_of(path, start, at - 1)
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
                        f"the daemon found no {HEAD} when it started here: lines before it may be missing",
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
                Place(HEAD, 0),
                "missing or damaged: whether lines are missing at the end cannot be told",
            )
        name = FileName.parse(head.file)
        if head.n and name not in self._names:
            raise _WrongError(Place(head.file, 0), f"missing: {HEAD} names it")
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
