"""Plays a workload open-loop through a proxy: requests come at their times, however slow the answers are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from bench.load import Client, Record, Target, open_client, request_of
from bench.workloads import Request

_ID: Final = b'"id":"chatcmpl-'
PATIENCE_S: Final = 60.0  # real time without any answer that ends a run


@dataclass(slots=True)
class Seen:
    """One request's fate; times in nanoseconds of CLOCK_MONOTONIC."""

    sent: int = 0
    first: int = 0  # when the engine had its first token
    arrived: int = 0  # when the client had it
    ended: int = 0
    events: int = 0
    failure: str = ""


class Asker(Client):
    """A kept connection; one request at a time."""

    def __init__(self, done: Callable[[Asker, Request, Seen], None]) -> None:
        super().__init__(Record())
        self._done = done
        self._end = b""
        self.request: Request | None = None
        self.seen = Seen()

    def ask(self, request: Request, data: bytes) -> None:
        """Send it."""
        self.request, self.seen = request, Seen(sent=time.monotonic_ns())
        self._end = b""
        self.send(data)

    def take(self, data: bytes) -> None:
        """The first event's id says when the engine had it."""
        seen = self.seen
        if not seen.first:
            data = self._end + data
            at = data.find(_ID)
            if at < 0 or len(data) < at + len(_ID) + 16:
                self._end = data
                return
            seen.first = int(data[at + len(_ID) : at + len(_ID) + 16], 16)
            seen.arrived = time.monotonic_ns()
        seen.events += data.count(b"\n\n")
        self._end = data[-7:] if len(data) >= 7 else (self._end + data)[-7:]
        if self._end == b"\r\n0\r\n\r\n":
            self.busy = False
            self._finish("")

    def fail(self, why: str) -> None:
        """It is over; why goes into the record."""
        super().fail(why)
        self._finish(why)

    def _finish(self, why: str) -> None:
        if self.request is not None:
            request, self.request = self.request, None
            self.seen.ended = time.monotonic_ns()
            self.seen.failure = why
            self._done(self, request, self.seen)


class Play:
    """One run of one workload."""

    def __init__(self, requests: Sequence[Request], target: Target, speed: float) -> None:
        self._requests = requests
        self._target = target
        self._speed = speed
        self._data = {one.id: request_of(one.body("m")) for one in requests}
        self._next = {one.after: one for one in requests if one.after is not None}
        self._idle: list[Asker] = []
        self._all: list[Asker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._left = len(requests)
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.seen: dict[int, Seen] = {}

    async def run(self) -> dict[int, Seen]:
        """What happened to each request, by its id; those that nothing was heard of are failures."""
        await asyncio.gather(*(self._open() for _ in range(64)))
        began = self._loop.time() + 0.2
        for request in self._requests:
            if request.at_s is not None:
                self._loop.call_at(began + request.at_s / self._speed, self._start, request)
        last = -1
        while not self._over.is_set():
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._over.wait()
            except TimeoutError:
                if last == self._left:
                    break
                last = self._left
        for client in self._all:
            client.request = None
            client.busy = False
            client.closing = True
            client.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.sleep(0.02)
        for request in self._requests:
            self.seen.setdefault(request.id, Seen(failure="no answer"))
        return self.seen

    async def _open(self) -> Asker:
        client = Asker(self._done)
        await open_client(self._target, client)
        self._all.append(client)
        self._idle.append(client)
        return client

    def _start(self, request: Request) -> None:
        while self._idle:
            client = self._idle.pop()
            if not client.closing:
                client.ask(request, self._data[request.id])
                return
        task = self._loop.create_task(self._start_fresh(request), name="connect")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_fresh(self, request: Request) -> None:
        client = await self._open()
        self._idle.remove(client)
        client.ask(request, self._data[request.id])

    def _done(self, client: Asker, request: Request, seen: Seen) -> None:
        self.seen[request.id] = seen
        self._left -= 1
        if not client.closing:
            self._idle.append(client)
        if following := self._next.get(request.id):
            if seen.failure:
                self._give_up(following)
            else:
                self._loop.call_later(following.think_s / self._speed, self._start, following)
        if not self._left:
            self._over.set()

    def _give_up(self, request: Request | None) -> None:
        """What would have followed a failed turn fails with it."""
        while request is not None:
            self.seen[request.id] = Seen(failure="the turn before it failed")
            self._left -= 1
            request = self._next.get(request.id)
