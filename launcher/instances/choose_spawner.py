"""Which spawner this daemon uses: systemd's units where it is an installed system service, else its own children."""

from __future__ import annotations

import grp
import logging
import os
import pwd
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from launcher.config.schema import Config, Runtime, SpawnerKind
from launcher.cpuset import CpuSet
from launcher.errors import LauncherError
from launcher.host.own_unit import unit_of
from launcher.instances.ports import Spawner
from launcher.instances.spawn_direct import DirectSpawner
from launcher.instances.spawn_systemd import SystemdSpawner
from launcher.instances.unit import Frame
from launcher.planning.plan import Placement
from launcher.sizes import parse_size

# sd_booted(3)
BOOTED: Final = Path("/run/systemd/system")


def choose_spawner(
    config: Config,
    environ: Mapping[str, str],
    allowed: CpuSet,
    state: Path,
    placement_of: Callable[[int], Placement | None],
) -> Spawner:
    """The spawner of `[supervision] spawner`. `state`: a folder for what only root may read, made when needed.

    Raises LauncherError where systemd is asked for and can't be had.
    """
    kind = config.supervision.spawner
    if kind is SpawnerKind.AUTO:
        kind = SpawnerKind.SYSTEMD if why_not_systemd(config) is None else SpawnerKind.DIRECT
    if kind is SpawnerKind.DIRECT:
        return DirectSpawner(environ, allowed)
    if (why := why_not_systemd(config)) is not None:
        raise LauncherError(
            f"cannot use supervision.spawner = 'systemd': {why}",
            'run scripts/install and `systemctl start numa-launcher`, or set supervision.spawner = "direct"',
        )
    if config.systemd.user in {config.control.group, config.control.read_group}:
        raise LauncherError(
            f"cannot use control.group = '{config.systemd.user}': the instances run as it, and could change slots",
            "choose a group of operators: groupadd --system operators",
        )
    # What units print is in the journal already, under their own names.
    logging.getLogger("launcher.output").setLevel(logging.WARNING)
    return SystemdSpawner(
        environ, state, frame_of(config), group=_group(config.systemd.user), placement_of=placement_of
    )


def why_not_systemd(config: Config) -> str | None:
    """What is missing for units; None where nothing is."""
    if config.engine.runtime is not Runtime.HOST:
        return f"engine.runtime = '{config.engine.runtime}': containers are no units"
    if os.geteuid() != 0:
        return "only root may start system units"
    if not BOOTED.is_dir():
        return "systemd does not run this host"
    if unit_of() is None:
        return "the daemon is not a systemd service itself"
    user = config.systemd.user
    if user != "root" and _group(user) is None:
        return f"there is no user and group '{user}'"
    return None


def frame_of(config: Config) -> Frame:
    """What all units have in common."""
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
    """The group of that name, where there is a user of that name too."""
    try:
        pwd.getpwnam(user)
        return grp.getgrnam(user).gr_gid
    except KeyError:
        return None
