"""What the kernel reports about memory when a process ends: kills in its cgroup, lines of its log, free memory by node.

Sources: Documentation/admin-guide/cgroup-v2.rst (memory.events: oom_kill), cgroup-v1/memory.rst (memory.oom_control),
Documentation/ABI/testing/dev-kmsg, mm/oom_kill.c (dump_oom_victim, __oom_kill_process).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from msgspec import Struct

ROOT: Final = Path("/")
_OOM: Final = re.compile(
    r"oom-kill:constraint=|(?:Out of memory|out of memory \(\w+\)): Killed process|Memory cgroup out of memory"
)
_VICTIM: Final = re.compile(r"(?:\bpid=|Killed process )(\d+)")
_RECORD_BYTES: Final = 8192


class NodeMemory(Struct, frozen=True):
    """Memory of one NUMA node; `node` is None for the whole machine."""

    node: int | None
    free_bytes: int
    total_bytes: int


class KernelReport(Struct, frozen=True):
    """What the kernel reports about the end of an instance."""

    cgroup_kills: int = 0
    """Processes of its cgroup that the kernel killed for lack of memory."""
    cgroup_file: str = ""
    """Where that is counted."""
    oom_lines: tuple[str, ...] = ()
    """Lines of the kernel's log that name one of its processes as a victim."""
    readable: bool = False
    """The kernel's log could be read: no line means no kill."""
    nodes: tuple[NodeMemory, ...] = ()
    """As last sampled while it ran."""


NO_REPORT: Final = KernelReport()


class OomWatch:
    """Follows the kernel's reports about one process tree. Close it. `pid`: its main process; None: a container's, which is
    found later. Its cgroup goes with it, so kills are known by the lines of the log alone."""

    def __init__(self, pid: int | None, root: Path = ROOT) -> None:
        self._file, self._key = (None, "") if pid is None else _counter_of(pid, root)
        self._before = self._count()
        self._log: int | None = None
        with contextlib.suppress(OSError):  # needs CAP_SYSLOG where kernel.dmesg_restrict is 1
            self._log = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def report(self, pids: Iterable[int], nodes: tuple[NodeMemory, ...] = ()) -> KernelReport:
        """The reports since construction. `pids`: processes of the tree that were seen."""
        now = self._count()
        return KernelReport(
            cgroup_kills=max(0, now - self._before) if now is not None and self._before is not None else 0,
            cgroup_file=str(self._file or ""),
            oom_lines=tuple(victims(self._lines(), frozenset(pids))),
            readable=self._log is not None,
            nodes=nodes,
        )

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _count(self) -> int | None:
        if self._file is None:
            return None
        with contextlib.suppress(OSError, ValueError):
            for line in self._file.read_text(encoding="ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == self._key:
                    return int(value)
        return None

    def _lines(self) -> Iterable[str]:
        while self._log is not None:
            try:
                record = os.read(self._log, _RECORD_BYTES)
            except BrokenPipeError:  # old records were overwritten: the next read continues after them
                continue
            except OSError:
                return
            if not record:
                return
            yield record.decode(errors="replace").partition(";")[2].partition("\n")[0]


def victims(lines: Iterable[str], pids: frozenset[int]) -> Iterable[str]:
    """Those lines of the kernel's log that name one of `pids` as a victim."""
    for line in lines:
        found = _VICTIM.search(line) if _OOM.search(line) else None
        if found and int(found[1]) in pids:
            yield line


def process_tree(pid: int, root: Path = ROOT) -> frozenset[int]:
    """A process and its descendants, by the parents in /proc/PID/stat (proc(5)). Reads one file per process on the host."""
    children: dict[int, list[int]] = {}
    for name in os.listdir(root / "proc"):  # noqa: PTH208  no paths needed
        with contextlib.suppress(OSError, ValueError):
            stat = (root / "proc" / str(int(name)) / "stat").read_bytes()
            # The second field is the name in parentheses and may hold anything; the 4th is the parent.
            children.setdefault(int(stat[stat.rindex(b")") + 2 :].split()[1]), []).append(int(name))
    found, waiting = set[int](), [pid]
    while waiting:
        parent = waiting.pop()
        if parent not in found:
            found.add(parent)
            waiting += children.get(parent, [])
    return frozenset(found)


def process_ended(pid: int, root: Path = ROOT) -> bool:
    """Whether a process is gone, or a zombie (proc(5))."""
    try:
        stat = (root / "proc" / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat[stat.rindex(b")") + 2 :][:1] in {b"Z", b"X"}


def node_memory(nodes: Iterable[int], root: Path = ROOT) -> tuple[NodeMemory, ...]:
    """Free memory of some NUMA nodes; of the machine where there are none. Nodes without a file are left out."""
    found = []
    for node in nodes:
        with contextlib.suppress(OSError, KeyError, ValueError):
            figures = _meminfo(root / f"sys/devices/system/node/node{node}/meminfo")
            free = figures["MemFree"] + figures.get("Inactive(file)", 0)
            found.append(NodeMemory(node, free, figures["MemTotal"]))
    if not found:
        with contextlib.suppress(OSError, KeyError, ValueError):
            figures = _meminfo(root / "proc/meminfo")
            found.append(NodeMemory(None, figures["MemAvailable"], figures["MemTotal"]))
    return tuple(found)


def _meminfo(file: Path) -> dict[str, int]:
    """Bytes by name; a node's lines begin with `Node N`."""
    figures = {}
    for line in file.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        figures[name.split()[-1]] = int(value.split()[0]) * 1024
    return figures


def _counter_of(pid: int, root: Path) -> tuple[Path | None, str]:
    """The file that counts kills in a process's memory cgroup. None where neither version is mounted."""
    with contextlib.suppress(OSError):
        for line in (root / f"proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                file = root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control"
            elif not controllers:
                file = root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events"
            else:
                continue
            if file.is_file():
                return file, "oom_kill"
    return None, ""
