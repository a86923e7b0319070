"""The file of the history: of fixed size, one process at a time, read and written at places.

All of its space is allocated when it is made. pread(2) and pwrite(2), no mmap: on a full disk, or in a file that
somebody truncated, a store into a mapped page is a SIGBUS, which ends the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
import zlib
from pathlib import Path
from typing import Final

import msgspec

from launcher.errors import LauncherError, reason
from launcher.history.rings import FILE_BYTES, HEADER_BYTES, SPANS

_MAGIC: Final = b"NLHISTORY\0"
_VERSION: Final = 1
SUFFIX: Final = ".bin"
_REMEDY: Final = "name a file on a local disk with space for 8 MB in [telemetry] history_path"


class HistoryFile:
    """Raises LauncherError where the file cannot be used. A broken one is renamed, and a new one begins."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.moved_to: Path | None = None
        """Where a broken file has been moved to."""
        try:
            path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._descriptor = self._opened()
        except OSError as error:
            raise LauncherError(f"cannot keep the history in '{path}': {reason(error)}", _REMEDY) from None

    def _opened(self) -> int:
        for _ in range(2):
            descriptor = _open(self._path)
            try:
                found = self._usable(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if found:
                return descriptor
            os.close(descriptor)
        raise OSError(errno.EBUSY, "another program replaces it")

    def _usable(self, descriptor: int) -> bool:
        """Whether this is the file of the history, made if it was empty; False once a broken one has been renamed."""
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LauncherError(
                f"cannot keep the history in '{self._path}': another daemon uses it",
                "end that daemon, or name another file in [telemetry] history_path",
            ) from None
        header = os.pread(descriptor, HEADER_BYTES, 0)
        if header == _header() and facts.st_size == FILE_BYTES:
            return True
        # New, or a process was killed while it made it.
        if facts.st_size in (0, FILE_BYTES) and not any(header):
            _make(descriptor)
            return True
        if not header.startswith(_MAGIC) and self._path.suffix != SUFFIX:
            raise LauncherError(
                f"cannot keep the history in '{self._path}': it is another program's file", _REMEDY
            )
        self.moved_to = _aside(self._path)
        return False

    @property
    def replaced(self) -> bool:
        """The file was removed, or there is another one of its name."""
        try:
            there = self._path.stat()
        except OSError:
            return True
        return not os.path.samestat(there, os.fstat(self._descriptor))

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def write(self, offset: int, data: bytes) -> None:
        if os.pwrite(self._descriptor, data, offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a short write: the next one says why

    def close(self) -> None:
        """An answer may still want to read: it gets EBADF, and not another file of the same number."""
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)


def _open(path: Path) -> int:
    # O_NONBLOCK: a FIFO of that name is refused instead of waited for.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o600)


def _make(descriptor: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, FILE_BYTES)
        os.pwrite(descriptor, _header(), 0)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)  # what could be had of a full disk
        raise


def _aside(path: Path) -> Path:
    moved = path.with_name(f"{path.name}.broken-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    path.rename(moved)
    return moved


def _header() -> bytes:
    """The layout of the file; one with another layout is another version's."""
    text = msgspec.json.encode(
        {
            "version": _VERSION,
            "spans": [[span.name, span.step_ms, span.rows, span.format.size] for span in SPANS],
        }
    )
    return (_MAGIC + zlib.crc32(text).to_bytes(4, "little") + text).ljust(HEADER_BYTES, b"\0")
