"""SMBIOS tables, written field by field after DMTF DSP0134 3.7; offsets as in its tables."""

from __future__ import annotations

import struct

ARRAY = 0x1000
DRAM, OPTANE = 0x03, 0x07
END = struct.pack("<BBH", 127, 4, 0xFEFF) + b"\0\0"


def structure(kind: int, handle: int, formatted: bytearray, *strings: str) -> bytes:
    """6.1.2, 6.1.3: type, length, handle; after the formatted area strings that end in NUL, and one NUL more."""
    struct.pack_into("<BBH", formatted, 0, kind, len(formatted), handle)
    return bytes(formatted) + (b"".join(text.encode() + b"\0" for text in strings) or b"\0") + b"\0"


def array(handle: int = ARRAY, use: int = 0x03) -> bytes:
    """7.17, type 16. `use` 3 is system memory, 4 video memory."""
    area = bytearray(0x17)
    area[0x04], area[0x05] = 0x03, use
    return structure(16, handle, area)


def module(
    slot: int,
    *,
    mib: int,
    rated: int = 0,
    configured: int = 0,
    of: int = ARRAY,
    technology: int = DRAM,
    length: int = 0x5C,
) -> bytes:
    """7.18, type 17; `mib` 0 is an empty slot. Before 2.7 `length` was 1Bh, before 3.2 28h, before 3.3 54h."""
    area = bytearray(0x5C)
    struct.pack_into("<HH", area, 0x04, of, 0xFFFE)
    struct.pack_into("<H", area, 0x0C, min(mib, 0x7FFF))  # 7.18.5: 7FFFh, the size is in 1Ch
    area[0x10], area[0x11], area[0x12] = 1, 2, 0x22  # locators; DDR5
    _speed(area, 0x15, 0x54, rated)
    struct.pack_into("<I", area, 0x1C, mib if mib >= 0x7FFF else 0)
    _speed(area, 0x20, 0x58, configured)
    area[0x28] = technology
    return structure(17, 0x1100 + slot, area[:length], f"DIMM {slot}", f"P0 CHANNEL {slot}")


def _speed(area: bytearray, offset: int, extended: int, mts: int) -> None:
    """7.18.4: FFFFh, the speed is in the extended field."""
    struct.pack_into("<H", area, offset, min(mts, 0xFFFF))
    struct.pack_into("<I", area, extended, mts if mts >= 0xFFFF else 0)
