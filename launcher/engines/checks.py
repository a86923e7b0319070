"""Checks of an engine's software, for `doctor`: rows, the facts they judge, and the checks of any engine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from msgspec import Struct

from launcher.engines.software import Stack
from launcher.machine.topology import Topology

if TYPE_CHECKING:
    from launcher.machine.hardware import HostFacts


# --- Rows. ---


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Tier(StrEnum):
    """Expected performance, best first."""

    OPTIMISED = "optimised"
    DEGRADED = "degraded"
    FALLBACK = "fallback"


class Row(Struct, frozen=True):
    check: str
    """Stable name in kebab case."""
    verdict: Verdict
    fact: str
    remedy: str = ""
    """One line; empty when no action is needed."""
    tier: Tier = Tier.OPTIMISED
    """The best tier that is possible with this result."""


def ok(check: str, fact: str, remedy: str = "") -> Row:
    return Row(check, Verdict.OK, fact, remedy)


def warn(check: str, fact: str, remedy: str, tier: Tier = Tier.OPTIMISED) -> Row:
    return Row(check, Verdict.WARN, fact, remedy, tier)


def fail(check: str, fact: str, remedy: str) -> Row:
    return Row(check, Verdict.FAIL, fact, remedy, Tier.FALLBACK)


# --- The facts that checks judge. ---


class Trouble(Struct, frozen=True):
    """A failed probe: message and remedy of a LauncherError."""

    message: str
    remedy: str


class Compiler(Struct, frozen=True):
    command: str
    version: str


class Installed(Struct, frozen=True):
    """The software that an engine is started with."""

    stack: Stack | None = None
    """None where it cannot be started."""
    trouble: Trouble | None = None
    """The reason why it cannot."""
    tcmalloc: str | None = None
    tcmalloc_off: bool = False
    """Switched off by the configuration."""
    openmp: tuple[str, ...] = ()
    """Paths of OpenMP runtimes, the engine's own first."""
    compiler: Compiler | None = None
    """None also for an engine that compiles nothing."""


# --- Checks. ---

Check = Callable[[Installed, "HostFacts", Topology], Iterator[Row]]


def allocator_row(software: Installed) -> Row | None:
    """The allocator that is preloaded, or the configuration that keeps it out; None where neither is known."""
    if software.tcmalloc is not None:
        return ok("tcmalloc", software.tcmalloc)
    if software.tcmalloc_off:
        remedy = 'set engine.tcmalloc = "auto"'
        return warn("tcmalloc", "switched off by engine.tcmalloc", remedy, Tier.DEGRADED)
    return None


def command(software: Installed, _host: HostFacts, _topology: Topology) -> Iterator[Row]:
    """A custom server, of which only the command is known."""
    yield allocator_row(software) or ok("tcmalloc", "not set for a custom command")
    if software.openmp:
        yield ok("openmp", ", ".join(software.openmp))
    if software.trouble is not None:
        yield fail("engine", software.trouble.message, software.trouble.remedy)
    elif software.stack is not None:
        yield ok("engine", f"custom command: {' '.join(software.stack.command)}")
