"""One frame of `top`: the lines of `status`, and a drawing of the machine coloured by load. Pure."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from rich.style import Style
from rich.text import Text

from launcher.base.cpuset import CpuSet
from launcher.base.text import fitted
from launcher.cli import status as status_table
from launcher.control import verdict
from launcher.machine.picture import DrawnSlot, Mark, NodeBox, Picture, make_picture, sign
from launcher.machine.topology import Core, Topology

# Busy share of a cpu from which it is drawn as working or busy.
WORKING: Final = 0.15
BUSY: Final = 0.70
_GOOD: Final = "green"
_WAITS: Final = "yellow"
_BAD: Final = "red"
_COLOUR: Final = {
    "ready": _GOOD, "starting": _WAITS, "draining": _WAITS, "stopping": _WAITS, "backoff": _BAD, "failed": _BAD,
}  # fmt: skip
# Rows kept for notes about problems when the drawing would use all of them.
_WORDS: Final = 6
_INDENT: Final = "  "


class View(Struct, frozen=True):
    status: dict[str, Any]
    now: float
    topology: Topology | None = None
    reserved: CpuSet | None = None
    busy: Mapping[int, float] | None = None
    """Busy share of each cpu since the last frame."""
    trouble: str = ""
    """Error message of a daemon that does not answer; the status is then old."""


def compose(view: View, width: int, height: int) -> list[Text]:
    """At most `height` lines of at most `width` characters. The drawing gets the rows that notes do not need."""
    lines = [_plain(line, width) for line in status_table.head(view.status, view.now)]
    lines[0].stylize(_summary_style(view.status))
    if view.trouble:
        lines.insert(0, Text(_cut(view.trouble, width), style=Style(color="red", reverse=True)))
    lines += [Text(), *_table(view, width)]
    words = [_plain(line, width) for line in status_table.notes(view.status, view.now)]
    rows = height - len(lines) - min(len(words), _WORDS)
    lines += _machine(view, width, rows)
    for line in lines:
        line.truncate(width)  # when a single core is wider than the terminal
    return [*lines, *words][:height]


def _plain(line: str, width: int) -> Text:
    return Text(_cut(line, width))


def _cut(line: str, width: int) -> str:
    return fitted([line], width)[0]


def _summary_style(status: dict[str, Any]) -> Style:
    return Style(color=(_GOOD, _WAITS, _BAD)[verdict.level(status)], bold=True)


def _table(view: View, width: int) -> Iterator[Text]:
    rows = status_table.rows(view.status, view.now, width)
    yield Text(rows[0], style="bold")
    for row, slot in zip(rows[1:], view.status["slots"], strict=True):
        yield Text(row, style=Style(color=None if slot["state"] == "ready" else _COLOUR.get(slot["state"])))


def _machine(view: View, width: int, rows: int) -> list[Text]:
    if view.topology is None:
        return []
    slots = [DrawnSlot(f"slot {slot['slot']}", CpuSet.parse(slot["cpus"])) for slot in view.status["slots"]]
    picture = make_picture(view.topology, slots, view.reserved)
    cells = _Cells(view, picture)
    legend = _legend(picture)
    shapes = [
        [Text(), *_nodes(picture, cells, width, titles=titles), Text(_cut(legend, width), style="dim")]
        for titles in (True, False)
    ]
    fits = next((lines for lines in shapes if len(lines) <= rows), None)
    if fits is not None:
        return fits
    missing = f"(the drawing of the machine needs {len(shapes[-1]) - rows} more lines)"
    return [Text(_cut(missing, width), style="dim")] if rows > 0 else []


def _nodes(picture: Picture, cells: _Cells, width: int, *, titles: bool) -> Iterator[Text]:
    for socket in picture.sockets:
        for box in socket.nodes:
            name = "-" if box.node is None else str(box.node.id)
            prefix = _INDENT if titles else f"n{name} "
            if titles:
                yield Text(_cut(f"{socket.title} · {box.title}", width))
            yield from _rows(box, cells, prefix, width)


def _rows(box: NodeBox, cells: _Cells, prefix: str, width: int) -> Iterator[Text]:
    line = Text(prefix)
    for block in box.blocks:
        wide = sum(cells.width(core) for core in block.cores)
        if len(line) > len(prefix) and len(line) + wide > width:
            line = yield from _next(line, prefix)
        for core in block.cores:
            if len(line) + cells.width(core) > width and len(line) > len(prefix):
                line = yield from _next(line, prefix)
            cells.draw(core, line)
        line.append(" ")
    yield from _next(line, prefix)


def _next(line: Text, prefix: str) -> Generator[Text, None, Text]:
    line.rstrip()
    if line.plain.strip():
        yield line
    return Text(" " * len(prefix))


class _Cells:
    """A character per core: its slot, coloured by the slot's state, highlighted by load."""

    def __init__(self, view: View, picture: Picture) -> None:
        self._slots: Sequence[dict[str, Any]] = view.status["slots"]
        self._busy, self._marks = view.busy, picture.marks
        # SMT siblings are drawn separately when a slot uses them.
        self._all = any(
            sum(isinstance(picture.marks[cpu], int) for cpu in core.cpus) > 1
            for socket in picture.sockets for node in socket.nodes for block in node.blocks for core in block.cores
        )  # fmt: skip

    def width(self, core: Core) -> int:
        return len(core.cpus) if self._all else 1

    def draw(self, core: Core, line: Text) -> None:
        for cpu in tuple(core.cpus)[: self.width(core)]:
            mark = self._marks[cpu]
            line.append(self._sign(mark), self._style(cpu, mark))

    def _sign(self, mark: int | Mark) -> str:
        return sign(mark) if isinstance(mark, Mark) else sign(int(self._slots[mark]["slot"]))

    def _style(self, cpu: int, mark: int | Mark) -> Style:
        if isinstance(mark, Mark):
            return Style(dim=True)
        colour = _COLOUR.get(self._slots[mark]["state"])
        if self._busy is None:  # first frame: not known yet
            return Style(color=colour)
        share = self._busy.get(cpu, 0.0)
        return Style(color=colour, dim=share < WORKING or None, reverse=share >= BUSY or None)


def _legend(picture: Picture) -> str:
    marks = [f"{sign(mark)} {mark.value}" for mark in picture.used_marks]
    return " · ".join(["digit: slot; dim: idle; reversed: busy", *marks])
