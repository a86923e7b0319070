"""Which systemd unit a process runs in, from its cgroup (cgroups(7), systemd.unit(5)). No D-Bus is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

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
