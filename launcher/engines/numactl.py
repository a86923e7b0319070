"""Finds what numactl is permitted on this machine by trying, strictest policy first."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from typing import Final

from launcher.config.schema import Engine, Runtime
from launcher.cpuset import CpuSet
from launcher.engines.numa_binding import Binding, MemPolicy
from launcher.errors import LauncherError, timed_out

# numactl takes milliseconds, but minutes while a machine boots and starts all services.
PROBE_TIMEOUT_S: Final = 60.0

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
