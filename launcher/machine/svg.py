"""Draws a machine as SVG: one rectangle per core with its cpu's number, and a strip below per sibling.

Sizes are in px. Text uses the viewer's fonts; colours are those of `picture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final

from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.machine.picture import Block, Mark, Picture, colour, ink
from launcher.machine.topology import Core

CORE_W: Final = 30
CORE_H: Final = 20
STRIP_H: Final = 5
GAP: Final = 2
PAD: Final = 8
TITLE_H: Final = 20
MARGIN: Final = 20
MAX_ROW: Final = 1_240
"""Sockets are side by side up to this width, then below each other."""
_LINE: Final = 22
_LETTER: Final = 6.6
"""Estimated maximum width of a letter of 12 px; fonts are not measured."""

_FILLS: Final = {
    Mark.FREE: "#eceff2",
    Mark.RESERVED: "#4e4e4e",
    Mark.IDLE: "#d0d4d8",
    Mark.DENIED: "url(#denied)",
}
_STYLE: Final = (
    "text{font-family:'DejaVu Sans','Segoe UI',Helvetica,Arial,sans-serif;fill:#1c1c1c}"
    ".t{font-size:18px;font-weight:bold}.s{font-size:13px}.h{font-size:14px;font-weight:bold}"
    ".n{font-size:12px}.c{font-size:11px;text-anchor:middle}"
    ".socket{fill:#f6f7f8;stroke:#303030;stroke-width:1.5}.node{fill:#ffffff;stroke:#7a7a7a}"
    ".l3{fill:#f0f2f4;stroke:#b4b9be}"
)
_DENIED: Final = (
    '<pattern id="denied" width="6" height="6" patternUnits="userSpaceOnUse">'
    '<rect width="6" height="6" fill="#ffffff"/><path d="M0 6L6 0" stroke="#af5f5f"/></pattern>'
)


class _Box(Struct):
    """A drawing with a size, to be placed anywhere."""

    width: float
    height: float
    paint: Callable[[float, float], Iterator[str]]


def to_svg(picture: Picture, subtitle: str = "") -> str:
    body = _flow(_sockets(picture))
    legend = _legend(picture)
    width = (
        max(body.width, legend.width, _text_width(picture.title) * 1.6, _text_width(picture.counts))
        + 2 * MARGIN
    )
    top = MARGIN + (66 if subtitle else 48)
    height = top + body.height + legend.height + 2 * MARGIN
    size = f'width="{width:g}" height="{height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width:g} {height:g}" role="img">',
        f"<title>{escape(picture.title)}: {escape(subtitle or picture.counts)}</title>",
        f"<style>{_STYLE}</style><defs>{_DENIED}</defs>",
        f'<rect {size} fill="#ffffff"/>',
        _text(MARGIN, MARGIN + 16, picture.title, "t"),
        _text(MARGIN, MARGIN + 36, picture.counts, "s"),
    ]
    if subtitle:
        lines.append(_text(MARGIN, MARGIN + 54, subtitle, "s"))
    lines += body.paint(MARGIN, top)
    lines += legend.paint(MARGIN, top + body.height + MARGIN)
    return "\n".join([*lines, "</svg>", ""])


def _sockets(picture: Picture) -> list[_Box]:
    """All nodes have the same width; titles are on one line if all of them fit."""
    nodes = [node for socket in picture.sockets for node in socket.nodes]
    grids = [_grid([_block(block, picture) for block in node.blocks], PAD) for node in nodes]
    inner = max(*(grid.width for grid in grids), *(_text_width(node.title) for node in nodes))
    titles = [[f"{node.title} · {node.detail}"] for node in nodes]
    if any(_text_width(title) > inner for (title,) in titles):
        titles = [[node.title, node.detail] for node in nodes]
        inner = max(inner, *(_text_width(node.detail) for node in nodes))
    framed = iter([_framed(grid, its, "node", "n", inner) for grid, its in zip(grids, titles, strict=True)])
    return [
        _framed(_grid([next(framed) for _ in socket.nodes], PAD), [socket.title], "socket", "h", 0)
        for socket in picture.sockets
    ]


def _block(block: Block, picture: Picture) -> _Box:
    inner = _grid([_core(core, picture) for core in block.cores], GAP)

    def paint(x: float, y: float) -> Iterator[str]:
        if block.l3 is not None:
            yield _rect(x, y, inner.width + PAD, inner.height + PAD, 'class="l3" rx="3"')
        yield from inner.paint(x + PAD / 2, y + PAD / 2)

    return _Box(inner.width + PAD, inner.height + PAD, paint)


def _core(core: Core, picture: Picture) -> _Box:
    cpus = tuple(core.cpus)

    def paint(x: float, y: float) -> Iterator[str]:
        mark = picture.marks[cpus[0]]
        fill = _fill(mark, picture)
        yield "<g>"
        yield f"<title>{escape(_tooltip(core, picture))}</title>"
        yield _rect(x, y, CORE_W, CORE_H, f'fill="{fill}" rx="2"')
        text = ink(fill) if fill.startswith("#") else "#000000"
        faded = "" if isinstance(mark, int) or mark is Mark.RESERVED or not picture.slots else ' opacity=".6"'
        yield f'<text x="{x + CORE_W / 2:g}" y="{y + 14:g}" class="c" style="fill:{text}"{faded}>{cpus[0]}</text>'
        for i, cpu in enumerate(cpus[1:]):
            strip = _fill(picture.marks[cpu], picture)
            yield _rect(x, y + CORE_H + 1 + i * (STRIP_H + 1), CORE_W, STRIP_H, f'fill="{strip}"')
        yield "</g>"

    return _Box(CORE_W, CORE_H + (len(cpus) - 1) * (STRIP_H + 1), paint)


def _fill(mark: int | Mark, picture: Picture) -> str:
    if isinstance(mark, Mark):
        return "#d0dce8" if mark is Mark.FREE and not picture.slots else _FILLS[mark]
    return colour(mark)


def _tooltip(core: Core, picture: Picture) -> str:
    marks = {
        picture.slots[mark].label if isinstance(mark, int) else mark.value
        for mark in (picture.marks[cpu] for cpu in core.cpus)
        if picture.slots or mark is not Mark.FREE
    }
    socket, die, core_id = core.key
    where = f"cpu {core.cpus} · core {core_id} of die {die}, socket {socket}"
    return " · ".join([where, *sorted(marks)])


def _legend(picture: Picture) -> _Box:
    """A row for each slot: swatch, label, facts and cpus in columns; then the other marks in one row."""
    rows = [(slot.label, *slot.facts, f"cpus {shorten(slot.cpus)}") for slot in picture.slots]
    widths = [max(map(_text_width, column)) + 24 for column in zip(*rows, strict=True)]
    columns = 2 if len(rows) > 8 else 1
    deep = -(-len(rows) // columns)
    across = CORE_W + 8 + sum(widths)
    marks = [mark for mark in picture.used_marks if mark is not Mark.FREE]
    mark_width = sum(_text_width(mark.value) + CORE_W + 32 for mark in marks)

    def paint(x: float, y: float) -> Iterator[str]:
        for i, row in enumerate(rows):
            left, line = x + i // deep * (across + 2 * PAD), y + i % deep * _LINE
            yield _rect(left, line, CORE_W, 15, f'fill="{colour(i)}" rx="2"')
            for j, cell in enumerate(row):
                yield _text(left + CORE_W + 8 + sum(widths[:j]), line + 12, cell, "n")
        left, line = x, y + deep * _LINE + (6 if rows else 0)
        for mark in marks:
            yield _rect(left, line, CORE_W, 15, f'fill="{_FILLS[mark]}" rx="2"')
            yield _text(left + CORE_W + 8, line + 12, mark.value, "n")
            left += _text_width(mark.value) + CORE_W + 32

    height = deep * _LINE + (_LINE if marks else 0) + (6 if rows and marks else 0)
    return _Box(max(across * columns + (columns - 1) * 2 * PAD if rows else 0, mark_width), height, paint)


def shorten(cpus: CpuSet, letters: int = 36) -> str:
    """A cpulist for a legend: unchanged, with its step (0,2,4,…,126), or cut."""
    text = cpus.format()
    if len(text) <= letters:
        return text
    parts = text.split(",")
    return f"{','.join(parts[:3])},…,{parts[-1]}"


def _framed(inner: _Box, titles: Sequence[str], style: str, text: str, least: float) -> _Box:
    width = max(inner.width, least, *map(_text_width, titles)) + 2 * PAD
    top = TITLE_H + (len(titles) - 1) * 16
    height = inner.height + top + 2 * PAD - (0 if inner.height else PAD)

    def paint(x: float, y: float) -> Iterator[str]:
        yield _rect(x, y, width, height, f'class="{style}" rx="5"')
        for i, title in enumerate(titles):
            yield _text(x + PAD, y + 18 + 16 * i, title, text)
        yield from inner.paint(x + (width - inner.width) / 2, y + PAD + top)

    return _Box(width, height, paint)


def _grid(boxes: Sequence[_Box], gap: float) -> _Box:
    """Number of columns for a drawing about twice as wide as high, with full rows if possible."""
    columns = _columns(len(boxes))
    width = max((box.width for box in boxes), default=0)
    height = max((box.height for box in boxes), default=0)

    def paint(x: float, y: float) -> Iterator[str]:
        for i, box in enumerate(boxes):
            yield from box.paint(x + i % columns * (width + gap), y + i // columns * (height + gap))

    rows = -(-len(boxes) // columns)
    return _Box(
        columns * (width + gap) - gap if boxes else 0, rows * (height + gap) - gap if boxes else 0, paint
    )


def _columns(count: int) -> int:
    wide = math.ceil(math.sqrt(2 * count))
    even = (n for n in range(math.ceil(math.sqrt(count)), wide + 2) if n and count % n == 0)
    return max(1, next(even, wide))


def _flow(boxes: Sequence[_Box]) -> _Box:
    places: list[tuple[float, float, _Box]] = []
    x = y = width = height = 0.0
    for box in boxes:
        if x and x + box.width > MAX_ROW:
            x, y = 0.0, y + height + 2 * PAD
            height = 0.0
        places.append((x, y, box))
        x += box.width + 2 * PAD
        width, height = max(width, x - 2 * PAD), max(height, box.height)

    def paint(left: float, top: float) -> Iterator[str]:
        for x, y, box in places:
            yield from box.paint(left + x, top + y)

    return _Box(width, y + height, paint)


def _text_width(text: str) -> float:
    return len(text) * _LETTER


def _rect(x: float, y: float, width: float, height: float, attributes: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {attributes}/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(text)}</text>'
