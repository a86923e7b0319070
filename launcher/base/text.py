"""Makes foreign text safe for a line of a message, a log or a terminal. Pure.

A request, an instance's output, a process's name: each may hold a line end that begins a forged line, an escape
sequence that a terminal obeys (ECMA-48; also as one C1 character), or a mark that turns what is read around (Unicode's
bidirectional controls, UAX #9), and may be of any length.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

# Maximum characters of a value quoted in a message or a field.
MAX_QUOTED: Final = 200
# Maximum characters of a line or field of a log. Instances' lines are cut at as many bytes before.
MAX_LINE: Final = 8192
# C0 but the tab, DEL and C1; marks of direction, invisible operators, line and paragraph separators, the byte order mark,
# interlinear annotations, tags; halves of surrogate pairs, which cannot be encoded.
_ESCAPED: Final = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)
_NAMED: Final = {"\n": "\\n", "\r": "\\r"}


def cut(text: str, most: int = MAX_QUOTED) -> str:
    """At most `most` characters, followed by the length of a longer text."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def printable(text: str) -> str:
    """One line without control characters: invisible characters become \\n, \\r, \\xNN, \\uNNNN or \\UNNNNNNNN.

    A backslash stays as it is, so that lines can be read; what was escaped twice is as what was escaped once."""
    if text.isascii() and text.isprintable():
        return text
    return _ESCAPED.sub(_escape, text)


def quoted(text: str, most: int = MAX_QUOTED) -> str:
    """`printable` and `shortened`, for a message or a field."""
    if len(text) <= most and text.isascii() and text.isprintable():
        return text
    return printable(cut(text, most))


def printable_lines(text: str) -> str:
    """As `printable`, for a text with several lines."""
    return "\n".join(map(printable, text.split("\n")))


def printable_tree(value: Any) -> Any:
    """A JSON value with all its texts printable, including names."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {printable(name): printable_tree(inner) for name, inner in value.items()}
        case list():
            return [printable_tree(inner) for inner in value]
        case _:
            return value


def _escape(found: re.Match[str]) -> str:
    if named := _NAMED.get(found[0]):
        return named
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


# --- Text tables and counted nouns. ---


def counted(count: int, noun: str) -> str:
    """`1 instance`, `1,024 instances`, for nouns whose plural is an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """One line per row, two spaces between columns, no trailing spaces.

    All rows have the same length; the first is the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def fitted(lines: Sequence[str], width: int) -> list[str]:
    """Lines of at most `width` characters: longer ones end in an ellipsis."""
    return [line if len(line) <= width else line[: width - 1] + "…" for line in lines]


# --- Parses and formats sizes such as "40GiB". ---

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
