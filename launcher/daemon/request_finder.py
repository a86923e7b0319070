"""What became of one request: from the proxy's memory, else from the usage ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from launcher.errors import LauncherError, NotFoundError
from launcher.printable import quoted
from launcher.timeline import Ended, Timeline
from launcher.usage.entry import Entry

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

    async def request(self, request_id: str) -> tuple[Entry | None, float | None]:
        """A request's entry, and the Unix time back to which entries were searched (None: all). Raises LauncherError."""


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
                entry, back_to = await self._entries.request(wanted)
            except LauncherError as error:
                ledger = error.message
                break
            if entry is not None:
                return Ended(entry).timeline(source="usage ledger")
            ledger = "it is not in the usage ledger"
            if back_to is not None:
                ledger += f" since {_local(back_to)}, and earlier entries were not searched"
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


def _local(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def _ago(seconds: float) -> str:
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h"
