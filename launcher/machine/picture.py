"""The content of a machine's drawing: nested boxes, and a mark for every cpu.

`draw` renders it on a terminal, `svg` as an image. It knows no plans: instances are `DrawnSlot` values.
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Final

from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.base.text import counted, format_size
from launcher.machine.topology import Core, L3Domain, NumaNode, Topology

# First Okabe and Ito's colours, distinct with colour blindness, then others; each is a colour of the terminals' cube of
# 216 (steps 00 5f 87 af d7 ff), so that terminal and image are the same. Neighbours in the list differ in lightness.
PALETTE: Final = (
    "#0087d7", "#ffaf00", "#00af87", "#d7afd7", "#875f87", "#d75f00", "#87d7ff", "#5f8700",
    "#ffd7af", "#5f5faf", "#d7d75f", "#af005f", "#87d7af", "#875f00", "#afafff", "#005f5f",
)  # fmt: skip


class Mark(StrEnum):
    """Why a cpu runs no instance."""

    FREE = "not used"
    RESERVED = "reserved for proxy and OS"
    IDLE = "idle SMT sibling"
    DENIED = "not allowed to this process"


class DrawnSlot(Struct, frozen=True):
    label: str
    cpus: CpuSet
    facts: tuple[str, ...] = ()
    """More columns of the legend, such as node and KV cache; all slots have the same number of them."""


class Block(Struct, frozen=True):
    """The cores of a node that share an L3; all its cores where the kernel reports no L3."""

    l3: L3Domain | None
    cores: tuple[Core, ...]


class NodeBox(Struct, frozen=True):
    """A node's part of a socket. `node` is None for cores without a node."""

    node: NumaNode | None
    blocks: tuple[Block, ...]

    @property
    def title(self) -> str:
        if self.node is None:
            return "in no NUMA node"
        node = self.node
        parts = [f"node {node.id}", format_size(node.memory_bytes) if node.memory_known else "memory unknown"]
        if node.memory_channels is not None:
            parts.append(f"{node.memory_channels} channels")
        return " · ".join(parts)

    @property
    def detail(self) -> str:
        cpus = CpuSet(cpu for block in self.blocks for core in block.cores for cpu in core.cpus)
        return " · ".join([f"cpus {cpus}" if cpus else "no cpus", *self._l3()])

    def _l3(self) -> list[str]:
        domains = [block.l3 for block in self.blocks if block.l3 is not None]
        if not domains:
            return []
        sizes = sorted({domain.size_bytes for domain in domains if domain.size_bytes is not None})
        size = f" {' / '.join(map(format_size, sizes))}" if sizes else ""
        if any(domain.node is None for domain in domains):
            return [f"part of L3{size}"]
        return [f"{len(domains)} × L3{size}" if len(domains) > 1 else f"L3{size}"]


class SocketBox(Struct, frozen=True):
    """A socket; `id` is None for the nodes without cpus."""

    id: int | None
    nodes: tuple[NodeBox, ...]

    @property
    def title(self) -> str:
        return "memory without cpus" if self.id is None else f"socket {self.id}"


class Picture(Struct, frozen=True):
    title: str
    counts: str
    sockets: tuple[SocketBox, ...]
    marks: Mapping[int, int | Mark]
    """For every cpu: the index of its slot, or the reason for having none."""
    slots: tuple[DrawnSlot, ...]

    @property
    def used_marks(self) -> tuple[Mark, ...]:
        """Marks to explain in the legend, in order."""
        found = set(self.marks.values())
        return tuple(mark for mark in Mark if mark in found and (self.slots or mark is Mark.DENIED))


def make_picture(
    topology: Topology, slots: Sequence[DrawnSlot] = (), reserved: CpuSet | None = None
) -> Picture:
    smt = max((len(core.cpus) for core in topology.cores), default=1)
    counts = (
        (len(topology.sockets), "socket"), (len(topology.numa_nodes), "NUMA node"),
        (len(topology.l3_domains), "L3 cache"), (len(topology.cores), "core"),
        (len(topology.online), "cpu"),
    )  # fmt: skip
    return Picture(
        title=topology.cpu.model or "unknown cpu",
        counts=" · ".join(counted(n, what) for n, what in counts) + (f" ({smt} per core)" if smt > 1 else ""),
        sockets=_sockets(topology),
        marks=_marks(topology, slots, CpuSet() if reserved is None else reserved),
        slots=tuple(slots),
    )


def _sockets(topology: Topology) -> tuple[SocketBox, ...]:
    nodes = {node.id: node for node in topology.numa_nodes}
    domain_of = {cpu: domain for domain in topology.l3_domains for cpu in domain.cpus}
    cores: dict[int, dict[int | None, dict[CpuSet | None, list[Core]]]] = defaultdict(
        lambda: defaultdict(lambda: defaultdict(list))
    )
    for core in sorted(topology.cores, key=lambda core: core.cpus.first):
        domain = domain_of.get(core.cpus.first)
        cores[core.key.socket][core.node][None if domain is None else domain.cpus].append(core)
    boxes = [
        SocketBox(
            socket,
            tuple(
                NodeBox(
                    None if node is None else nodes[node],
                    tuple(
                        Block(domain_of.get(its[0].cpus.first), tuple(its))
                        for its in cores[socket][node].values()
                    ),
                )
                for node in sorted(cores[socket], key=lambda node: -1 if node is None else node)
            ),
        )
        for socket in sorted(cores)
    ]
    far = tuple(NodeBox(node, ()) for node in topology.numa_nodes if not node.cpus)
    return (*boxes, SocketBox(None, far)) if far else tuple(boxes)


def _marks(topology: Topology, slots: Sequence[DrawnSlot], reserved: CpuSet) -> dict[int, int | Mark]:
    slot_of = {cpu: i for i, slot in enumerate(slots) for cpu in slot.cpus}
    marks: dict[int, int | Mark] = {}
    for core in topology.cores:
        taken = any(cpu in slot_of for cpu in core.cpus)
        for cpu in core.cpus:
            if cpu in slot_of:
                marks[cpu] = slot_of[cpu]
            elif cpu not in topology.allowed:
                marks[cpu] = Mark.DENIED
            elif cpu in reserved:
                marks[cpu] = Mark.RESERVED
            else:
                marks[cpu] = Mark.IDLE if taken else Mark.FREE
    return marks


def colour(slot: int) -> str:
    return PALETTE[slot % len(PALETTE)]


def ink(background: str) -> str:
    """Black or white, whichever has more contrast on a colour (relative luminance, WCAG 2.2)."""
    red, green, blue = (_linear(int(background[i : i + 2], 16) / 255) for i in (1, 3, 5))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def _linear(channel: float) -> float:
    return float(channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4)


# --- Draws a machine on a terminal: one character per cpu, one line per SMT sibling. ---
#
# Characters are distinct without colour: instances are digits and letters, others are signs.

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
