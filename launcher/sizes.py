"""Parses and formats sizes such as "40GiB"."""

from __future__ import annotations

import re
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
_UNITS: Final = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024**4,
                 "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}  # fmt: skip
_SIZE: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes in a size such as "40GiB", "1.5 GiB" or "512MB". Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or match["unit"] not in _UNITS:
        raise ValueError(
            f'{text!r} is not a size such as "40GiB" (units: {", ".join(u for u in _UNITS if u)})'
        )
    return round(float(match["number"]) * _UNITS[match["unit"]])


def format_size(size_bytes: int) -> str:
    """A size with three significant digits in binary units."""
    value, units = float(size_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= KIB and len(units) > 1:
        value /= KIB
        del units[0]
    unit = units[0]
    return f"{value:.0f} {unit}" if unit == "B" or abs(value) >= 100 else f"{value:.3g} {unit}"
