"""A snapshot replays what was read, holds nothing else, and a hostile one is refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.synthetic import Machine, put

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.machine import snapshot, sysfs
from launcher.machine.kernel_files import Folder
from launcher.machine.snapshot import Capture, capture, read_snapshot


def taken(root: Path) -> Capture:
    return capture(root, date="2026-01-02", version="1")


def replayed(root: Path, file: Path) -> tuple[object, object]:
    """What reading a tree gives, and what its snapshot gives."""
    got = taken(root)
    assert got.error is None
    file.write_bytes(got.data)
    return sysfs.read(root), read_snapshot(file)


MACHINES = st.builds(
    Machine,
    sockets=st.integers(1, 2),
    nodes=st.integers(1, 3),
    l3=st.integers(1, 2),
    cores=st.integers(1, 3),
    smt=st.sampled_from([1, 2]),
    adjacent=st.booleans(),
    offline=st.sampled_from([frozenset(), frozenset({1})]),
    allowed=st.sampled_from([None, CpuSet((0,))]),
    memory_only=st.integers(0, 1),
    has_l3=st.booleans(),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MACHINES)
def test_every_synthetic_machine_is_replayed(tmp_path: Path, machine: Machine) -> None:
    folder = tmp_path / str(abs(hash(machine)))
    expected, got = replayed(machine.write(folder), tmp_path / "snap.tar.gz")
    assert got == expected


def test_this_host_is_replayed_with_its_affinity(tmp_path: Path) -> None:
    got = taken(Path("/"))
    file = tmp_path / "snap.tar.gz"
    file.write_bytes(got.data)
    assert read_snapshot(file) == got.topology
    assert manifest(got.data)["kernel"] == os.uname().release
    assert manifest(got.data)["affinity"] == CpuSet(os.sched_getaffinity(0)).format()


def test_what_reads_sysfs_alone_can_be_unpacked_and_read(tmp_path: Path) -> None:
    root = Machine(sockets=2, l3=2, cores=4, smt=2, offline=frozenset({3})).write(tmp_path / "tree")
    with tarfile.open(fileobj=io.BytesIO(taken(root).data)) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 has none
        tar.extractall(tmp_path / "again")  # noqa: S202
    assert sysfs.read(tmp_path / "again") == sysfs.read(root)


def test_512_cpus_fit_well_below_a_megabyte_and_the_bytes_are_the_same_each_time(tmp_path: Path) -> None:
    root = Machine(sockets=2, nodes=4, l3=4, cores=8, smt=2).write(tmp_path)
    first = taken(root).data
    assert len(first) < 200_000
    assert taken(root).data == first


SECRETS = {
    "proc/cpuinfo": "processor\t: 0\nvendor_id\t: X\nflags\t\t: a\n\nSerial\t\t: 00000000c0ffee\n",
    "proc/self/status": "Name:\tc0ffee\nUid:\t1234c0ffee\nCpus_allowed_list:\t0-3\n",
    "proc/self/mountinfo": (
        "20 1 0:5 / /srv rw - nfs4 c0ffee.example:/home rw\n"
        "21 1 0:6 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    ),
    "proc/mounts": "//c0ffee/share /srv cifs rw,username=c0ffee 0 0\ncgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
    "proc/self/cgroup": "1:name=c0ffee:/c0ffee\n0::/a\n",
    "proc/hwloc-nofile-info": "Architecture: x86_64\nHostName: c0ffee\n",
    "proc/self/environ": "TOKEN=c0ffee",
    "etc/hostname": "c0ffee",
}


def test_nothing_is_packed_that_is_not_used(tmp_path: Path) -> None:
    root = Machine(cores=4).write(tmp_path / "tree")
    for path, text in SECRETS.items():
        put(root / path, text)
    expected, got = replayed(root, tmp_path / "snap.tar.gz")
    assert got == expected
    assert b"c0ffee" not in gzip.decompress((tmp_path / "snap.tar.gz").read_bytes())
    (root / "proc/self/mountinfo").unlink()
    expected, got = replayed(root, tmp_path / "snap.tar.gz")
    assert got == expected
    assert b"c0ffee" not in gzip.decompress((tmp_path / "snap.tar.gz").read_bytes())


def test_an_amd_family_15h_capture_keeps_its_architecture(tmp_path: Path) -> None:
    root = Machine(cores=2).write(tmp_path / "tree")
    put(root / "proc/cpuinfo", "vendor_id\t: AuthenticAMD\ncpu family\t: 21\nflags\t: a")
    put(root / "proc/hwloc-nofile-info", "HostName: h\nArchitecture: x86_64")
    expected, got = replayed(root, tmp_path / "snap.tar.gz")
    assert got == expected


@pytest.mark.parametrize(
    "path", ["sys/devices/system/cpu/cpu1/topology/core_id", "sys/devices/system/node/node0"]
)
def test_a_machine_that_cannot_be_read_is_packed_with_its_error(path: str, tmp_path: Path) -> None:
    """A folder where a file should be, and a file where a folder should be."""
    root = Machine(cores=2).write(tmp_path / "tree")
    if path.endswith("core_id"):
        (root / path).unlink()
        (root / path).mkdir()
    else:
        (root / path / "cpumap").write_text("xyz\n")
    got = taken(root)
    assert got.topology is None
    assert got.error is not None
    file = tmp_path / "snap.tar.gz"
    file.write_bytes(got.data)
    with pytest.raises(LauncherError) as caught:
        read_snapshot(file)
    assert caught.value.message.replace(f"{file}:", f"{root}/") == got.error.message


class Unlistable(Folder):
    """A tree whose cpu folder the kernel refuses to list."""

    def listdir(self, path: str) -> list[str] | None:
        raise PermissionError(13, "Permission denied")


def test_a_folder_that_cannot_be_listed_is_replayed(tmp_path: Path) -> None:
    got = capture(Unlistable(tmp_path), date="d", version="1")
    file = tmp_path / "snap.tar.gz"
    file.write_bytes(got.data)
    with pytest.raises(LauncherError, match="permission denied"):
        read_snapshot(file)


def manifest(data: bytes) -> dict[str, Any]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        stream = tar.extractfile(snapshot.MANIFEST)
        assert stream is not None
        return json.loads(stream.read())


GOOD = {"format": 1, "captured": "d", "kernel": None, "machine": None, "affinity": None, "errors": {}}


def archive(*members: tuple[str, bytes, dict[str, Any]], first: object = GOOD) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, data, more in ((snapshot.MANIFEST, json.dumps(first).encode(), {}), *members):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in more.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(raw.getvalue())


def without_manifest() -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("sys/x"))
    return gzip.compress(raw.getvalue())


ONLINE = "sys/devices/system/cpu/online"
HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "traversal": (lambda: archive(("sys/../../etc/passwd", b"x", {})), "not a path below a root"),
    "absolute": (lambda: archive(("/etc/passwd", b"x", {})), "not a path below"),
    "symlink": (
        lambda: archive((ONLINE, b"", {"type": tarfile.SYMTYPE, "linkname": "/etc/shadow"})),
        "neither a plain file",
    ),
    "hard link": (
        lambda: archive((ONLINE, b"", {"type": tarfile.LNKTYPE, "linkname": "x"})),
        "neither a plain file",
    ),
    "device": (lambda: archive((ONLINE, b"", {"type": tarfile.CHRTYPE})), "neither a plain file"),
    "huge member": (lambda: archive((ONLINE, b"0" * (1024**2 + 1), {})), "has more than 1048576 bytes"),
    "twice": (lambda: archive((ONLINE, b"0", {}), (ONLINE, b"1", {})), "twice"),
    "no archive": (lambda: b"[models]\n", "not a gzip file"),
    "empty": (lambda: b"", "it is truncated"),
    "gzip of text": (lambda: gzip.compress(b"hello"), "corrupt"),
    "cut gzip": (lambda: archive()[:-20], "it is truncated"),
    "cut tar": (
        lambda: gzip.compress(gzip.decompress(archive((ONLINE, b"0-3" * 600, {})))[: 512 * 4]),
        "corrupt",
    ),
    "no manifest": (without_manifest, "manifest.json is not its first file"),
    "empty tar": (lambda: gzip.compress(bytes(10240)), "manifest.json is not its first file"),
    "newer format": (lambda: archive(first={**GOOD, "format": 2}), "its format is 2"),
    "manifest is a list": (lambda: archive(first=[1]), "corrupt"),
    "manifest lacks keys": (lambda: archive(first={"format": 1}), "corrupt"),
    "bad affinity": (lambda: archive(first={**GOOD, "affinity": "a-b"}), "corrupt"),
    "bad errors": (lambda: archive(first={**GOOD, "errors": {"x": "y"}}), "corrupt"),
    "bomb": (lambda: gzip.compress(bytes(snapshot.MAX_UNPACKED_BYTES + 1), 1), "unpacks to more than"),
    "large": (lambda: os.urandom(snapshot.MAX_PACKED_BYTES + 1), "has more than"),
    "no machine": (archive, "cannot read the topology"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_snapshots_are_refused(name: str, tmp_path: Path) -> None:
    make, said = HOSTILE[name]
    file = tmp_path / "snap.tar.gz"
    file.write_bytes(make())
    with pytest.raises(LauncherError) as caught:
        read_snapshot(file)
    assert said in caught.value.message
    assert str(file) in caught.value.message
    assert caught.value.remedy


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="no such file"):
        read_snapshot(tmp_path / "none")
