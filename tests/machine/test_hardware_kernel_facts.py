"""Kernel settings under a root, and roots that lack them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.budgets import bound

from launcher.machine.hardware import KernelSettings, read_settings


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.bounded
def test_what_a_server_says(tmp_path: Path) -> None:
    put(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    put(tmp_path / "proc/sys/kernel/numa_balancing", "1\n")
    for cpu in range(256):
        governor = "performance" if cpu else "powersave"
        put(tmp_path / f"sys/devices/system/cpu/cpufreq/policy{cpu}/scaling_governor", governor + "\n")
    put(tmp_path / "sys/devices/system/cpu/cpufreq/boost", "1\n")
    began = time.process_time()
    found = read_settings(tmp_path)
    assert time.process_time() - began < bound(0.2), "256 cpus: milliseconds"
    assert found == KernelSettings("madvise", True, frozenset({"performance", "powersave"}))


def test_what_is_not_there_is_not_known(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == KernelSettings(None, None, None)
    (tmp_path / "sys/devices/system/cpu/cpufreq/policy0").mkdir(parents=True)
    put(tmp_path / "sys/kernel/mm/transparent_hugepage/enabled", "\n")
    assert read_settings(tmp_path) == KernelSettings(None, None, None)


@pytest.mark.parametrize(("text", "on"), [("0\n", False), ("1\n", True), ("2\n", True), ("", False)])
def test_numa_balancing(text: str, on: bool, tmp_path: Path) -> None:
    put(tmp_path / "proc/sys/kernel/numa_balancing", text)
    assert read_settings(tmp_path).numa_balancing is on


def test_this_machine() -> None:
    assert read_settings().transparent_hugepages in {None, "always", "madvise", "never"}
