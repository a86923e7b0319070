"""Where running processes really are: threads, pages and libraries, read from /proc.

Blocking (numa_maps of a large worker takes the kernel a while): call it in a thread.
Sources: proc(5) `Cpus_allowed_list`, numa(7) `/proc/PID/numa_maps`, Documentation/filesystems/proc.rst.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import psutil
from msgspec import Struct

from launcher.base.cpuset import CpuSet

# --- Which systemd unit a process runs in, from its cgroup (cgroups(7), systemd.unit(5)). No D-Bus is needed.

# The second field of a line of /proc/PID/cgroup: the unified hierarchy's is empty, and under cgroup v1 systemd
# has a hierarchy of its own.
UNIFIED: Final = ""
OF_SYSTEMD: Final = "name=systemd"


def unit_of(proc: Path = Path("/proc/self"), hierarchies: tuple[str, ...] = (UNIFIED,)) -> str | None:
    """The system service of a process, "numa-launcher.service"; None where it is in none.

    One line "0::/system.slice/NAME.service" under the unified hierarchy. A user's own services lie below user.slice,
    and a container's path ends in whatever its engine called it."""
    try:
        lines = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, rest = line.partition(":")
        hierarchy, _, where = rest.partition(":")
        path = where.split("/")
        if hierarchy in hierarchies and "user.slice" not in path and path[-1].endswith(".service"):
            return path[-1]
    return None


def is_system_service(proc: Path = Path("/proc/self")) -> bool:
    """Whether a process runs in a system service, whatever the version of the cgroup hierarchy."""
    return unit_of(proc, (UNIFIED, OF_SYSTEMD)) is not None


def is_instance_of(daemon_unit: str | None, proc: Path) -> bool:
    """Whether a process belongs to one of the instances' units of a daemon (instances.unit.Frame.unit)."""
    unit = None if daemon_unit is None else unit_of(proc)
    return unit is not None and unit.startswith(f"{str(daemon_unit).removesuffix('.service')}-slot")


# Libraries that decide speed, by a part of their file name.
LIBRARIES: Final = ("libtcmalloc", "libgomp", "libiomp5", "libomp", "libzentorch")
_PAGES: Final = re.compile(r"\bN(\d+)=(\d+)")
_PAGE_KIB: Final = re.compile(r"\bkernelpagesize_kB=(\d+)")


class ThreadGroup(Struct, frozen=True):
    """Threads of one process that may run on the same cpus."""

    cpus: CpuSet
    names: tuple[tuple[str, int], ...]
    """(thread name, how many), most frequent first."""

    @property
    def threads(self) -> int:
        return sum(count for _, count in self.names)


class ProcessFacts(Struct, frozen=True):
    """One process of an instance, as the kernel has it."""

    pid: int
    name: str
    groups: tuple[ThreadGroup, ...]
    """Its threads, by the cpus they may run on."""
    policies: frozenset[str]
    """Memory policies of its resident mappings, e.g. {"bind:0"}; empty where numa_maps can't be read."""
    node_bytes: tuple[tuple[int, int], ...]
    """(node, resident bytes) of its anonymous memory. Pages of files are left out: a library's page lies
    where its first user had it put, and is shared."""
    libraries: frozenset[str]
    allowed_nodes: CpuSet = CpuSet()
    """Nodes that its cpuset lets it take memory from; empty where unknown."""

    @property
    def threads(self) -> int:
        return sum(group.threads for group in self.groups)

    @property
    def cpus(self) -> CpuSet:
        """Union of all threads' allowed cpus."""
        return CpuSet(cpu for group in self.groups for cpu in group.cpus)


class Bystander(Struct, frozen=True):
    """A process that belongs to no instance, and where its threads may run."""

    pid: int
    name: str
    groups: tuple[ThreadGroup, ...]


class MisplacedThread(Struct, frozen=True):
    """A thread that may run outside the cpus of its slot."""

    thread: int
    name: str
    cpus: CpuSet
    """Where it may run."""


def misplaced_threads(pids: Iterable[int], cpus: CpuSet) -> tuple[MisplacedThread, ...]:
    """Threads of some processes that may run outside `cpus`, by their ids. About 5 us for each thread."""
    allowed, found = frozenset(cpus), []
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208  no paths needed
                thread = int(name)
                with contextlib.suppress(OSError):  # it may end meanwhile
                    its = os.sched_getaffinity(thread)
                    if not its <= allowed:
                        found.append(
                            MisplacedThread(thread, _name(Path(f"/proc/{pid}/task/{name}")), CpuSet(its))
                        )
    return tuple(found)


def observe(pid: int) -> tuple[ProcessFacts, ...]:
    """Facts of the process and all its descendants; those that end meanwhile are left out."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return ()
    facts = []
    for process in tree:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            facts.append(_facts(process.pid))
    return tuple(facts)


def bystanders() -> tuple[Bystander, ...]:
    """Every process that is neither this one nor below it, nor in an instance's unit of this daemon.

    Kernel threads are left out: they are pinned by design."""
    here, unit = psutil.Process(), unit_of()
    ours = {here.pid, *(child.pid for child in here.children(recursive=True))}
    found = []
    for entry in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208  no paths needed
        proc = Path("/proc") / str(entry)
        with contextlib.suppress(OSError):
            if entry not in ours and _has_memory(proc / "status") and not is_instance_of(unit, proc):
                found.append(Bystander(entry, _name(proc), _groups(proc)))
    return tuple(found)


def _facts(pid: int) -> ProcessFacts:
    proc = Path("/proc") / str(pid)
    policies, node_bytes = _numa_maps(proc / "numa_maps")
    maps = ""
    with contextlib.suppress(OSError):
        maps = (proc / "maps").read_text(errors="replace")
    return ProcessFacts(
        pid=pid,
        name=_name(proc),
        groups=_groups(proc),
        policies=policies,
        node_bytes=node_bytes,
        libraries=frozenset(library for library in LIBRARIES if f"/{library}" in maps),
        allowed_nodes=_listed(proc / "status", "Mems_allowed_list"),
    )


def _groups(proc: Path) -> tuple[ThreadGroup, ...]:
    names: dict[CpuSet, Counter[str]] = {}
    for task in (proc / "task").iterdir():
        with contextlib.suppress(OSError):  # a thread may end meanwhile
            names.setdefault(_allowed(task / "status"), Counter())[_name(task)] += 1
    return tuple(
        ThreadGroup(cpus, tuple(counts.most_common()))
        for cpus, counts in sorted(names.items(), key=lambda item: tuple(item[0]))
    )


def _name(folder: Path) -> str:
    return (folder / "comm").read_text(errors="replace").strip()


def _has_memory(status: Path) -> bool:
    """False for kernel threads and zombies."""
    return "\nVmSize:" in status.read_text(errors="replace")


def _allowed(status: Path) -> CpuSet:
    if cpus := _listed(status, "Cpus_allowed_list"):
        return cpus
    raise OSError(f"{status} has no Cpus_allowed_list")


def _listed(status: Path, key: str) -> CpuSet:
    """Empty without such a line: Mems_allowed_list is of kernels with cpusets."""
    for line in status.read_text(errors="replace").splitlines():
        if line.startswith(f"{key}:"):
            return CpuSet.parse(line.partition(":")[2])
    return CpuSet()


def _numa_maps(path: Path) -> tuple[frozenset[str], tuple[tuple[int, int], ...]]:
    """Policies of mappings with a page, and the bytes of those that belong to no file, per node."""
    policies: set[str] = set()
    nodes: Counter[int] = Counter()
    for line in _lines(path):
        resident = _PAGES.findall(line)
        if not resident:
            continue  # special mappings without a page show "local" whatever the task's policy is
        policies.add(line.split(maxsplit=2)[1])
        if " file=" in line:
            continue
        page = _PAGE_KIB.search(line)
        size = int(page[1]) * 1024 if page else 4096
        for node, pages in resident:
            nodes[int(node)] += int(pages) * size
    return frozenset(policies), tuple(sorted(nodes.items()))


def _lines(path: Path) -> Iterator[str]:
    """Of a file that may be missing, forbidden, or gone while it is read."""
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        yield from file
