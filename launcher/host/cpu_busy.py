"""Busy share of each cpu, from two readings of /proc/stat."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

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
