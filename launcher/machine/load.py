"""Busy share of each cpu, from two readings of /proc/stat."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from msgspec import Struct

from launcher.base.errors import LauncherError, reason

Times = Mapping[int, tuple[int, int]]
"""cpu -> (busy, total) ticks since boot."""

# A younger result is given again: whoever asks every 2 s sets the pace for all.
KEPT_S: Final = 1.9
# An older reading would give the mean of a past that nobody looked at.
OLD_S: Final = 15.0
# Between the first two readings: 20 ticks of 10 ms.
FIRST_S: Final = 0.2


def read_times(stat: str) -> dict[int, tuple[int, int]]:
    """From /proc/stat (proc(5)): user, nice, system, idle, iowait, irq, softirq, steal; guest is in user."""
    found = {}
    for line in stat.partition("\nintr")[0].splitlines():
        name, *fields = line.split(None, 9)
        if name.startswith("cpu") and name[3:].isdecimal() and len(fields) >= 5:
            ticks = [int(field) for field in fields[:8]]
            found[int(name[3:])] = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
    return found


def busy_shares(before: Times, after: Times) -> dict[int, float]:
    """Busy share of each cpu between two samples; without cpus that are new or did not tick."""
    found = {}
    for cpu, (busy, total) in after.items():
        was = before.get(cpu)
        if was is not None and total > was[1]:
            found[cpu] = max(0.0, min(1.0, (busy - was[0]) / (total - was[1])))
    return found


def _read_live() -> Times:
    return read_times(Path("/proc/stat").read_text(encoding="ascii"))


class CpuBusy:
    """One reader for all who ask. `read` blocks; it may raise OSError or ValueError, and the shares are then unknown."""

    def __init__(
        self, read: Callable[[], Times] = _read_live, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._clock = clock
        self._times: Times = {}
        self._at: float | None = None
        self._shares: Mapping[int, float] = {}
        self._asking = asyncio.Lock()

    async def shares(self) -> Mapping[int, float]:
        """Busy share of each cpu since the reading before, 0 to 1; empty while unknown. The first answer takes 0.2 s."""
        async with self._asking:
            age = None if self._at is None else self._clock() - self._at
            if age is not None and age < KEPT_S:
                return self._shares
            try:
                if age is None or age > OLD_S:
                    await self._look()
                    await asyncio.sleep(FIRST_S)
                before = self._times
                await self._look()
                self._shares = busy_shares(before, self._times)
            except (OSError, ValueError):
                self._at, self._shares = None, {}
            return self._shares

    async def _look(self) -> None:
        self._times = await asyncio.to_thread(self._read)
        self._at = self._clock()


# --- Free space of the file systems into which the daemon writes. ---


class DiskSpace(Struct, frozen=True):
    free_bytes: int
    """What this user may still write (statvfs(3): f_bavail)."""
    size_bytes: int


def disk_space(folder: Path) -> DiskSpace | None:
    """Of the file system of a folder, or of the nearest one above it that exists. Blocking. None where it cannot be read."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            try:
                found = os.statvfs(path)
            except (PermissionError, TimeoutError):
                return None
            return DiskSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
    return None


# --- Pressure stall information: how much of the time tasks wait for a cpu. Documentation/accounting/psi.rst.

ROOT: Final = Path("/")


def cpu_pressure(root: Path = ROOT) -> float | None:
    """Percent of the last minute in which some task waited for a cpu; None where the kernel does not report it."""
    try:
        text = (root / "proc/pressure/cpu").read_text(encoding="ascii")
        some = next(line for line in text.splitlines() if line.startswith("some"))
        return float(some.partition("avg60=")[2].split()[0])
    except (OSError, ValueError, StopIteration, IndexError):
        return None


# --- Energy of the processor packages, by RAPL's counters in /sys/class/powercap (kernel: power/powercap/powercap).
#
# A package's counter has what its cores, caches and I/O took, on most servers without the memory; fans, disks and the losses
# of the power supply are in none.

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
