"""Processes of a test that still run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import psutil
from support.fakes import SOON_S


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended. A zombie has: its parent reaps it in its own time.

    psutil looks twice, and a process may end in between: `status()` raises then.
    """
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def still_running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    return [process for process in processes if runs(process)]


# A tree such as vLLM's: a child, and a grandchild in a session of its own, each saying its pid and sleeping.
TREE = (
    "sh", "-c",
    "sleep 1000 & echo pid $!; setsid sh -c 'echo pid $$; exec sleep 1000' & echo pid $$; wait",
)  # fmt: skip


class Lines(list[str]):
    """What an instance has said; can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def hear(self, line: str) -> None:
        self.append(line)
        self._more.set()

    async def until(self, enough: Callable[[list[str]], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not enough(self):
                self._more.clear()
                await self._more.wait()

    async def pids(self, count: int) -> list[psutil.Process]:
        await self.until(lambda lines: sum(line.startswith("pid ") for line in lines) == count)
        return [psutil.Process(int(line.split()[1])) for line in self if line.startswith("pid ")]
