"""Facts of the host from py-cpuinfo and psutil."""

from __future__ import annotations

import psutil
import pytest
from msgspec.structs import replace

from launcher.machine.hardware import HostFacts, read_host


@pytest.fixture(scope="module")
def facts() -> HostFacts:
    return read_host()


def test_the_live_host(facts: HostFacts) -> None:
    assert facts.vendor
    assert facts.flags
    assert 0 < facts.memory_available_bytes <= psutil.virtual_memory().total
    assert facts.logical_cpus >= 1


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "zen"),
    [
        ("AuthenticAMD", 0x17, set(), "Zen or Zen 2"),
        ("AuthenticAMD", 0x19, set(), "Zen 3"),
        ("AuthenticAMD", 0x19, {"avx512f"}, "Zen 4"),
        ("AuthenticAMD", 0x1A, {"avx512f"}, "Zen 5"),
        ("AuthenticAMD", 0x15, set(), None),
        ("GenuineIntel", 6, {"avx512f"}, None),
    ],
)
def test_zen(facts: HostFacts, vendor: str, family: int, flags: set[str], zen: str | None) -> None:
    assert replace(facts, vendor=vendor, family=family, flags=frozenset(flags)).zen == zen
