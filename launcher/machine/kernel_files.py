"""Reads sysfs and procfs under a root: few system calls, None for absent files, errors that name the file.

Every access goes through a `Source`, so that `snapshot` can record and replay it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, reason

CPU_FOLDER: Final = "sys/devices/system/cpu"
NODE_FOLDER: Final = "sys/devices/system/node"
# A whole sysfs attribute fits one page, a cpulist file up to a few; procfs files are read in full.
_CHUNK: Final = 65_536
# 2^64 has 20 digits. int() refuses more than 4,300 (sys.get_int_max_str_digits), with a ValueError.
_DIGITS: Final = 20
_NUMBER: Final = re.compile(r"-?[0-9]{1,20}")
_WORD: Final = re.compile(r"[0-9a-fA-F]{1,8}")
REMEDY: Final = (
    "check it against the kernel's Documentation/admin-guide/cputopology.rst; capture the tree again"
)


class Source(Protocol):
    """Source of the files: a folder, or a snapshot of one."""

    name: str
    """Prefix of a file's path in errors, such as "/" or "captured/"."""
    live: bool
    """Whether this is the live host; facts without a file then come from system calls."""

    def read(self, path: str, limit: int | None) -> bytes | None:
        """The file's bytes, the first `limit` of them; None when absent. Raises OSError."""

    def listdir(self, path: str) -> list[str] | None:
        """Names in a folder; None when absent. Raises OSError."""

    def exists(self, path: str) -> bool:
        """Whether the file or folder exists."""

    def affinity(self) -> CpuSet | None:
        """The affinity mask of this process; None where only files have it."""

    def machine(self) -> str | None:
        """The architecture as in uname; None where only files have it."""


class Folder:
    """Files below one root directory. Implements Source."""

    def __init__(self, path: Path) -> None:
        self.live = path == Path("/")
        self.name = f"{str(path).rstrip('/')}/"

    def read(self, path: str, limit: int | None) -> bytes | None:
        # os.open instead of Path.read_bytes: 256 cpus are 2,000 files, and Path takes twice the time.
        try:
            fd = os.open(self.name + path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            chunks = [os.read(fd, limit or _CHUNK)]
            while _may_have_more(path, chunks, limit):
                chunks.append(os.read(fd, _CHUNK))
        finally:
            os.close(fd)
        return b"".join(chunks)[:limit]

    def listdir(self, path: str) -> list[str] | None:
        try:
            return os.listdir(self.name + path)  # noqa: PTH208 - Path.iterdir builds a Path for each name
        except (FileNotFoundError, NotADirectoryError):
            return None

    def exists(self, path: str) -> bool:
        return os.path.exists(self.name + path)  # noqa: PTH110

    def affinity(self) -> CpuSet | None:
        return CpuSet(os.sched_getaffinity(0)) if self.live else None

    def machine(self) -> str | None:
        return os.uname().machine if self.live else None


def _may_have_more(path: str, chunks: list[bytes], limit: int | None) -> bool:
    """A read of sysfs returns the whole attribute; of procfs, a page or a record."""
    if limit is not None:
        return bool(chunks[-1]) and sum(map(len, chunks)) < limit
    return len(chunks[-1]) == _CHUNK or (bool(chunks[-1]) and path.startswith("proc/"))


class Root:
    """Accessors for the readers. Paths are relative, e.g. ``sys/devices/system/cpu/online``."""

    def __init__(self, source: Source | Path) -> None:
        self.source: Source = Folder(source) if isinstance(source, Path) else source
        self._sets: dict[tuple[str, Callable[[str], CpuSet]], CpuSet] = {}
        self._cut: dict[tuple[CpuSet, CpuSet], CpuSet] = {}

    def text(self, path: str) -> str | None:
        """The file's content, stripped of white space and NULs (some captures pad); None when absent."""
        try:
            data = self.source.read(path, None)
        except OSError as error:
            # sysfs answers ENODEV/EINVAL for attributes the hardware lacks; a folder gives EISDIR.
            raise self.broken(path, reason(error)) from error
        return None if data is None else data.decode(errors="replace").strip("\0 \t\r\n")

    def head(self, path: str, size: int) -> str | None:
        """The first bytes of a long file; None when unreadable. procfs generates records while they are read."""
        try:
            data = self.source.read(path, size)
        except OSError:
            return None
        return None if data is None else data.decode(errors="replace")

    def number(self, path: str) -> int | None:
        """The file's content as a decimal number; None when absent."""
        text = self.text(path)
        if text is None:
            return None
        if not _NUMBER.fullmatch(text):
            raise self.broken(path, f"{text[:40]!r} is not a number")
        return int(text)

    def cpulist(self, path: str) -> CpuSet | None:
        """The file's content in the kernel's list format; None when absent."""
        return self._parsed(path, CpuSet.parse)

    def cpus(self, path: str, list_path: str, online: CpuSet) -> CpuSet | None:
        """The online cpus of a mask file and of its list twin; None when both are absent.

        The kernel prints one bitmap twice, so either is sufficient (the mask is older), and a difference is an error,
        except in offline cpus: old kernels truncate one of the two."""
        mask, listed = self.twins(path, list_path, online)
        if mask is not None and listed is not None and mask != listed:
            raise self.broken(
                list_path, f"{listed} contradicts {mask} of {path.rpartition('/')[2]} beside it"
            )
        return listed if mask is None else mask

    def twins(self, path: str, list_path: str, online: CpuSet) -> tuple[CpuSet | None, CpuSet | None]:
        """The online cpus of a mask file, and those of its list twin; None for an absent file."""
        mask = self._parsed(path, parse_cpumap)
        return self._among(mask, online), self._among(self._parsed(list_path, CpuSet.parse), online)

    def _among(self, cpus: CpuSet | None, online: CpuSet) -> CpuSet | None:
        if cpus is None:
            return None
        key = (cpus, online)
        if key not in self._cut:
            self._cut[key] = cpus & online
        return self._cut[key]

    def _parsed(self, path: str, parse: Callable[[str], CpuSet]) -> CpuSet | None:
        text = self.text(path)
        if text is None:
            return None
        key = (text, parse)
        if key not in self._sets:  # 256 cpus have the same few dozen sets
            try:
                self._sets[key] = parse(text)
            except ValueError as error:
                raise self.broken(path, f"{error}") from None
        return self._sets[key]

    def names(self, path: str) -> list[str]:
        """Sorted names in a folder; empty when absent."""
        try:
            return sorted(self.source.listdir(path) or ())
        except OSError as error:
            raise self.broken(path, reason(error)) from error

    def ids(self, path: str, prefix: str) -> CpuSet | None:
        """Ids of the folders named prefix + number, e.g. cpu12; None when `path` is absent."""
        try:
            names = self.source.listdir(path)
        except OSError as error:
            raise self.broken(path, reason(error)) from error
        if names is None:
            return None
        length = len(prefix)
        tails = [name[length:] for name in names if name.startswith(prefix)]
        try:
            return CpuSet(number for tail in tails if (number := decimal(tail)) is not None)
        except ValueError as error:
            raise self.broken(path, f"{error}") from None

    def exists(self, path: str) -> bool:
        """Whether the file or folder exists."""
        return self.source.exists(path)

    def present(self, *paths: str) -> str:
        """The first existing file, else the first: for error messages."""
        return next((path for path in paths if self.exists(path)), paths[0])

    def broken(self, path: str, why: str) -> LauncherError:
        """The error for a missing or contradictory file."""
        return LauncherError(f"cannot read the topology: {self.source.name}{path}: {why}", REMEDY)


def decimal(text: str) -> int | None:
    """A whole number in the kernel's digits; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS else None


def parse_cpumap(text: str) -> CpuSet:
    """Read the kernel's bitmap format (``%*pb``): 32-bit hex words, most significant first, joined by commas.

    Raises ValueError."""
    mask = 0
    for word in text.split(","):
        if not _WORD.fullmatch(word):
            raise ValueError(f"{text[:40]!r} is not a cpu mask: {word[:20]!r} is not a 32-bit word of it")
        mask = mask << 32 | int(word, 16)
    return CpuSet(i for i, bit in enumerate(reversed(f"{mask:b}")) if bit == "1")
