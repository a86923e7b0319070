"""Whether the engine of an instance computes, whatever its streams say: the engine is asked, the clock is not.

A stream may be silent for minutes while its engine works: a parser holds a tool call, reasoning or structured output back
until it is complete, and server-sent events set no limit to silence (HTML Living Standard, 9.2). Comments, on the other
hand, are written by an API server whose engine hangs. What counts is a rise of the engine's own counters, as far as they
tell, of the instance and not of one request (vLLM 0.32 and llama-server have none of a request). An engine without
counters is asked for one token more, beside its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from launcher.balancing.upstreams import Upstream
from launcher.base.address import Address
from launcher.base.http_json import fetch
from launcher.telemetry.engine_metrics import EngineMetrics, parse

_NEVER: Final = float("-inf")
# Tried in this order until the model serves one of them.
_ONE_TOKEN: Final[tuple[tuple[str, dict[str, object]], ...]] = (
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}),
)


class Pulse:
    """The signs that the engine of one instance computes. Times are the event loop's."""

    __slots__ = ("asked_at", "asking", "counted", "counted_at", "moved_at")

    def __init__(self) -> None:
        self.counted: EngineMetrics | None = None  # the last counters; None: it has told none
        self.counted_at = _NEVER  # its counters had risen
        self.moved_at = _NEVER  # the same, or a token came that it was asked for
        self.asked_at = _NEVER  # the last question
        self.asking = False  # it is not answered yet

    def observe(self, counters: EngineMetrics, now: float) -> None:
        """A reading of its counters; the first one proves nothing.

        Rounded counters may stand still on the page while they rise: the page itself is written by the loop that computes
        (llama-server, server-context.cpp, get_metrics).
        """
        before, self.counted = self.counted, counters
        if before is not None and (counters.rounded or _sums(counters) != _sums(before)):
            self.counted_at = self.moved_at = now

    def proved(self, now: float) -> None:
        """A token came that it was asked for."""
        self.moved_at = now

    def not_asked(self, now: float) -> None:
        """This process was short of descriptors or memory: that is no silence of the engine."""
        self.moved_at = now
        if self.counted is not None:
            self.counted_at = now

    def may_beat(self, now: float, within_s: float) -> bool:
        """Whether the engine has computed in the last `within_s` seconds, or has not answered yet: a question has a time
        limit."""
        return self.asking or now - self.moved_at <= within_s

    def excuse(self, seconds: float) -> None:
        """The event loop did not run for so long."""
        self.counted_at += seconds
        self.moved_at += seconds


def _sums(counters: EngineMetrics) -> tuple[int, int, int]:
    return counters.generated, counters.steps, counters.prefix_queries


class PulseReader:
    """Owner of the tasks that ask the engines; one question at a time for each of them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def ask(self, pulse: Pulse, upstream: Upstream, limit_s: float, *, token: bool) -> None:
        """Read its counters within `limit_s`; `token`: where it has none, ask for a token, within twice the time."""
        if pulse.asking or self._closed:
            return
        pulse.asking, pulse.asked_at = True, self._clock()
        task = asyncio.create_task(self._ask(pulse, upstream, limit_s, token=token), name="pulse")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, pulse: Pulse, upstream: Upstream, limit_s: float, *, token: bool) -> None:
        try:
            page = await fetch(upstream.address, "/metrics", limit_s)
            counters = None if page is None else parse(page.decode(errors="replace"))
            if counters is not None:
                pulse.observe(counters, self._clock())
            elif (
                token
                and pulse.counted is None
                and await _one_token(upstream.address, upstream.model, 2 * limit_s)
            ):
                pulse.proved(self._clock())
        except OSError:
            pulse.not_asked(self._clock())
        finally:
            pulse.asking = False

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))


async def _one_token(address: Address, model: str, limit_s: float) -> bool:
    """Whether a completion of one token comes back with 200 in time. An error proves nothing: an API server answers it
    without its engine. Raises OSError when this process lacks descriptors or memory."""
    clock = asyncio.get_running_loop().time
    until = clock() + limit_s
    for path, body in _ONE_TOKEN:
        if await fetch(address, path, until - clock(), {"model": model, **body}) is not None:
            return True
    return False
