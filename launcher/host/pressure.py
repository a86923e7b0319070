"""Pressure stall information: how much of the time tasks wait for a cpu. Documentation/accounting/psi.rst."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path("/")


def cpu_pressure(root: Path = ROOT) -> float | None:
    """Percent of the last minute in which some task waited for a cpu; None where the kernel does not report it."""
    try:
        text = (root / "proc/pressure/cpu").read_text(encoding="ascii")
        some = next(line for line in text.splitlines() if line.startswith("some"))
        return float(some.partition("avg60=")[2].split()[0])
    except (OSError, ValueError, StopIteration, IndexError):
        return None
