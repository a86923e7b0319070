"""One-line descriptions of machines, and the Topology that the kernel of such a machine would report.

Levels go from the outside in, as in hwloc's synthetic topologies::

    socket:2 node:1(memory=768GiB,channels=12) l3:16(size=32MiB) core:8 smt:2

two sockets, in each one NUMA node, in each node 16 L3 caches, in each L3 8 cores of 2 cpus. Where the kernel shows an
L3 that holds several nodes (Intel's sub-NUMA clusters) `l3` comes before `node`.

| word | in brackets | default | | --- | --- | --- | | socket:N | | | | node:N | memory=SIZE of each; channels=N of
each; near=, far= distances in and between sockets | 12, 32 | | l3:N | size=SIZE of each; without `l3` no L3 is
reported, as in many virtual machines | | | core:N | | | | smt:N | numbering=server: siblings are k and k + all cores;
adjacent: 2k and 2k + 1 | 1, server | | cxl:N | nodes without cpus: memory=SIZE of each, distance= from everywhere |
50 |
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.cpuset import MAX_ID, CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import parse_size
from launcher.base.text_files import read_toml
from launcher.machine.topology import Core, CoreKey, CpuInfo, L3Domain, NumaNode, Socket, Topology

UNNAMED: Final = CpuInfo(vendor="", model="described machine", family=None, flags=frozenset())
LOCAL: Final = 10
"""ACPI's distance of a node to itself; the others are relative to it."""

_WORD: Final = re.compile(r"(?P<kind>[a-z0-9]+):(?P<count>\d{1,6})(?:\((?P<facts>[^()]*)\))?", re.ASCII)
_FACTS: Final[Mapping[str, frozenset[str]]] = {
    "socket": frozenset(),
    "node": frozenset({"memory", "channels", "near", "far"}),
    "l3": frozenset({"size"}),
    "core": frozenset(),
    "smt": frozenset({"numbering"}),
    "cxl": frozenset({"memory", "distance"}),
}
_ORDERS: Final = (
    ("socket", "node", "l3", "core"),
    ("socket", "l3", "node", "core"),
    ("socket", "node", "core"),
)
_NUMBERINGS: Final = ("server", "adjacent")


class Machine(Struct, frozen=True):
    """A uniform machine: sockets x nodes x L3s x cores x smt."""

    sockets: int
    nodes: int
    """Of each socket."""
    l3: int | None
    """Of each node, or of each socket where `l3_spans`; None: no L3 is shown."""
    cores: int
    """Of each node."""
    smt: int = 1
    memory_bytes: int = 0
    """Of each node."""
    channels: int | None = None
    """Of each node."""
    l3_bytes: int | None = None
    l3_spans: bool = False
    """Each L3 contains whole nodes, instead of each node whole L3s."""
    adjacent: bool = False
    near: int = 12
    far: int = 32
    cxl: int = 0
    cxl_bytes: int = 0
    cxl_distance: int = 50
    cpu: CpuInfo = UNNAMED

    @property
    def cpu_nodes(self) -> int:
        """Nodes with cpus; those without come after them."""
        return self.sockets * self.nodes

    @property
    def core_count(self) -> int:
        return self.cpu_nodes * self.cores

    def split(self, nodes: int) -> Machine:
        """The same machine with each node split into that many (AMD's NPS). Raises ValueError."""
        channels = self.channels
        if self.nodes != 1 or self.l3 is None or self.l3_spans or self.l3 % nodes or (channels or 0) % nodes:
            raise ValueError(
                f"its L3 caches and memory channels cannot be split into {nodes} nodes per socket"
            )
        return replace(
            self, nodes=nodes, l3=self.l3 // nodes, cores=self.cores // nodes,
            memory_bytes=self.memory_bytes // nodes,
            channels=None if channels is None else channels // nodes,
        )  # fmt: skip

    def topology(self) -> Topology:
        """The result of `sysfs.read` on it: everything online and allowed, all memory available."""
        per_socket = self.nodes * self.cores
        online = CpuSet(range(self.core_count * self.smt))
        return Topology(
            online=online,
            offline=CpuSet(),
            allowed=online,
            sockets=tuple(
                Socket(socket, self._cpus(socket * per_socket, per_socket)) for socket in range(self.sockets)
            ),
            numa_nodes=tuple(self._node(node) for node in range(self.cpu_nodes + self.cxl)),
            l3_domains=self._l3_domains(),
            cores=tuple(
                Core(
                    CoreKey(core // per_socket, 0, core % per_socket), self._cpus(core, 1), core // self.cores
                )
                for core in range(self.core_count)
            ),
            cpu=self.cpu,
            allowed_nodes=CpuSet(range(self.cpu_nodes + self.cxl)),
        )

    def _cpus(self, first: int, cores: int) -> CpuSet:
        """Cpus of that many cores from the `first` of the machine on."""
        if self.adjacent:
            return CpuSet(range(first * self.smt, (first + cores) * self.smt))
        return CpuSet(
            core + thread * self.core_count
            for thread in range(self.smt)
            for core in range(first, first + cores)
        )

    def _l3_domains(self) -> tuple[L3Domain, ...]:
        if self.l3 is None:
            return ()
        count = self.l3 * (self.sockets if self.l3_spans else self.cpu_nodes)
        cores = self.core_count // count
        return tuple(
            L3Domain(
                cpus=self._cpus(i * cores, cores),
                size_bytes=self.l3_bytes,
                node=i * cores // self.cores if cores <= self.cores else None,
            )
            for i in range(count)
        )

    def _node(self, node: int) -> NumaNode:
        has_cpus = node < self.cpu_nodes
        memory = self.memory_bytes if has_cpus else self.cxl_bytes
        return NumaNode(
            id=node,
            socket=node // self.nodes if has_cpus else None,
            cpus=self._cpus(node * self.cores, self.cores) if has_cpus else CpuSet(),
            memory_bytes=memory,
            available_bytes=memory,
            distances={to: self._distance(node, to) for to in range(self.cpu_nodes + self.cxl)},
            memory_channels=self.channels if has_cpus else None,
        )

    def _distance(self, a: int, b: int) -> int:
        if a == b:
            return LOCAL
        if max(a, b) >= self.cpu_nodes:
            return self.cxl_distance
        return self.near if a // self.nodes == b // self.nodes else self.far


def parse_machine(line: str, cpu: CpuInfo = UNNAMED) -> Machine:
    words = [_word(text) for text in line.split()]
    kinds = tuple(kind for kind, _, _ in words)
    order = tuple(kind for kind in kinds if kind not in {"smt", "cxl"})
    if order not in _ORDERS or len(set(kinds)) < len(kinds):
        raise ValueError(f"{line!r} is not in the order socket:N node:N l3:N core:N smt:N cxl:N")
    counts = {kind: count for kind, count, _ in words}
    facts = {f"{kind}.{key}": value for kind, _, its in words for key, value in its.items()}
    spans = order.index("node") == 2
    if spans and counts["l3"] > 1:
        counts["node"] *= counts["l3"]
    machine = Machine(
        sockets=counts["socket"], nodes=counts["node"], l3=counts.get("l3"),
        cores=counts["core"] * (1 if spans else counts.get("l3", 1)), smt=counts.get("smt", 1),
        memory_bytes=_size(facts, "node.memory") or 0, channels=_number(facts, "node.channels"),
        l3_bytes=_size(facts, "l3.size"), l3_spans=spans, adjacent=_numbering(facts) == "adjacent",
        near=_number(facts, "node.near") or 12, far=_number(facts, "node.far") or 32,
        cxl=counts.get("cxl", 0), cxl_bytes=_size(facts, "cxl.memory") or 0,
        cxl_distance=_number(facts, "cxl.distance") or 50, cpu=cpu,
    )  # fmt: skip
    cpus = machine.core_count * machine.smt
    if cpus > MAX_ID + 1 or machine.cpu_nodes + machine.cxl > MAX_ID:
        raise ValueError(f"{cpus} cpus on {machine.cpu_nodes + machine.cxl} nodes exceed {MAX_ID + 1}")
    return machine


def _word(text: str) -> tuple[str, int, dict[str, str]]:
    match = _WORD.fullmatch(text)
    if match is None or match["kind"] not in _FACTS:
        raise ValueError(
            f"{text!r} is not one of {', '.join(f'{kind}:N' for kind in _FACTS)} (no spaces inside)"
        )
    if int(match["count"]) < 1:
        raise ValueError(f"{text!r} counts none")
    facts: dict[str, str] = {}
    for fact in (match["facts"] or "").split(",") if match["facts"] else ():
        key, equals, value = fact.partition("=")
        if not equals or key not in _FACTS[match["kind"]]:
            known = ", ".join(sorted(_FACTS[match["kind"]])) or "nothing"
            raise ValueError(f"{fact!r} of {text!r}: valid in its brackets: {known}")
        facts[key] = value
    return match["kind"], int(match["count"]), facts


def _size(facts: Mapping[str, str], key: str) -> int | None:
    return parse_size(facts[key]) if key in facts else None


def _number(facts: Mapping[str, str], key: str) -> int | None:
    text = facts.get(key)
    if text is not None and not (text.isascii() and text.isdigit() and 0 < int(text) < 256):
        raise ValueError(f"{key.partition('.')[2]}={text} is not a number from 1 to 255")
    return None if text is None else int(text)


def _numbering(facts: Mapping[str, str]) -> str:
    text = facts.get("smt.numbering", _NUMBERINGS[0])
    if text not in _NUMBERINGS:
        raise ValueError(f"numbering={text} is not {' or '.join(_NUMBERINGS)}")
    return text


# --- Machines by name: descriptions in machines/ (configs/machines in a checkout), own files, one-line descriptions.
#
# A name may end in -nps2 or -nps4 (AMD's nodes per socket; -nps1 is what the descriptions have) and in
# -smtoff: epyc-9654-2p-nps4-smtoff.

FOLDER: Final = Path(__file__).parent / "machines"
_SUFFIXES: Final = re.compile(r"(?P<name>.+?)(?:-nps(?P<nps>[124]))?(?P<smtoff>-smtoff)?", re.ASCII)
_CPU_KEYS: Final[dict[str, type]] = {"vendor": str, "model": str, "family": int, "flags": str}


def names() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def find_topology(text: str) -> Topology:
    """The machine for --machine: a built-in name, a TOML file, or a description. Raises LauncherError."""
    try:
        return _find(text).topology()
    except ValueError as error:
        raise LauncherError(
            f"cannot use machine {text!r}: {error}",
            'describe it like "socket:2 node:1(memory=768GiB) l3:16(size=32MiB) core:8 smt:2" (docs/topology.md)',
        ) from None


def _find(text: str) -> Machine:
    if ":" in text and "/" not in text:
        return parse_machine(text)
    if text.endswith(".toml"):
        return _read(Path(text))
    match = _SUFFIXES.fullmatch(text)
    known = names()
    if match is None or match["name"] not in known:
        close = difflib.get_close_matches(text, known, n=1)
        raise LauncherError(
            f"cannot find machine {text!r}"
            + (f": did you mean {close[0]!r}?" if close else ": no such name"),
            f"choose one of {', '.join(known)}, optionally with -nps2, -nps4 (AMD) and -smtoff, or give a .toml file",
        )
    machine = _read(FOLDER / f"{match['name']}.toml")
    if match["nps"] not in {None, "1"}:
        machine = machine.split(int(match["nps"]))
    return replace(machine, smt=1) if match["smtoff"] else machine


def _read(file: Path) -> Machine:
    tree = read_toml(file, "machine")
    unknown = sorted(tree.keys() - {"layout", "cpu"})
    if unknown or not isinstance(tree.get("layout"), str):
        raise ValueError(f"unknown key {unknown[0]!r}" if unknown else "`layout` is missing or not a text")
    return parse_machine(tree["layout"], _cpu(tree.get("cpu", {})))


def _cpu(table: dict[str, Any]) -> CpuInfo:
    for key, value in table.items():
        if not isinstance(value, _CPU_KEYS.get(key, ())):
            raise ValueError(  # noqa: TRY004 - the file's fault, not the caller's
                f"key {key!r} of [cpu] is unknown or of the wrong type: it has {', '.join(_CPU_KEYS)}"
            )
    return CpuInfo(
        vendor=table.get("vendor", UNNAMED.vendor), model=table.get("model", UNNAMED.model),
        family=table.get("family"), flags=frozenset(table.get("flags", "").split()),
    )  # fmt: skip
