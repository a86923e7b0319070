"""Reports of the usage ledger for the control socket, read in a thread: the event loop never waits for the disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from launcher.config.schema import Cost
from launcher.errors import LauncherError
from launcher.usage.cost import CostReport
from launcher.usage.entry import Entry
from launcher.usage.figures import UsageReport, UsageRequests, UsageToday
from launcher.usage.latest import find_request, latest_requests
from launcher.usage.ledger import Ledger
from launcher.usage.question import Question
from launcher.usage.report import report, today
from launcher.usage.spent import spent

# `status` does not wait longer for a slow disk.
TODAY_S: Final = 0.5
# For what has not been written when a report is asked for.
FLUSH_S: Final = 2.0

_T = TypeVar("_T")


class UsageReports:
    """`ledger`: None while the daemon keeps none. `currency`: of its amounts."""

    def __init__(self, ledger: Ledger | None, currency: str) -> None:
        self._ledger = ledger
        self._currency = currency
        # One at a time: each such thread takes CPU time from the event loop.
        self._reading = asyncio.Lock()
        self._today: asyncio.Task[UsageToday | None] | None = None

    async def report(self, question: Question) -> UsageReport:
        """Raises LauncherError."""
        return await self._read(lambda path: report(path, question, time.time(), self._currency))

    async def requests(self, question: Question, limit: int) -> UsageRequests:
        """Raises LauncherError."""
        return await self._read(
            lambda path: latest_requests(path, question, limit, time.time(), self._currency)
        )

    async def request(self, request_id: str) -> tuple[Entry | None, float | None]:
        """A request's entry, and the Unix time back to which entries were searched (None: all). Raises LauncherError."""
        return await self._read(lambda path: find_request(path, request_id, time.time()))

    async def cost(self, cost: Cost, since: str) -> CostReport:
        """Raises LauncherError."""
        return await self._read(lambda path: spent(path, cost, since, time.time()))

    async def today(self) -> UsageToday | None:
        """None without a ledger that can be read at once."""
        if self._ledger is None:
            return None
        # While the disk hangs there is one thread that waits for it, and not one for each `status`.
        if self._today is None or self._today.done():
            self._today = asyncio.create_task(_today(self._ledger.path), name="usage of today")
        await asyncio.wait({self._today}, timeout=TODAY_S)
        return self._today.result() if self._today.done() else None

    async def _read(self, read: Callable[[Path], _T]) -> _T:
        ledger = self._ledger
        if ledger is None:
            raise LauncherError(
                "cannot report usage: the daemon keeps no usage ledger",
                "set enabled = true in [usage] and restart the daemon; `numa-launcher status` has more where it is true",
            )

        def flush_and_read() -> _T:
            # Where it cannot be written, the report is of what the file has; `status` says so.
            ledger.flush(FLUSH_S)
            return read(ledger.path)

        async with self._reading:
            return await asyncio.to_thread(flush_and_read)


async def _today(path: Path) -> UsageToday | None:
    try:
        return await asyncio.to_thread(today, path, time.time())
    except LauncherError:
        return None


def question_of(asked: Mapping[str, str]) -> Question:
    """From the options of a request on the control socket."""
    return Question(**{name: value for name, value in asked.items() if name in Question.__slots__})
