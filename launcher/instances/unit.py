"""A launch as the properties of a transient service unit. No effects.

Source: systemd.service(5), systemd.exec(5), systemd.kill(5), systemd.resource-control(5);
org.freedesktop.systemd1(5) for the signatures on the bus.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.plan.plan import Placement

Property = tuple[str, str, Any]
"""Name, D-Bus signature, value."""

INFINITY: Final = 2**64 - 1
# Lines of a unit that journald takes in such a time: those of a start come at once.
LOG_INTERVAL_S: Final = 10.0
LOG_BURST: Final = 5000
# Meant for the daemon only, or set by systemd for each unit (systemd.exec(5), "Environment Variables Set").
UNITS_OWN: Final = frozenset(
    {
        *("INVOCATION_ID", "JOURNAL_STREAM", "SYSTEMD_EXEC_PID", "MANAGERPID", "RUNTIME_DIRECTORY"),
        *("STATE_DIRECTORY", "CACHE_DIRECTORY", "LOGS_DIRECTORY", "CONFIGURATION_DIRECTORY"),
        *("CREDENTIALS_DIRECTORY", "MEMORY_PRESSURE_WATCH", "MEMORY_PRESSURE_WRITE", "FDSTORE"),
    }
)  # fmt: skip

# systemd sets them for the user that a unit runs as.
USERS_OWN: Final = frozenset({"HOME", "USER", "LOGNAME", "SHELL"})
# What an instance does not need and code that comes with a model should not have. It runs as a user of its own;
# files and network stay as that user's rights are.
SANDBOX: Final[tuple[Property, ...]] = (
    ("NoNewPrivileges", "b", True), ("CapabilityBoundingSet", "t", 0), ("PrivateTmp", "b", True),
    ("ProtectSystem", "s", "full"), ("ProtectHome", "s", "read-only"), ("ProtectControlGroups", "b", True),
    ("ProtectKernelTunables", "b", True), ("ProtectKernelModules", "b", True),
    ("ProtectKernelLogs", "b", True), ("ProtectClock", "b", True), ("ProtectHostname", "b", True),
    ("RestrictSUIDSGID", "b", True), ("RestrictRealtime", "b", True), ("LockPersonality", "b", True),
)  # fmt: skip


_EXECUTE: Final = """import os, sys
path, *argv = (bytes.fromhex(word) for word in sys.argv[1:])
os.execv(path, argv)
"""
# A value of SANDBOX as it is written in a unit file: no capability, and a boolean.
_TEXT: Final[Mapping[Any, str]] = {0: "", True: "yes"}


class Frame(Struct, frozen=True):
    """What all units of one daemon have in common."""

    daemon_unit: str = "numa-launcher.service"
    slice: str = "numa-launcher.slice"
    user: str | None = None
    """The instances'; None: root, without a sandbox."""
    allowed_cpus: bool = False
    """Also confine each unit to its slot's cpus and nodes by its cgroup."""
    memory_max_bytes: int | None = None
    stop_s: float = 90.0
    """From SIGTERM to SIGKILL where systemd itself stops a unit: at shutdown, or by `systemctl stop`."""

    @property
    def prefix(self) -> str:
        return self.daemon_unit.removesuffix(".service")

    @property
    def sockets(self) -> tuple[str, ...]:
        return (f"{self.prefix}.socket", f"{self.prefix}-control.socket")

    @property
    def pattern(self) -> str:
        return f"{self.prefix}-slot*.service"

    def unit(self, slot: int) -> str:
        """A slot's unit: the same for each instance, so that `journalctl --unit` shows all, and never are there two."""
        return f"{self.prefix}-slot{slot}.service"

    def slot_of(self, unit: str) -> int | None:
        """The slot of one of our units; None for another's."""
        number = unit.removeprefix(f"{self.prefix}-slot").removesuffix(".service")
        return int(number) if number.isdecimal() and self.unit(int(number)) == unit else None


def mark(slot: int, generation: int, digest: str) -> str:
    return f"{slot}.{generation}.{digest}"


def properties(
    frame: Frame,
    slot: int,
    generation: int,
    *,
    command: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    secrets_file: str | None,
    scratch: str | None = None,
    placement: Placement | None = None,
) -> list[Property]:
    """All of one unit. `command` is the absolute path that is executed as `argv`. `env` may be read by
    everybody (`systemctl show`); what may not lies in `secrets_file`, in the form of `secrets_text`.
    `scratch`: a folder that is there, and empty, when the command starts."""
    unit = frame.unit(slot)
    found: list[Property] = [
        ("Description", "s", f"numa-launcher: slot {slot}, generation {generation}"),
        ("Slice", "s", frame.slice),
        # Nothing waits for it; at shutdown it goes after the daemon, which drains first.
        ("Before", "as", [frame.daemon_unit]),
        ("AddRef", "b", True),
        # Started means executed: a command that can't be is known at once.
        ("Type", "s", "exec"),
        ("ExecStart", "a(sasb)", [_command(command, argv)]),
        ("Environment", "as", [f"{name}={value}" for name, value in env.items()]),
        # SIGTERM to the main process, which ends its own; what is left when it has gone is killed.
        ("KillMode", "s", "mixed"),
        ("TimeoutStopUSec", "t", int(frame.stop_s * 1e6)),
        # The OOM killer takes the largest process, a worker; what is left without it is of no use.
        ("OOMPolicy", "s", "kill"),
        ("IgnoreSIGPIPE", "b", False),
        ("UMask", "u", 0o007),
        # A worker has a thread per core and pool, and many open files.
        ("TasksMax", "t", INFINITY),
        ("LimitNOFILE", "t", 1 << 16),
        ("SyslogIdentifier", "s", unit.removesuffix(".service")),
        # journald counts up to six times as many, by its free space (systemd 257, journald-rate-limit.c), and says what it
        # drops; the daemon reads up to 6,000 lines a second.
        ("LogRateLimitIntervalUSec", "t", int(LOG_INTERVAL_S * 1e6)),
        ("LogRateLimitBurst", "u", LOG_BURST),
        (
            "LogExtraFields",
            "aay",
            [f"NUMA_LAUNCHER_SLOT={slot}".encode(), f"NUMA_LAUNCHER_GENERATION={generation}".encode()],
        ),
    ]
    if scratch is not None:
        # As the instances' user: it lies where that user may write, and may be anything by now. Why it can't be made is in
        # the log, and the engine fails for itself then.
        emptied = (("rm", "-rf", "--", scratch), ("mkdir", "-p", "-m", "0770", "--", scratch))
        commands = [_command(f"/bin/{words[0]}", words, may_fail=True) for words in emptied]
        found.append(("ExecStartPre", "a(sasb)", commands))
    if secrets_file is not None:
        found.append(("EnvironmentFiles", "a(sb)", [[secrets_file, False]]))
    if frame.user is not None:
        found += [("User", "s", frame.user), ("Group", "s", frame.user), *SANDBOX]
    if frame.memory_max_bytes is not None:
        found.append(("MemoryMax", "t", frame.memory_max_bytes))
    if frame.allowed_cpus and placement is not None:
        found.append(("AllowedCPUs", "ay", bit_mask(placement.cpus)))
        if placement.membind:
            found.append(("AllowedMemoryNodes", "ay", bit_mask(placement.membind)))
    return found


def _command(path: str, argv: Sequence[str], *, may_fail: bool = False) -> list[Any]:
    """`argv` as it is, also where systemd reads the unit's file again (`systemctl daemon-reload`) before it executes it.

    systemd 252 can't read all that it writes there: ExecStartEx= (no-env-expand) is a bad setting then, and a "$" or ";"
    keeps the backslash that was put before it. So these characters do not stand in the unit: such a command is
    executed by Python, from words in hexadecimal. The process, its pid and its arguments are the same in the end.
    """
    if not any("$" in word or ";" in word for word in argv):
        return [path, list(argv), may_fail]
    python = str(Path(sys.executable).resolve())
    words = [word.encode("utf-8", "surrogateescape").hex() for word in (path, *argv)]
    return [python, [python, "-I", "-S", "-c", _EXECUTE, *words], may_fail]


def as_user(frame: Frame) -> tuple[str, ...]:
    """systemd-run(1), to be followed by a command: it runs as the instances' user in their sandbox, in a unit of its
    own, with our input and output."""
    user = (f"--uid={frame.user}", f"--gid={frame.user}")
    sandbox = (f"--property={name}={_TEXT.get(value, value)}" for name, _, value in SANDBOX)
    return (
        *("systemd-run", "--quiet", "--wait", "--pipe", "--collect", "--service-type=exec", f"--slice={frame.slice}"),
        *(f"--description={frame.prefix}: instances' rights", "--property=UMask=0007", "--property=RuntimeMaxSec=10min"),
        *(() if frame.user is None else (*user, *sandbox)),
        "--",
    )  # fmt: skip


def bit_mask(cpus: CpuSet) -> bytes:
    """Bit n of byte n // 8, counted from the lowest, for each cpu n; as systemd's cpu_set_to_dbus()."""
    mask = sum(1 << cpu for cpu in cpus)
    return mask.to_bytes(mask.bit_length() // 8 + 1, "little")


def secrets_text(env: Mapping[str, str]) -> bytes:
    """An EnvironmentFile= (systemd.exec(5)): in double quotes, backslashes before what a shell would take for its own."""
    lines = []
    for name, value in env.items():
        quoted = "".join(f"\\{char}" if char in '"\\`$' else char for char in value)
        lines.append(f'{name}="{quoted}"\n')
    return "".join(lines).encode()
