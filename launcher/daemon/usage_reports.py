"""Reports of the usage ledger for the control socket, read in a thread: the event loop never waits for the disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeVar

from launcher.accounts.cost import CostReport, spent
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.accounts.ledger_file import DamagedLedgerError
from launcher.accounts.report_values import Question, UsageReport, UsageRequests, UsageToday
from launcher.accounts.timeline import Timeline, timeline_of
from launcher.accounts.usage_report import find_request, latest_requests, report, today
from launcher.base.disk import OneRead, read_apart
from launcher.base.errors import LauncherError, NotFoundError
from launcher.base.text import quoted
from launcher.config.schema import Cost

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
        self._today = None if ledger is None else OneRead(partial(_today, ledger), "usage of today")

    async def report(self, question: Question) -> UsageReport:
        """Raises LauncherError."""
        return await self._read(lambda path: report(path, question, time.time(), self._currency))

    async def requests(self, question: Question, limit: int) -> UsageRequests:
        """Raises LauncherError."""
        return await self._read(
            lambda path: latest_requests(path, question, limit, time.time(), self._currency)
        )

    async def request(self, request_id: str) -> EndedRequest | None:
        """A request's entry. Raises LauncherError."""
        return await self._read(lambda path: find_request(path, request_id))

    async def cost(self, cost: Cost, since: str) -> CostReport:
        """Raises LauncherError."""
        return await self._read(lambda path: spent(path, cost, since, time.time()))

    async def today(self) -> UsageToday | None:
        """None without a ledger that can be read at once."""
        if self._today is not None:
            with suppress(TimeoutError, LauncherError):
                return await self._today.result(TODAY_S)
        return None

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
            try:
                return read(ledger.path)
            except DamagedLedgerError:
                ledger.suspect()
                raise

        # Until the thread has ended, also where nobody waits for it any more: a disk that hangs takes one thread.
        await self._reading.acquire()
        reading = read_apart(flush_and_read, "usage report")
        reading.add_done_callback(lambda _: self._reading.release())
        return await asyncio.shield(reading)


def _today(ledger: Ledger) -> UsageToday | None:
    try:
        return today(ledger.path, time.time())
    except DamagedLedgerError:
        ledger.suspect()
        return None
    except LauncherError:
        return None


def question_of(asked: Mapping[str, str]) -> Question:
    """From the options of a request on the control socket."""
    return Question(**{name: value for name, value in asked.items() if name in Question.__struct_fields__})


# --- What became of one request: from the proxy's memory, else from the usage ledger. ---

# What vLLM 0.32 puts before the X-Request-Id of a request to make the `id` of its response
# (entrypoints/openai/*/serving.py), and what it puts behind that.
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "embd-", "score-", "rerank-", "pool-", "classify-")


class Memory(Protocol):
    """The proxy's registry of requests."""

    def timeline(self, request_id: str) -> Timeline | None:
        """None for an unknown request."""

    @property
    def complete_since(self) -> float | None:
        """Unix time from which on every ended request is kept; None: none is missing yet."""


class Entries(Protocol):
    """Of the usage ledger."""

    async def request(self, request_id: str) -> EndedRequest | None:
        """A request's entry. Raises LauncherError."""


class RequestFinder:
    def __init__(
        self, memory: Memory, entries: Entries, began: float, clock: Callable[[], float] = time.time
    ) -> None:
        """`began`: the daemon's start, Unix time."""
        self._memory = memory
        self._entries = entries
        self._began = began
        self._clock = clock

    async def find(self, request_id: str) -> Timeline:
        """Raises NotFoundError for a request that is not known, or not any more."""
        for wanted in _spellings(request_id):
            if (timeline := self._memory.timeline(wanted)) is not None:
                return timeline
        ledger = "the daemon keeps no usage ledger"
        for wanted in _spellings(request_id):
            try:
                entry = await self._entries.request(wanted)
            except LauncherError as error:
                ledger = error.message
                break
            if entry is not None:
                return timeline_of(entry, source="usage ledger")
            ledger = "it is not in the usage ledger"
        raise NotFoundError(
            f"cannot show request '{quoted(request_id)}': it is none of those in memory, and {ledger}",
            f"{self._kept()}; give the X-Request-Id of a response, as the access log shows it",
        )

    def _kept(self) -> str:
        since = self._memory.complete_since
        if since is None:
            return f"memory has all requests since the daemon's start {_ago(self._clock() - self._began)} ago"
        return (
            f"memory has all requests that ended in the last {_ago(self._clock() - since)}, and for longer the latest that "
            "failed, were tried again, or waited longest"
        )


def _spellings(request_id: str) -> list[str]:
    """The id, and what it is without the prefix of a response's `id`."""
    return [request_id, *(request_id.removeprefix(p) for p in _PREFIXES if request_id.startswith(p))]


def _ago(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
