"""Finds what numactl is permitted on this machine by trying, strictest policy first."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from enum import StrEnum
from typing import assert_never

from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, timed_out
from launcher.config.schema import Engine, Runtime
from launcher.engines.software import PROBE_TIMEOUT_S
from launcher.plan.plan import Placement

# --- The command prefix that binds an instance to its cpus and memory nodes. ---


class MemPolicy(StrEnum):
    """Memory policy, strictest first."""

    MEMBIND = "membind"
    PREFERRED = "preferred"
    NONE = "none"


class Binding(Struct, frozen=True):
    """What this machine permits. `numactl` and `taskset` are paths; with neither, nothing is bound."""

    policy: MemPolicy
    numactl: str | None = None
    taskset: str | None = None
    warning: str | None = None
    """What was refused and its cost; logged once."""

    @property
    def is_strict(self) -> bool:
        """Instances take memory of their slot's nodes and of no other."""
        return self.policy is MemPolicy.MEMBIND

    @classmethod
    def of_container(cls, *, binds_memory: bool) -> Binding:
        """A container's cpuset binds the instance: no prefix is needed."""
        return cls(MemPolicy.MEMBIND if binds_memory else MemPolicy.NONE)

    def prefix(self, placement: Placement) -> tuple[str, ...]:
        if not placement.cpus:
            raise ValueError("a placement without cpus cannot be started")
        if self.numactl is None:
            return () if self.taskset is None else (self.taskset, "--cpu-list", placement.cpus.format())
        return (self.numactl, f"--physcpubind={placement.cpus.format()}", *self._memory(placement))

    def _memory(self, placement: Placement) -> tuple[str, ...]:
        match self.policy:
            case MemPolicy.MEMBIND if placement.membind:
                return (f"--membind={placement.membind.format()}",)
            case MemPolicy.PREFERRED if placement.membind:
                # numactl accepts one node here; --preferred-many needs Linux 5.15 and numactl 2.0.15.
                node = placement.node if placement.node in placement.membind else placement.membind.first
                return (f"--preferred={node}",)
            case MemPolicy.MEMBIND | MemPolicy.PREFERRED | MemPolicy.NONE:
                return ()
            case _:
                assert_never(self.policy)


Run = Callable[[tuple[str, ...]], str | None]
"""Runs a command: None on success, else the first line of its error output."""


def probe_binding(engine: Engine, cpus: CpuSet, nodes: CpuSet) -> Binding:
    """How instances can be bound to `cpus` and memory `nodes` (empty without NUMA).

    Containers often deny memory policies (no CAP_SYS_NICE): then membind falls back to preferred, then to none, with
    a warning. Raises LauncherError when numactl is missing or does not answer."""
    if engine.runtime is not Runtime.HOST:
        return Binding.of_container(binds_memory=bool(nodes) and engine.numactl != "off")
    if engine.numactl == "off":
        return Binding(MemPolicy.NONE, taskset=shutil.which("taskset"))
    numactl = shutil.which("numactl")
    if numactl is None:
        raise LauncherError(
            "cannot pin instances to their cores and memory: no command 'numactl' in PATH",
            "run: apt-get install numactl (Debian, Ubuntu) or dnf install numactl (Fedora, RHEL); "
            'or set engine.numactl = "off"',
        )
    return choose_binding(numactl, shutil.which("taskset"), cpus, nodes, run_probe)


def choose_binding(numactl: str, taskset: str | None, cpus: CpuSet, nodes: CpuSet, run: Run) -> Binding:
    """The strictest policy that `run` permits; see `probe_binding`."""
    pin = (numactl, f"--physcpubind={cpus.format()}")
    if not nodes:
        refusal = run((*pin, "true"))
        if refusal is None:
            return Binding(MemPolicy.NONE, numactl=numactl)
        return Binding(MemPolicy.NONE, taskset=taskset, warning=_pin_refused(taskset, refusal))
    refused = run((*pin, f"--membind={nodes.format()}", "true"))
    if refused is None:
        return Binding(MemPolicy.MEMBIND, numactl=numactl)
    if run((*pin, f"--preferred={nodes.first}", "true")) is None:
        return Binding(MemPolicy.PREFERRED, numactl=numactl, warning=_membind_refused("--preferred", refused))
    if run((*pin, "true")) is None:
        return Binding(MemPolicy.NONE, numactl=numactl, warning=_membind_refused("no memory policy", refused))
    return Binding(MemPolicy.NONE, taskset=taskset, warning=_pin_refused(taskset, refused))


def run_probe(command: tuple[str, ...]) -> str | None:
    """Runs one probe. Returns the first line of its error output, or None on success.

    Raises TimedOutError: treating a time-out as a refusal would drop the memory binding for the daemon's lifetime."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise timed_out(command[0], PROBE_TIMEOUT_S) from None
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    complaints = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return complaints[0] if complaints else f"exit code {done.returncode}"


def _membind_refused(instead: str, refused: str) -> str:
    return (
        f'memory is NOT bound to its NUMA node: numactl --membind reports "{refused}"; instances start with '
        f"{instead}, so pages may be on a remote node, which costs bandwidth. In a container add CAP_SYS_NICE "
        "(docker run --cap-add SYS_NICE)"
    )


def _pin_refused(taskset: str | None, refused: str) -> str:
    instead = "taskset pins the cores, memory is not bound" if taskset else "nothing pins cores or memory"
    return f'numactl does not work, it reports "{refused}": {instead}'
