"""Energy of the processor packages, by RAPL's counters in /sys/class/powercap (kernel: power/powercap/powercap).

A package's counter has what its cores, caches and I/O took, on most servers without the memory; fans, disks and the losses
of the power supply are in none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from launcher.errors import LauncherError, reason

POWERCAP: Final = Path("/sys/class/powercap")
# More than any package takes: a counter that rose faster was reset, or wrapped around more than once.
MAX_WATTS: Final = 2000
_MICRO: Final = 10**6


class Domain(NamedTuple):
    """One package's counter."""

    package: str  # "package-0"
    file: Path
    range_uj: int  # it wraps around at this value


class Measured(NamedTuple):
    """Energy between two readings."""

    joules: Mapping[str, float]  # by package
    seconds: float


class Energy:
    """Reads every package's counter. Raises LauncherError where there is none, or it cannot be read."""

    def __init__(self, now: float, root: Path = POWERCAP) -> None:
        self._domains = tuple(_domains(root))
        if not self._domains:
            raise LauncherError(
                f"cannot measure energy: '{root}' has no package domain (intel-rapl:N)",
                "load the kernel module intel_rapl_msr; in a virtual machine, which mostly has no such counters, set "
                "cost.watts to the mean power of the machine",
            )
        self._counters = self._read()
        self._read_at = now

    def measure(self, now: float) -> Measured | None:
        """Energy since the last reading; None where it is not known because a counter was reset meanwhile, or the time was
        so long that it may have wrapped around twice. Raises LauncherError."""
        counters, before = self._read(), self._counters
        elapsed = now - self._read_at
        self._counters, self._read_at = counters, now
        joules = {}
        for domain, old, new in zip(self._domains, before, counters, strict=True):
            rise = new - old if new >= old else new - old + domain.range_uj
            most = elapsed * MAX_WATTS * _MICRO
            if rise > most or most > domain.range_uj:
                return None
            joules[domain.package] = rise / _MICRO
        return Measured(joules, elapsed)

    def _read(self) -> tuple[int, ...]:
        return tuple(_number(domain.file) for domain in self._domains)


def _domains(root: Path) -> Iterable[Domain]:
    """Packages alone: not the parts of one (intel-rapl:0:1), not the platform (psys), not their second interface (mmio)."""
    for folder in sorted(root.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:
            continue
        try:
            name = (folder / "name").read_text(encoding="ascii").strip()
        except OSError:
            continue
        if name.startswith("package-"):
            yield Domain(name, folder / "energy_uj", _number(folder / "max_energy_range_uj"))


def _number(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except PermissionError:
        raise LauncherError(
            f"cannot measure energy: '{file}': only root may read it (since CVE-2020-8694)",
            f"run the daemon by its systemd unit, or at each boot: chgrp numa-launcher {file.parent.parent}/intel-rapl:*/"
            "energy_uj && chmod g+r the same; or set cost.watts to the mean power of the machine",
        ) from None
    except OSError as error:
        raise LauncherError(
            f"cannot measure energy: '{file}': {reason(error)}",
            "set cost.watts to the mean power of the machine",
        ) from None
    except ValueError as error:
        raise LauncherError(
            f"cannot measure energy: '{file}': {error}", "set cost.watts to the mean power of the machine"
        ) from None
