"""Memory modules from the firmware's SMBIOS table (DMTF DSP0134 3.7). Pure.

The kernel exports the table as sys/firmware/dmi/tables/DMI, readable by root only. Virtual machines often have none, or
describe modules without a speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

# Structure types, section 6.2.
_ARRAY: Final = 16
_DEVICE: Final = 17
_END: Final = 127
# 7.17.2: arrays may also describe video memory, flash chips or caches.
_SYSTEM_MEMORY: Final = 0x03
# 7.18.6: NVDIMM-N, -F, -P and Intel Optane persistent memory are no memory channels' DRAM.
_NON_VOLATILE: Final = frozenset({0x04, 0x05, 0x06, 0x07})
# Of a 16-bit field: the value is in the 32-bit extended field (7.18.4, 7.18.5).
_EXTENDED: Final = 0xFFFF


@dataclass(frozen=True, slots=True)
class MemoryModules:
    count: int
    """Installed modules; empty slots are not counted."""
    speed_mts: int | None
    """Configured speed of the slowest module, at which a memory controller runs all of its own; None: not reported."""


@dataclass(frozen=True, slots=True)
class _Structure:
    type: int
    handle: int
    data: bytes
    """The formatted area; older versions of the standard have shorter ones."""

    def number(self, offset: int, size: int) -> int | None:
        """A little-endian field; None where the structure is shorter."""
        field = self.data[offset : offset + size]
        return int.from_bytes(field, "little") if len(field) == size else None


def memory_modules(table: bytes) -> MemoryModules | None:
    """The installed modules of system memory; None when the table describes none."""
    structures = list(_structures(table))
    elsewhere = {it.handle for it in structures if it.type == _ARRAY and it.number(0x05, 1) != _SYSTEM_MEMORY}
    found = [
        it
        for it in structures
        if it.type == _DEVICE
        and it.number(0x0C, 2)  # size: 0 for an empty slot
        and it.number(0x04, 2) not in elsewhere
        and it.number(0x28, 1) not in _NON_VOLATILE
    ]
    if not found:
        return None
    speeds = [speed for it in found if (speed := _configured_speed(it))]
    return MemoryModules(len(found), min(speeds, default=None))


def _configured_speed(device: _Structure) -> int | None:
    """MT/s; None or 0 where unknown. Since 2.7; the rated speed at 15h is not what the module runs at."""
    speed = device.number(0x20, 2)
    return device.number(0x58, 4) if speed == _EXTENDED else speed


def _structures(table: bytes) -> Iterator[_Structure]:
    """6.1: type, length of the formatted area, handle; after it strings, ended by two NULs. Ends at a malformed one."""
    start = 0
    while start + 4 <= len(table):
        length = table[start + 1]
        if length < 4:
            return
        data = table[start : start + length]
        yield _Structure(data[0], int.from_bytes(data[2:4], "little"), data)
        end = table.find(b"\0\0", start + length)
        if data[0] == _END or end < 0:
            return
        start = end + 2
