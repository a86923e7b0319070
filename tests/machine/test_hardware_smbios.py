"""Memory modules in tables as firmware writes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.smbios_table import ARRAY, END, OPTANE, array, module, structure

from launcher.machine.hardware import MemoryModules, memory_modules

DIMM = 64 * 1024


def table(*structures: bytes) -> bytes:
    firmware = structure(0, 0, bytearray(0x1A), "Vendor", "1.0")
    return firmware + array() + b"".join(structures) + END


def test_a_full_socket() -> None:
    modules = (module(i, mib=DIMM, rated=6400, configured=6000) for i in range(12))
    assert memory_modules(table(*modules)) == MemoryModules(12, 6000)


def test_empty_slots_are_not_counted() -> None:
    modules = (module(i, mib=DIMM if i % 2 else 0, configured=4800) for i in range(24))
    assert memory_modules(table(*modules)) == MemoryModules(12, 4800)


def test_of_mixed_speeds_the_slowest_counts() -> None:
    slow = module(1, mib=16 * 1024, rated=4800, configured=4800)
    assert memory_modules(table(module(0, mib=DIMM, configured=5600), slow)) == MemoryModules(2, 4800)


def test_the_rated_speed_is_not_what_a_module_runs_at() -> None:
    assert memory_modules(table(module(0, mib=DIMM, rated=6400))) == MemoryModules(1, None)


def test_a_module_of_unknown_speed_hides_no_other() -> None:
    modules = (module(0, mib=DIMM), module(1, mib=DIMM, configured=3200))
    assert memory_modules(table(*modules)) == MemoryModules(2, 3200)


def test_speeds_beyond_16_bits() -> None:
    assert memory_modules(table(module(0, mib=DIMM, configured=70_000))) == MemoryModules(1, 70_000)


@pytest.mark.parametrize(("length", "speed"), [(0x1B, None), (0x28, 3200), (0x54, 3200)])
def test_older_versions_have_shorter_structures(length: int, speed: int | None) -> None:
    assert memory_modules(table(module(0, mib=8192, configured=3200, length=length))) == MemoryModules(
        1, speed
    )


def test_other_memory_is_not_system_memory() -> None:
    video, persistent = module(8, mib=512, configured=800, of=0x2000), module(9, mib=DIMM, technology=OPTANE)
    found = memory_modules(
        table(array(0x2000, use=0x04), video, persistent, module(0, mib=DIMM, configured=2933))
    )
    assert found == MemoryModules(1, 2933)


def test_a_missing_array_is_no_reason_to_leave_a_module_out() -> None:
    assert memory_modules(module(0, mib=DIMM, configured=3200, of=ARRAY) + END) == MemoryModules(1, 3200)


@pytest.mark.parametrize("text", [b"", b"\0" * 64, END, table(), table(module(0, mib=0))])
def test_a_table_without_modules(text: bytes) -> None:
    assert memory_modules(text) is None


def test_what_follows_the_end_of_the_table_is_not_read() -> None:
    assert memory_modules(table() + module(0, mib=DIMM)) is None


@given(st.binary(max_size=600), st.integers(0, 400))
def test_a_broken_table_is_no_crash(noise: bytes, cut: int) -> None:
    memory_modules(noise)
    memory_modules(table(module(0, mib=DIMM, configured=3200))[:cut] + noise)
