"""Makes foreign text safe for a line of a message, a log or a terminal. Pure.

A request, an instance's output, a process's name: each may hold a line end that begins a forged line, an escape
sequence that a terminal obeys (ECMA-48; also as one C1 character), or a mark that turns what is read around (Unicode's
bidirectional controls, UAX #9), and may be of any length.
"""

from __future__ import annotations

import re
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
