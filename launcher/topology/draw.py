"""Draws a machine on a terminal: one character per cpu, one line per SMT sibling.

Characters are distinct without colour: instances are digits and letters, others are signs.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from typing import Final

from launcher.topology.model import Core
from launcher.topology.picture import Block, Mark, NodeBox, Picture, colour, ink

SIGNS: Final = string.digits + string.ascii_lowercase + string.ascii_uppercase
MARKS: Final = {Mark.FREE: "-", Mark.RESERVED: "=", Mark.IDLE: "·", Mark.DENIED: "/"}
MIN_WIDTH: Final = 40
_INDENT: Final = 4
# A node without L3, or with one L3 over 96 cores, is split into runs of this many cores.
_RUN: Final = 32
_CUBE: Final = ("00", "5f", "87", "af", "d7", "ff")
_DIM: Final = "\x1b[2m"
_RESERVED: Final = "\x1b[48;5;240;38;5;231m"
_RESET: Final = "\x1b[0m"


def draw(picture: Picture, *, width: int = 100, color: bool = False) -> str:
    """The drawing in lines of at most `width` characters, except titles; escape codes are not counted."""
    lines = [picture.title, picture.counts, ""]
    for socket in picture.sockets:
        lines.append(socket.title)
        for node in socket.nodes:
            lines.append(f"  {node.title} · {node.detail}")
            lines += _node(node, picture, max(width, MIN_WIDTH) - _INDENT, color=color)
    return "\n".join([*lines, "", *_legend(picture, color=color)])


def sign(mark: int | Mark) -> str:
    """The character of a cpu; more than 62 instances share `#`."""
    if isinstance(mark, Mark):
        return MARKS[mark]
    return SIGNS[mark] if mark < len(SIGNS) else "#"


def _node(box: NodeBox, picture: Picture, width: int, *, color: bool) -> Iterator[str]:
    runs = [run for block in box.blocks for run in _runs(block)]
    column = max((_width(run) for run in runs), default=1) + 1
    fit = max(1, (width + 1) // column)
    rows = -(-len(runs) // fit)
    each = -(-len(runs) // max(rows, 1))  # rows of equal length: 16 blocks are 8 + 8, not 12 + 4
    for row in range(rows):
        yield from _row(runs[row * each : (row + 1) * each], picture, column, color=color)


def _runs(block: Block) -> list[Sequence[Core]]:
    return [block.cores[i : i + _RUN] for i in range(0, len(block.cores), _RUN)]


def _width(run: Sequence[Core]) -> int:
    return max(len(run), len(str(run[0].cpus.first)))


def _row(runs: Sequence[Sequence[Core]], picture: Picture, column: int, *, color: bool) -> Iterator[str]:
    """A ruler with the first cpu of each run, then one line per SMT sibling."""
    margin = " " * _INDENT
    ruler = "".join(str(run[0].cpus.first).ljust(column) for run in runs).rstrip()
    yield margin + (f"{_DIM}{ruler}{_RESET}" if color else ruler)
    for thread in range(max(len(core.cpus) for run in runs for core in run)):
        cells = []
        for run in runs:
            cpus = [tuple(core.cpus)[thread : thread + 1] for core in run]
            text = "".join(_cell(picture.marks[cpu[0]], color=color) if cpu else " " for cpu in cpus)
            cells.append(text + " " * (column - len(run)))
        yield margin + "".join(cells).rstrip()


def _cell(mark: int | Mark, *, color: bool) -> str:
    if not color:
        return sign(mark)
    if mark is Mark.RESERVED:
        return f"{_RESERVED}{sign(mark)}{_RESET}"
    if isinstance(mark, Mark):
        return f"{_DIM}{sign(mark)}{_RESET}"
    background = colour(mark)
    return f"\x1b[48;5;{_index(background)};38;5;{_index(ink(background))}m{sign(mark)}{_RESET}"


def _index(hexadecimal: str) -> int:
    """Number of a colour in the terminals' cube: 16 + 36 red + 6 green + blue."""
    red, green, blue = (_CUBE.index(hexadecimal[i : i + 2]) for i in (1, 3, 5))
    return 16 + 36 * red + 6 * green + blue


def _legend(picture: Picture, *, color: bool) -> list[str]:
    marks = "   ".join(f"{_cell(mark, color=color)} {mark.value}" for mark in picture.used_marks)
    if not picture.slots:
        return [marks] if marks else []
    shown = "".join(_cell(i, color=color) for i in range(min(len(picture.slots), len(SIGNS) + 1)))
    return [f"{shown} {'instance' if len(picture.slots) == 1 else 'instances'}   {marks}".rstrip()]
