"""Busy shares: one reader for all who ask."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from launcher.machine.load import KEPT_S, OLD_S, CpuBusy, Times, busy_shares, read_times

STAT = """cpu  100 0 50 800 50 0 0 0 0 0
cpu0 60 0 30 300 10 0 0 0 0 0
cpu2 40 0 20 500 40 0 0 0 0 0
intr 12345 0 1
cpufreq 1 2 3 4 5 6
"""


def test_times() -> None:
    assert read_times(STAT) == {0: (90, 400), 2: (60, 600)}
    assert read_times("") == {}


def test_shares() -> None:
    before = {0: (90, 400), 1: (5, 10), 2: (60, 600)}
    after = {0: (140, 500), 1: (5, 10), 2: (50, 700), 3: (1, 1)}
    assert busy_shares(before, after) == {0: 0.5, 2: 0.0}


@dataclass
class Kernel:
    """Its cpu 0 is busy for `busy` of the 100 ticks between two readings."""

    busy: int = 25
    now: float = 0.0
    readings: int = 0
    broken: bool = False
    _ticks: list[int] = field(default_factory=lambda: [0, 0])

    def read(self) -> Times:
        if self.broken:
            raise OSError
        self.readings += 1
        self._ticks[0] += self.busy
        self._ticks[1] += 100
        return {0: (self._ticks[0], self._ticks[1])}


def busy_of(kernel: Kernel) -> CpuBusy:
    return CpuBusy(kernel.read, lambda: kernel.now)


async def test_the_first_answer_is_of_two_readings() -> None:
    kernel = Kernel()
    assert await busy_of(kernel).shares() == {0: 0.25}
    assert kernel.readings == 2


async def test_several_who_ask_share_one_reading() -> None:
    kernel = Kernel()
    busy = busy_of(kernel)
    assert await asyncio.gather(*(busy.shares() for _ in range(5))) == [{0: 0.25}] * 5
    assert kernel.readings == 2
    kernel.now, kernel.busy = KEPT_S, 75
    assert await asyncio.gather(*(busy.shares() for _ in range(5))) == [{0: 0.75}] * 5
    assert kernel.readings == 3


async def test_a_mean_of_long_ago_is_not_given() -> None:
    kernel = Kernel()
    busy = busy_of(kernel)
    await busy.shares()
    kernel.now, kernel.busy = OLD_S + 1, 50
    assert await busy.shares() == {0: 0.5}
    assert kernel.readings == 4


async def test_without_a_readable_file_the_shares_are_unknown() -> None:
    kernel = Kernel()
    busy = busy_of(kernel)
    await busy.shares()
    kernel.now, kernel.broken = KEPT_S, True
    assert await busy.shares() == {}
    kernel.broken = False
    assert await busy.shares() == {0: 0.25}


async def test_the_live_file_is_read() -> None:
    shares = await CpuBusy().shares()
    assert all(0 <= share <= 1 for share in shares.values())
