"""The cgroup's limits on cpus, memory nodes, memory and cpu time: v1, v2, and the cpuset file system before both.

Rule sources: Documentation/admin-guide/cgroup-v1/{cgroups,cpusets,memory}.rst, cgroup-v2.rst,
Documentation/scheduler/sched-bwc.rst, cgroups(7).
proc/self/cgroup (or proc/self/cpuset) has this process's cgroup; proc/self/mountinfo, else proc/mounts, has the
mount points of the hierarchies; without these the usual mount points are tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.machine.kernel_files import Root, decimal

# cgroup v1 says "no limit" with PAGE_COUNTER_MAX, 2^63 rounded down to a page; no machine has 4 EiB.
_UNLIMITED: Final = 1 << 62
# Per kind of hierarchy. v1 also has cpuset.effective_cpus, but does not update it on cpu hotplug.
_CPUS: Final = {"cgroup2": ("cpuset.cpus.effective",), "cgroup": ("cpuset.cpus", "cpus"), "cpuset": ("cpus",)}
_MEMS: Final = {"cgroup2": ("cpuset.mems.effective",), "cgroup": ("cpuset.mems", "mems"), "cpuset": ("mems",)}
_MEMORY: Final = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
_CPU_TIME: Final = "cpu.max"
_CPU_QUOTA: Final = "cpu.cfs_quota_us"
_CPU_PERIOD: Final = "cpu.cfs_period_us"
# The kernel's default (kernel/sched/core.c, default_cfs_period).
_DEFAULT_PERIOD: Final = "100000"
# Mount points that distributions use, by the controllers in each hierarchy.
_USUAL_V1: Final = ("cpuset", "memory", "cpu,cpuacct", "cpu")
INSTANCES_SLICE: Final = "numa-launcher.slice"
"""Default slice of the instances' units, where systemd starts them."""


class Limits(Struct, frozen=True):
    """The limits of this process's cgroup; None where it has none."""

    cpus: CpuSet | None
    mems: CpuSet | None
    memory_bytes: int | None
    cpu_quota: Fraction | None = None
    """CPU seconds per second: the lowest quota / period of the cgroup and its ancestors."""
    slice_cpus: CpuSet | None = None
    """Cpus of the slice beside this process's cgroup; `cpus` has those that both may use."""


class _Mount(Struct, frozen=True):
    kind: str
    controllers: frozenset[str]
    base: str
    """Path of the hierarchy inside its cgroup tree that is mounted (the container's own cgroup, or /)."""
    path: str
    """Where it is mounted, relative to the root."""


def read_limits(root: Root, *, slice_name: str | None = None) -> Limits:
    """The limits on this process (proc/self under `root`).

    `slice_name`: a systemd slice whose limits count as well, where it exists: instances run in it, and not below this
    process's cgroup."""
    mounts = _mounts(root)
    places = _places(root)
    beside = None if slice_name is None else slice_path(slice_name)
    slice_cpus = _slice_cpuset(root, mounts, _CPUS, beside)
    return Limits(
        cpus=_both(_cpuset(root, mounts, places, _CPUS), slice_cpus),
        mems=_both(_cpuset(root, mounts, places, _MEMS), _slice_cpuset(root, mounts, _MEMS, beside)),
        memory_bytes=_memory(root, mounts, places, beside),
        cpu_quota=_cpu_quota(root, mounts, places, beside),
        slice_cpus=slice_cpus,
    )


def slice_path(name: str) -> str:
    """The cgroup of a systemd slice: "a-b.slice" is "/a.slice/a-b.slice" (systemd.slice(5)); "-.slice" is the root."""
    words = [] if name == "-.slice" else name.removesuffix(".slice").split("-")
    return "".join(f"/{'-'.join(words[:depth])}.slice" for depth in range(1, len(words) + 1)) or "/"


def _slice_cpuset(
    root: Root, mounts: list[_Mount], names: dict[str, tuple[str, ...]], beside: str | None
) -> CpuSet | None:
    """The cpuset of the slice (AllowedCPUs= and AllowedMemoryNodes=), or what it inherits."""
    return None if beside is None else _cpuset(root, mounts, dict.fromkeys(("", "cpuset"), beside), names)


def _both(own: CpuSet | None, other: CpuSet | None) -> CpuSet | None:
    return own if other is None else other if own is None else own & other


def _cpuset(
    root: Root, mounts: list[_Mount], places: dict[str, str], names: dict[str, tuple[str, ...]]
) -> CpuSet | None:
    """The innermost non-empty cpuset: a cgroup without one inherits its parent's."""
    for folder, mount in _folders(mounts, places, "cpuset"):
        for name in names[mount.kind]:
            found = root.cpulist(f"{folder}/{name}")
            if found:
                return found
    return None


def _memory(root: Root, mounts: list[_Mount], places: dict[str, str], beside: str | None) -> int | None:
    """The lowest limit of the cgroup and its ancestors.

    memory.high counts, too: above it the kernel reclaims and throttles."""
    limits: list[int] = []
    for folder, mount in _limiting(mounts, places, "memory", beside):
        for name in _MEMORY.get(mount.kind, ()):
            text = root.text(f"{folder}/{name}")
            if text is None or text == "max":
                continue
            limit = decimal(text)
            if limit is None:
                raise root.broken(f"{folder}/{name}", f"{text[:40]!r} is neither a number nor 'max'")
            if limit < _UNLIMITED:
                limits.append(limit)
    return min(limits, default=None)


def _cpu_quota(
    root: Root, mounts: list[_Mount], places: dict[str, str], beside: str | None
) -> Fraction | None:
    """The lowest quota / period of the cgroup and its ancestors, each of which throttles all that is below it."""
    quotas: list[Fraction] = []
    for folder, mount in _limiting(mounts, places, "cpu", beside):
        if mount.kind == "cgroup2":
            path = f"{folder}/{_CPU_TIME}"
            quota, _, period = (root.text(path) or "max").partition(" ")
        else:
            path = f"{folder}/{_CPU_QUOTA}"
            quota, period = root.text(path) or "-1", root.text(f"{folder}/{_CPU_PERIOD}") or ""
        if quota in {"max", "-1"}:
            continue
        time, each = decimal(quota), decimal(period or _DEFAULT_PERIOD)
        if time is None or not each:
            raise root.broken(path, f"{quota[:20]!r} of {period[:20]!r} is not a quota of a period")
        quotas.append(Fraction(time, each))
    return min(quotas, default=None)


def _limiting(
    mounts: list[_Mount], places: dict[str, str], controller: str, beside: str | None
) -> Iterator[tuple[str, _Mount]]:
    """`_folders`, and those of the slice beside it."""
    yield from _folders(mounts, places, controller)
    if beside is not None:
        yield from _folders(mounts, dict.fromkeys(("", controller), beside), controller)


def _folders(mounts: list[_Mount], places: dict[str, str], controller: str) -> Iterator[tuple[str, _Mount]]:
    """Folders of the own cgroup and its ancestors, innermost first, in each hierarchy with that controller.

    A v1 hierarchy with the controller has precedence; v2 counts only without one (hybrid mode mounts both)."""
    v1 = [mount for mount in mounts if controller in mount.controllers]
    for mount in v1 or [mount for mount in mounts if mount.kind == "cgroup2"]:
        place = places.get(controller if mount.kind != "cgroup2" else "", "/")
        if mount.base != "/":
            # A container sees its own cgroup as the mount's root; cgroups(7), "mountinfo".
            inside = place == mount.base or place.startswith(f"{mount.base}/")
            place = place[len(mount.base) :] if inside else "/"
        parts = [part for part in place.split("/") if part not in {"", ".", ".."}]
        for depth in range(len(parts), -1, -1):
            yield "/".join([mount.path, *parts[:depth]]), mount


def _places(root: Root) -> dict[str, str]:
    """Controller (v2: the empty name) to this process's path in its hierarchy."""
    places: dict[str, str] = {}
    cpuset = root.text("proc/self/cpuset")
    if cpuset:
        places["cpuset"] = places[""] = cpuset  # cpuset(7): in the hierarchy that has the controller
    for line in (root.text("proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                places[controller] = parts[2]
    return places


def _mounts(root: Root) -> list[_Mount]:
    mountinfo = root.text("proc/self/mountinfo")
    if mountinfo is not None:
        found = [mount for line in mountinfo.splitlines() if (mount := mountinfo_line(line))]
    else:
        found = [
            mount for line in (root.text("proc/mounts") or "").splitlines() if (mount := mounts_line(line))
        ]
    if found:
        return found
    if root.exists("sys/fs/cgroup/cgroup.controllers"):
        return [_Mount("cgroup2", frozenset(), "/", "sys/fs/cgroup")]
    return [
        _Mount("cgroup", frozenset(name.split(",")), "/", f"sys/fs/cgroup/{name}")
        for name in _USUAL_V1
        if root.exists(f"sys/fs/cgroup/{name}")
    ]


def mountinfo_line(line: str) -> _Mount | None:
    """One line of mountinfo, proc(5): id parent dev ROOT POINT options tags... - TYPE source OPTIONS."""
    left, separator, right = line.partition(" - ")
    fields, tail = left.split(), right.split()
    if not separator or len(fields) < 6 or len(tail) < 3:
        return None
    return _mount(tail[0], tail[2], base=fields[3], point=fields[4])


def mounts_line(line: str) -> _Mount | None:
    """One line of proc/mounts: source POINT TYPE OPTIONS 0 0."""
    fields = line.split()
    if len(fields) < 4:
        return None
    return _mount(fields[2], fields[3], base="/", point=fields[1])


def _mount(kind: str, options: str, *, base: str, point: str) -> _Mount | None:
    if kind not in _CPUS:
        return None
    controllers = {"cpuset"} if kind == "cpuset" else set(options.split(",")) if kind == "cgroup" else set()
    return _Mount(kind, frozenset(controllers), base, point.strip("/").replace("\\040", " "))
