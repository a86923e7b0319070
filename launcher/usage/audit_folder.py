"""The folder of an audit trail: its files, its lock, and `audit.head`, which names the last line on the disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from launcher.usage.audit_chain import (
    GENESIS,
    MAX_LINE_BYTES,
    Chain,
    ChainError,
    FileBegan,
    FileName,
    Head,
    Link,
    parsed,
    parsed_head,
    sealed,
)

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


def files(folder: Path) -> list[FileName]:
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
    names, head = files(folder), parsed_head(raw_head)
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
