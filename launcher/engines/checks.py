"""Checks of an engine's software, for `doctor`: its facts, and the rows that any engine may have. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.machine.topology import Topology
from launcher.plan.check_rows import Row, Tier, fail, ok, warn

if TYPE_CHECKING:
    from launcher.machine.hardware import HostFacts


@dataclass(frozen=True, slots=True)
class Trouble:
    """A failed probe: message and remedy of a LauncherError."""

    message: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Compiler:
    command: str
    version: str


@dataclass(frozen=True, slots=True)
class Software:
    command: str | None = None
    """The command that starts the engine; None when not found."""
    trouble: Trouble | None = None
    """Why it cannot be started."""
    vllm: str | None = None
    torch: str | None = None
    zentorch: str | None = None
    cpu_build: bool | None = None
    """Whether vLLM was built for CPUs; None: unknown."""
    tcmalloc: str | None = None
    tcmalloc_off: bool = False
    """Switched off by the configuration."""
    openmp: tuple[str, ...] = ()
    """Paths of OpenMP runtimes, the engine's own first."""
    compiler: Compiler | None = None


Check = Callable[[Software, "HostFacts", Topology], Iterator[Row]]


def preloaded(software: Software) -> Row | None:
    """The allocator that is preloaded, or the configuration that keeps it out; None where neither is known."""
    if software.tcmalloc is not None:
        return ok("tcmalloc", software.tcmalloc)
    if software.tcmalloc_off:
        remedy = 'set engine.tcmalloc = "auto"'
        return warn("tcmalloc", "switched off by engine.tcmalloc", remedy, Tier.DEGRADED)
    return None


def command(software: Software, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """A custom server, of which only the command is known."""
    yield preloaded(software) or ok("tcmalloc", "not set for a custom command")
    if software.openmp:
        yield ok("openmp", ", ".join(software.openmp))
    if software.trouble is not None:
        yield fail("engine", software.trouble.message, software.trouble.remedy)
    else:
        yield ok("engine", f"custom command: {software.command}")
