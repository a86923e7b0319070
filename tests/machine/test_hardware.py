"""Hardware of this machine and of synthetic trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from support.smbios_table import END, array, module
from support.synthetic import EPYC, Machine

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.machine import sysfs
from launcher.machine.hardware import read_hardware
from launcher.machine.named import find_topology
from launcher.machine.snapshot import capture, read_snapshot


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def server(root: Path) -> Path:
    """Two sockets of NPS2 and 2 threads a core, as root sees it."""
    Machine(sockets=2, nodes=2, l3=2, cores=4, smt=2, node_bytes=192 * GIB).write(root)
    cpu = root / "sys/devices/system/cpu"
    for policy in range(64):
        put(cpu / f"cpufreq/policy{policy}/scaling_governor", "performance\n")
    put(cpu / "cpufreq/boost", "1\n")
    put(root / "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    put(root / "proc/sys/kernel/osrelease", "6.8.0-45-generic\n")
    dmi = root / "sys/firmware/dmi/tables/DMI"
    dmi.parent.mkdir(parents=True)
    dmi.write_bytes(array() + b"".join(module(i, mib=65536, configured=6000) for i in range(24)) + END)
    return root


def test_a_server(tmp_path: Path) -> None:
    found = read_hardware(sysfs.read(server(tmp_path)), tmp_path)
    assert (found.sockets, found.cores, found.cpus, found.allowed_cpus) == (2, 32, 64, 64)
    assert (found.numa_nodes, found.nodes_per_socket, found.memory_bytes) == (4, 2, 768 * GIB)
    assert (found.memory_modules, found.memory_speed_mts, found.memory_limit_bytes) == (24, 6000, None)
    assert (found.governor, found.boost, found.smt) == ("performance", True, True)
    assert (found.transparent_hugepages, found.kernel) == ("madvise", "6.8.0-45-generic")


def test_without_cpufreq_and_smbios_these_are_unknown(tmp_path: Path) -> None:
    Machine().write(tmp_path)
    found = read_hardware(sysfs.read(tmp_path), tmp_path)
    assert (found.governor, found.boost, found.transparent_hugepages) == (None, None, None)
    assert (found.memory_speed_mts, found.memory_modules, found.kernel) == (None, None, None)
    assert found.smt is False


def test_an_unreadable_table_is_unknown(tmp_path: Path) -> None:
    server(tmp_path)
    table = tmp_path / "sys/firmware/dmi/tables/DMI"
    table.unlink()
    table.mkdir()  # root reads through any mode
    assert read_hardware(sysfs.read(tmp_path), tmp_path).memory_modules is None


def test_a_container_has_less_than_the_machine(tmp_path: Path) -> None:
    topology = replace(sysfs.read(server(tmp_path)), allowed=CpuSet(range(8)), memory_limit_bytes=16 * GIB)
    found = read_hardware(topology, tmp_path)
    assert (found.cpus, found.allowed_cpus) == (64, 8)
    assert (found.memory_bytes, found.memory_limit_bytes) == (768 * GIB, 16 * GIB)


def test_mixed_governors_are_all_named(tmp_path: Path) -> None:
    put(server(tmp_path) / "sys/devices/system/cpu/cpufreq/policy7/scaling_governor", "powersave\n")
    assert read_hardware(sysfs.read(tmp_path), tmp_path).governor == "performance, powersave"


@pytest.mark.parametrize(
    ("files", "boost"),
    [
        ({"cpufreq/boost": "0"}, False),
        ({"intel_pstate/no_turbo": "0"}, True),
        ({"intel_pstate/no_turbo": "1"}, False),
        ({"cpufreq/policy0/boost": "1", "cpufreq/policy1/boost": "1"}, True),
        ({"cpufreq/policy0/boost": "0", "cpufreq/policy1/boost": "0"}, False),
        ({"cpufreq/policy0/boost": "0", "cpufreq/policy1/boost": "1"}, None),
        ({}, None),
    ],
)
def test_boost(files: dict[str, str], boost: bool | None, tmp_path: Path) -> None:
    Machine().write(tmp_path)
    for name, text in files.items():
        put(tmp_path / "sys/devices/system/cpu" / name, f"{text}\n")
    assert read_hardware(sysfs.read(tmp_path), tmp_path).boost is boost


@pytest.mark.parametrize(
    ("vendor", "flags", "virtual"),
    [("AuthenticAMD", {"avx2"}, False), ("AuthenticAMD", {"avx2", "hypervisor"}, True), ("AuthenticAMD", set(), None),
     ("ARM", {"asimd"}, None)],
)  # fmt: skip
def test_virtual(vendor: str, flags: set[str], virtual: bool | None) -> None:
    cpu = replace(EPYC, vendor=vendor, flags=frozenset(flags))
    assert read_hardware(replace(Machine().topology(), cpu=cpu), None).virtual is virtual


def test_a_snapshot_has_no_settings_of_its_kernel(tmp_path: Path) -> None:
    root, file = server(tmp_path / "root"), tmp_path / "machine.tar.gz"
    file.write_bytes(capture(root, date="2026-11-20", version="0.1.0").data)
    here, elsewhere = read_hardware(sysfs.read(root), root), read_hardware(read_snapshot(file), None)
    assert (elsewhere.governor, elsewhere.boost, elsewhere.transparent_hugepages) == (None, None, None)
    assert (elsewhere.kernel, elsewhere.memory_modules, elsewhere.memory_speed_mts) == (None, None, None)
    assert (elsewhere.cores, elsewhere.memory_bytes) == (here.cores, here.memory_bytes)


def test_a_described_machine() -> None:
    found = read_hardware(find_topology("epyc-9755-2p-nps4"), None)
    assert (found.cpu_model, found.cores, found.nodes_per_socket) == (
        "AMD EPYC 9755 128-Core Processor",
        256,
        4,
    )


def test_nodes_without_cpus_are_no_part_of_a_socket() -> None:
    found = read_hardware(find_topology("epyc-9454-2p-cxl"), None)
    assert found.nodes_per_socket == 1
    assert found.numa_nodes > 2


def test_this_machine() -> None:
    found = read_hardware(sysfs.read())
    assert found.kernel
    assert 1 <= found.allowed_cpus <= found.cpus
