"""Snapshots: the files that describe a machine, in one archive that can be read on another machine.

A snapshot is a tar.gz with `manifest.json` first, then the files by name. Unpacked, it is a tree for `--root`.
It contains only what `sysfs.read` read; of files with more than the topology (mounts, process status, cpuinfo)
only the lines used.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, reason
from launcher.machine import cgroup, sysfs
from launcher.machine.hardware import KEYS as CPUINFO_KEYS
from launcher.machine.kernel_files import Folder, Root, Source
from launcher.machine.topology import Topology

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
_KERNEL: Final = "proc/sys/kernel/osrelease"
# A snapshot of 8,192 cpus unpacks to about 110 MiB, most of it tar headers, and packs to a few MiB; the
# largest file in one is a cpu mask of 2 KiB or a node's meminfo.
MAX_PACKED_BYTES: Final = 16 * 1024**2
MAX_UNPACKED_BYTES: Final = 256 * 1024**2
MAX_FILE_BYTES: Final = 1024**2
# The only folder names that readers use (`Root.ids`, `Root.names`).
_NUMBERED: Final = re.compile(r"(?:cpu|node|index)\d+|hugepages-\d+kB|[0-9a-f:.]+", re.ASCII)
_REMEDY: Final = (
    "make it with `numa-launcher topology snapshot -o FILE`; unpack other captures and use --root DIR"
)


class Recording(Struct):
    """Recorded files. Implements Source."""

    name: str = "snapshot:"
    files: dict[str, bytes] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    """Folders that were listed or queried, and all folders above files."""
    errors: dict[str, int] = field(default_factory=dict)
    """errno of files and folders that could not be read."""
    mask: CpuSet | None = None
    architecture: str | None = None
    live: bool = False
    _names: dict[str, list[str]] = field(default_factory=dict)

    def read(self, path: str, limit: int | None) -> bytes | None:
        self._raise(path)
        data = self.files.get(path)
        return None if data is None else data[:limit]

    def listdir(self, path: str) -> list[str] | None:
        self._raise(path)
        if not self._names:
            for entry in self.entries():
                folder, _, name = entry.rpartition("/")
                self._names.setdefault(folder, []).append(name)
                self._names.setdefault(entry, [])
        return None if path in self.files else self._names.get(path)

    def exists(self, path: str) -> bool:
        return path in self.files or self.listdir(path) is not None

    def affinity(self) -> CpuSet | None:
        return self.mask

    def machine(self) -> str | None:
        return self.architecture

    def entries(self) -> list[str]:
        every = {*self.files, *self.folders}
        for path in tuple(every):
            parts = path.split("/")
            every.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
        return sorted(every)

    def _raise(self, path: str) -> None:
        if path in self.errors:
            raise OSError(self.errors[path], os.strerror(self.errors[path]))


class Recorder:
    """Records the answers of another source. Implements Source."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self.name, self.live = inner.name, inner.live
        self.kept = Recording()
        self._answers: dict[str, bytes | None] = {}

    def read(self, path: str, limit: int | None) -> bytes | None:
        """A second read returns the first answer, as a snapshot will."""
        if path not in self._answers:
            try:
                data = self.inner.read(path, limit)
            except OSError as error:
                self.kept.errors[path] = error.errno or 0
                raise
            self._answers[path] = data
            if data is not None:
                self.kept.files[path] = needed(path, data)
        return self._answers[path]

    def listdir(self, path: str) -> list[str] | None:
        try:
            names = self.inner.listdir(path)
        except OSError as error:
            self.kept.errors[path] = error.errno or 0
            raise
        if names is not None:
            self.kept.folders.add(path)
            self.kept.folders.update(f"{path}/{name}" for name in names if _NUMBERED.fullmatch(name))
        return names

    def exists(self, path: str) -> bool:
        found = self.inner.exists(path)
        if found and path not in self.kept.files:
            self.kept.folders.add(path)
        return found

    def affinity(self) -> CpuSet | None:
        self.kept.mask = self.inner.affinity()
        return self.kept.mask

    def machine(self) -> str | None:
        self.kept.architecture = self.inner.machine()
        return self.kept.architecture


class Capture(Struct, frozen=True):
    """A snapshot, with the topology or the error from reading the machine: one of them is None."""

    data: bytes
    topology: Topology | None
    error: LauncherError | None


def capture(source: Source | Path, *, date: str, version: str) -> Capture:
    """Reads a machine and packs the files; equal files, date and version give equal bytes.

    A machine that cannot be read is packed as far as it was read; reading the snapshot gives the same error."""
    recorder = Recorder(Folder(source) if isinstance(source, Path) else source)
    recorder.affinity()
    recorder.machine()
    topology, failure = None, None
    try:
        topology = sysfs.read_source(Root(recorder))
    except LauncherError as error:
        failure = error
    kernel = Root(recorder.inner).head(_KERNEL, 256)
    manifest = {
        "format": FORMAT,
        "launcher": version,
        "captured": date,
        "kernel": kernel and kernel.strip(),
        "machine": recorder.kept.architecture,
        "affinity": None if recorder.kept.mask is None else recorder.kept.mask.format(),
        "errors": dict(sorted(recorder.kept.errors.items())),
    }
    return Capture(_pack(recorder.kept, manifest), topology, failure)


def read_snapshot(file: Path) -> Topology:
    """The machine in a snapshot. Raises LauncherError for another kind of file or a broken one."""
    return sysfs.read_source(Root(load(file)))


def load(file: Path) -> Recording:
    """The files in a snapshot, in memory. Raises LauncherError."""
    try:
        with file.open("rb") as stream:
            packed = stream.read(MAX_PACKED_BYTES + 1)
    except OSError as error:
        raise _refuse(file, reason(error)) from None
    if len(packed) > MAX_PACKED_BYTES:
        raise _refuse(file, f"it has more than {MAX_PACKED_BYTES} bytes")
    try:
        recording = _unpack(_inflate(packed))
    except _BadSnapshotError as error:
        raise _refuse(file, str(error)) from None
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, KeyError, TypeError) as error:
        raise _refuse(file, f"it is corrupt ({type(error).__name__})") from None
    recording.name = f"{file}:"
    return recording


def needed(path: str, data: bytes) -> bytes:
    """The part of a file that a snapshot keeps: of some files only the lines that readers use."""
    keep = _LINES.get(path)
    if keep is None:
        return data
    lines = data.decode(errors="replace").splitlines()
    return "".join(f"{line}\n" for line in keep(lines)).encode()


def _fields(*keys: str) -> Callable[[list[str]], Iterator[str]]:
    """Lines `key: value` with one of the keys. Lines without a colon separate records and become empty lines."""

    def keep(lines: list[str]) -> Iterator[str]:
        for line in lines:
            key, colon, _ = line.partition(":")
            if not colon:
                yield ""
            elif key.strip() in keys:
                yield line

    return keep


def _cgroups(lines: list[str]) -> Iterator[str]:
    """Lines `id:controllers:path` of the hierarchies used; v2's has no controller."""
    return (
        line
        for line in lines
        if {"cpuset", "memory", "cpu", ""} & {*line.partition(":")[2].partition(":")[0].split(",")}
    )


# Mounts contain servers' names, status users, cpuinfo possibly a serial number, hwloc's file the host's name.
_LINES: Final[Mapping[str, Callable[[list[str]], Iterator[str]]]] = {
    "proc/cpuinfo": _fields(*CPUINFO_KEYS),
    "proc/self/status": _fields("Cpus_allowed", "Cpus_allowed_list", "Mems_allowed", "Mems_allowed_list"),
    "proc/meminfo": _fields("MemTotal", "MemFree", "Active(file)", "Inactive(file)", "SReclaimable"),
    "proc/self/cgroup": _cgroups,
    "proc/self/mountinfo": partial(filter, cgroup.mountinfo_line),
    "proc/mounts": partial(filter, cgroup.mounts_line),
    sysfs.HWLOC_INFO: _fields("Architecture"),
}


def _pack(recording: Recording, manifest: Mapping[str, Any]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        _add(tar, MANIFEST, f"{json.dumps(manifest, indent=1)}\n".encode())
        above = {path.rpartition("/")[0] for path in recording.entries()}
        for path in (path for path in recording.entries() if path not in above):
            _add(tar, path, recording.files.get(path))
    return gzip.compress(raw.getvalue(), mtime=0)


def _add(tar: tarfile.TarFile, path: str, data: bytes | None) -> None:
    info = tarfile.TarInfo(path)  # owner, group and time are 0
    if data is None:
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    else:
        info.size = len(data)
    tar.addfile(info, None if data is None else io.BytesIO(data))


class _BadSnapshotError(Exception): ...


def _inflate(packed: bytes) -> bytes:
    unzip = zlib.decompressobj(wbits=31)  # gzip's framing
    try:
        raw = unzip.decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error:
        raise _BadSnapshotError("it is not a gzip file") from None
    if not unzip.eof:
        cut = not unzip.unconsumed_tail
        raise _BadSnapshotError(
            "it is truncated" if cut else f"it unpacks to more than {MAX_UNPACKED_BYTES} bytes"
        )
    return raw


def _unpack(raw: bytes) -> Recording:
    recording = Recording()
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
        first = tar.next()
        if first is None or first.name != MANIFEST:
            raise _BadSnapshotError(f"{MANIFEST} is not its first file")
        _take_manifest(recording, json.loads(_content(tar, first)))
        for member in tar:
            if member.name == MANIFEST:  # iteration starts over
                continue
            _check_path(member.name)
            if member.isdir():
                recording.folders.add(member.name)
            elif member.name in recording.files:
                raise _BadSnapshotError(f"it holds {member.name!r} twice")
            else:
                recording.files[member.name] = _content(tar, member)
    return recording


def _take_manifest(recording: Recording, manifest: dict[str, Any]) -> None:
    if manifest["format"] != FORMAT:
        raise _BadSnapshotError(f"its format is {manifest['format']!r}, this version reads {FORMAT}")
    recording.errors = {str(path): int(errno) for path, errno in manifest["errors"].items()}
    recording.architecture = manifest["machine"] and str(manifest["machine"])
    recording.mask = None if manifest["affinity"] is None else CpuSet.parse(manifest["affinity"])


def _check_path(path: str) -> None:
    # Any first folder: a cgroup file system may be mounted anywhere, such as /dev/cpuset.
    if {"", ".", ".."} & set(path.split("/")):
        raise _BadSnapshotError(f"{path[:80]!r} is not a path below a root")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.type not in {tarfile.REGTYPE, tarfile.AREGTYPE}:
        raise _BadSnapshotError(f"{member.name[:80]!r} is neither a plain file nor a folder")
    if member.size > MAX_FILE_BYTES:
        raise _BadSnapshotError(f"{member.name[:80]!r} has more than {MAX_FILE_BYTES} bytes")
    stream = tar.extractfile(member)
    return b"" if stream is None else stream.read()


def _refuse(file: Path, why: str) -> LauncherError:
    return LauncherError(f"cannot read snapshot '{file}': {why}", _REMEDY)
