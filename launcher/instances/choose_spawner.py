"""Which spawner this daemon uses: systemd's units where it is an installed system service, else its own children."""

from __future__ import annotations

import grp
import logging
import os
import pwd
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import parse_size
from launcher.config.schema import Config, Runtime, SpawnerKind
from launcher.instances.ports import Spawner
from launcher.instances.spawn_direct import DirectSpawner
from launcher.instances.spawn_systemd import SystemdSpawner
from launcher.instances.unit import Frame, as_user
from launcher.machine.placement import is_system_service, unit_of
from launcher.plan.plan import Placement

# Below the root. sd_booted(3)
BOOTED: Final = "run/systemd/system"
# There where the unified hierarchy is mounted and has the controllers; in hybrid mode it lies one folder deeper
# (systemd, docs/CGROUP_DELEGATION.md, "Three Different Tree Setups").
UNIFIED: Final = "sys/fs/cgroup/cgroup.controllers"
INSTALL: Final = "run scripts/install and `systemctl start numa-launcher`"
BY_NAME: Final = (
    'or set supervision.spawner = "direct": instances are then the daemon\'s children, run as root in its sandbox, '
    "and end with it (docs/systemd.md)"
)

log = logging.getLogger("launcher.instances")


def choose_spawner(
    config: Config,
    environ: Mapping[str, str],
    allowed: CpuSet,
    state: Path,
    placement_of: Callable[[int], Placement | None],
    *,
    root: Path = Path("/"),
) -> Spawner:
    """The spawner of `[supervision] spawner`. `state`: a folder for what only root may read, made when needed. `root`:
    where this host's files are.

    Raises LauncherError where systemd is asked for and can't be had, and where "auto" would have to fall back to
    children of a daemon that is a system service: engines would run as root, in a sandbox made for the daemon."""
    why = why_not_systemd(config, root)
    kind = config.supervision.spawner
    if kind is SpawnerKind.AUTO:
        if why is not None and _must_be_units(config, root):
            raise LauncherError(f"cannot start instances as systemd units: {why[0]}", f"{why[1]}; {BY_NAME}")
        kind = SpawnerKind.SYSTEMD if why is None else SpawnerKind.DIRECT
        if why is not None:
            log.info("instances are the daemon's children: %s", why[0])
    if kind is SpawnerKind.DIRECT:
        return DirectSpawner(environ, allowed)
    if why is not None:
        raise LauncherError(
            f"cannot use supervision.spawner = 'systemd': {why[0]}",
            f'{why[1]}, or set supervision.spawner = "direct"',
        )
    if config.systemd.user in {config.control.group, config.control.read_group}:
        raise LauncherError(
            f"cannot use control.group = '{config.systemd.user}': instances run as this group and could change slots",
            "choose a group of operators: groupadd --system operators",
        )
    # What units print is in the journal already, under their own names.
    logging.getLogger("launcher.output").setLevel(logging.WARNING)
    return SystemdSpawner(
        environ, state, frame_of(config), group=_group(config.systemd.user), placement_of=placement_of
    )


def why_not_systemd(config: Config, root: Path = Path("/")) -> tuple[str, str] | None:
    """What is missing for units, and what to do about it; None where nothing is."""
    runtime, user = config.engine.runtime, config.systemd.user
    checks = (
        (
            runtime is Runtime.HOST,
            f"engine.runtime = '{runtime}': containers are no units",
            'set engine.runtime = "host"',
        ),
        (os.geteuid() == 0, "only root may start system units", INSTALL),
        ((root / BOOTED).is_dir(), "systemd does not run this host", "use a host with systemd"),
        (
            (root / UNIFIED).is_file(),
            "this host has cgroup v1, or v1 and v2 side by side (hybrid)",
            "boot with systemd.unified_cgroup_hierarchy=1 on the kernel's command line",
        ),
        (unit_of(root / "proc/self") is not None, "the daemon is not a systemd service itself", INSTALL),
        (
            user == "root" or _group(user) is not None,
            f"there is no user and group '{user}'",
            "run scripts/install, which makes it",
        ),
        (
            _has_systemd_python(),
            "the package systemd-python is not installed, which reads the units' output",
            "run scripts/install, or pip install systemd-python",
        ),
    )
    return next(((why, remedy) for there, why, remedy in checks if not there), None)


def _has_systemd_python() -> bool:
    try:
        return find_spec("systemd.journal") is not None
    except ImportError:
        return False


def _must_be_units(config: Config, root: Path) -> bool:
    """Whether the daemon is root's system service, and its instances processes of this host."""
    return (
        config.engine.runtime is Runtime.HOST
        and os.geteuid() == 0
        and (root / BOOTED).is_dir()
        and is_system_service(root / "proc/self")
    )


def as_instances_user(spawner: Spawner, config: Config) -> tuple[str, ...]:
    """A command that runs the one after it as the instances' user, in their sandbox; empty where they are our children."""
    return as_user(frame_of(config)) if isinstance(spawner, SystemdSpawner) else ()


def instances_user(config: Config, root: Path = Path("/")) -> tuple[str, ...]:
    """A command that runs the one after it as the instances' user, for a verb of root's without a spawner; empty where
    systemd does not run this host, or there is no such user."""
    frame = frame_of(config)
    if frame.user is None or not (root / BOOTED).is_dir() or _group(frame.user) is None:
        return ()
    return as_user(frame)


def frame_of(config: Config) -> Frame:
    systemd = config.systemd
    return Frame(
        daemon_unit=unit_of() or "numa-launcher.service",
        slice=systemd.slice,
        user=None if systemd.user == "root" else systemd.user,
        allowed_cpus=systemd.allowed_cpus,
        memory_max_bytes=None if systemd.memory_max is None else parse_size(systemd.memory_max),
        stop_s=config.supervision.stop_timeout_s,
    )


def _group(user: str) -> int | None:
    try:
        pwd.getpwnam(user)
        return grp.getgrnam(user).gr_gid
    except KeyError:
        return None
