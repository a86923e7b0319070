"""Clients that cost little: streams and small requests over kept connections, timed without reading JSON.

A stream's events are counted by their ends; its time to first token is from the request's write to the first
event, its gaps are from event to event (0 between two that came in one piece).
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

PROMPT: Final = "The quick brown fox jumps over the lazy dog and thinks about memory channels. "
RAMP_S: Final = 0.5  # streams begin spread over this time, and their first answers are of different lengths

now: Final = time.perf_counter


@dataclass(frozen=True, slots=True)
class Target:
    """Where clients connect: (host, port), or a UNIX socket's path."""

    address: tuple[str, int] | str


@dataclass(slots=True)
class Record:
    """What was seen while `counting`."""

    counting: bool = False
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    gap_s: array[float] = field(default_factory=lambda: array("d"))
    events: int = 0
    requests: int = 0
    failures: list[str] = field(default_factory=list)


def body_of(size: int, *, seed: int, stream: bool, max_tokens: int = 0) -> bytes:
    """A chat request of about `size` bytes; another seed is another prompt from its first word on."""
    start = f'{{"model":"m","stream":{"true" if stream else "false"},"max_tokens":{max_tokens},'
    start += f'"messages":[{{"role":"user","content":"Question {seed:08d}: '
    return (start + (PROMPT * (size // len(PROMPT) + 1))[: max(0, size - len(start) - 4)] + '"}]}').encode()


def request_of(body: bytes) -> bytes:
    """A whole request as the OpenAI SDK for Python sends it."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nAccept-Encoding: gzip, deflate\r\n"
        b"Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n"
        b"User-Agent: OpenAI/Python 2.8.0\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 2.8.0\r\n"
        b"X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n"
        b"X-Stainless-Runtime-Version: 3.11.7\r\nAuthorization: Bearer sk-bench-0000000000000000\r\n"
        b"X-Stainless-Async: async:asyncio\r\nx-stainless-retry-count: 0\r\nx-stainless-read-timeout: 600\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )


class Client(asyncio.Protocol):
    """A kept connection; what comes is handed to `_take`."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.sent = 0.0
        self.busy = False
        self.closing = False
        self._head = b""
        self._in_head = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way to write."""
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        """A failure while a request is under way."""
        self.closing = True
        if self.busy:
            self.fail(f"connection lost: {error or 'closed'}")

    def fail(self, why: str) -> None:
        """Count it, and use this connection no more."""
        self.busy = False
        self.record.failures.append(why)
        if not self.closing:
            self.closing = True
            self.transport.close()

    def send(self, request: bytes) -> None:
        """One request; the time begins here."""
        self.busy = True
        self._in_head = True
        self._head = b""
        self.sent = now()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """The head is looked at once; the rest goes on."""
        if self._in_head:
            data = self._head + data if self._head else data
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                self._head = data
                return
            self._in_head = False
            if data[9:12] != b"200":
                self.fail(f"answer {data[:end][:80]!r}")
                return
            self.begin(data[:end])
            data = data[end:]
            if not data:
                return
        self.take(data)

    def begin(self, head: bytes) -> None:
        """The answer's head, up to the blank line."""

    def take(self, data: bytes) -> None:
        """A piece of the answer's body."""
        raise NotImplementedError


class StreamClient(Client):
    """Sends streamed requests: with `again` the next one as soon as one has ended."""

    def __init__(
        self, record: Record, requests: Callable[[], tuple[bytes, int]], *, again: bool = True
    ) -> None:
        super().__init__(record)
        self._requests = requests
        self._again = again
        self._expected = 0
        self._seen = 0
        self._last = 0.0
        self._end = b""

    def go(self) -> None:
        """Send the next request."""
        if self.closing:
            return
        request, self._expected = self._requests()
        self._seen = 0
        self._end = b""
        self.send(request)

    def take(self, data: bytes) -> None:
        """Count events; the end of the body is its last chunk."""
        at = now()
        record = self.record
        count = data.count(b"\n\n")
        if self._end[-1:] == b"\n" and data[:1] == b"\n":
            count += 1
        if count:
            if record.counting:
                record.events += count
                if self._seen:
                    record.gap_s.append(at - self._last)
                else:
                    record.ttft_s.append(at - self.sent)
                for _ in range(count - 1):
                    record.gap_s.append(0.0)
            self._seen += count
            self._last = at
        self._end = data[-7:] if len(data) >= 7 else (self._end + data)[-7:]
        if self._end == b"\r\n0\r\n\r\n":
            self.busy = False
            if record.counting:
                record.requests += 1
            if self._seen != self._expected:
                self.fail(f"{self._seen} events, not {self._expected}")
            elif self._again:
                self.go()


class SmallClient(Client):
    """One small answer at a time; `free` is told when it may send again."""

    def __init__(self, record: Record, free: Callable[[SmallClient], None]) -> None:
        super().__init__(record)
        self._free = free
        self._left = 0
        self._end = b""

    def begin(self, head: bytes) -> None:
        """How long the body is; -1: chunked."""
        at = head.lower().find(b"\r\ncontent-length:")
        self._left = int(head[at + 17 : head.find(b"\r\n", at + 2)]) if at >= 0 else -1
        self._end = b""

    def take(self, data: bytes) -> None:
        """To the body's end."""
        if self._left >= 0:
            self._left -= len(data)
            done = self._left <= 0
        else:
            self._end = (self._end + data)[-5:]
            done = self._end == b"0\r\n\r\n"
        if done:
            self.busy = False
            if self.record.counting:
                self.record.requests += 1
                self.record.ttft_s.append(now() - self.sent)
            self._free(self)


class Streams:
    """`count` streams that never end but to begin again."""

    def __init__(self, count: int, tokens: int, body_bytes: int, seed: int = 1) -> None:
        self.record = Record()
        self._count = count
        self._tokens = tokens
        self._size = body_bytes
        self._random = random.Random(seed)  # noqa: S311
        self._clients: list[StreamClient] = []
        self._bodies = [
            request_of(body_of(body_bytes, seed=n, stream=True, max_tokens=tokens)) for n in range(64)
        ]
        self._fresh = 0

    def _next(self) -> tuple[bytes, int]:
        # role, tokens, finish, [DONE]
        if self._fresh < self._count:
            self._fresh += 1
            tokens = self._random.randint(1, self._tokens)
            body = body_of(self._size, seed=self._fresh % 64, stream=True, max_tokens=tokens)
            return request_of(body), tokens + 3
        return self._random.choice(self._bodies), self._tokens + 3

    async def start(self, targets: Sequence[Target]) -> None:
        """Begin all, spread over RAMP_S; client n goes to target n modulo their number."""
        began = now()
        for number in range(self._count):
            client = StreamClient(self.record, self._next)
            await open_client(targets[number % len(targets)], client)
            self._clients.append(client)
            client.go()
            ahead = began + RAMP_S * (number + 1) / self._count - now()
            if ahead > 0.001:
                await asyncio.sleep(ahead)

    async def stop(self) -> None:
        """Close all; what is under way is no failure any more."""
        for client in self._clients:
            client.busy = False
            client.closing = True
            client.transport.abort()
        await asyncio.sleep(0.05)


class Bursts:
    """`count` streams that begin in the same moment, on idle engines: a burst every PERIOD_S, once the last has ended."""

    PERIOD_S: Final = 1.0

    def __init__(self, count: int, tokens: int, body_bytes: int) -> None:
        self.record = Record()
        self._count = count
        self._tokens = tokens
        self._bodies = [
            request_of(body_of(body_bytes, seed=n, stream=True, max_tokens=tokens)) for n in range(64)
        ]
        self._clients: list[StreamClient] = []
        self._task: asyncio.Task[None] | None = None

    def _next(self) -> tuple[bytes, int]:
        return random.choice(self._bodies), self._tokens + 3  # noqa: S311

    async def start(self, targets: Sequence[Target]) -> None:
        """Connect all, then begin."""
        for number in range(self._count):
            client = StreamClient(self.record, self._next, again=False)
            await open_client(targets[number % len(targets)], client)
            self._clients.append(client)
        self._task = asyncio.create_task(self._run(), name="bursts")

    async def _run(self) -> None:
        while True:
            if not any(client.busy for client in self._clients):
                for client in self._clients:
                    client.go()
            await asyncio.sleep(self.PERIOD_S)

    async def stop(self) -> None:
        """Close all; what is under way is no failure any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        for client in self._clients:
            client.busy = False
            client.closing = True
            client.transport.abort()
        await asyncio.sleep(0.05)


class Smalls:
    """Small requests over `count` connections: `rate` a second, or as fast as they are answered (rate 0)."""

    def __init__(self, count: int, rate: float, body_bytes: int) -> None:
        self.record = Record()
        self._count = count
        self._rate = rate
        self._clients: list[SmallClient] = []
        self._idle: list[SmallClient] = []
        self._stopped = False
        self._bodies = [
            request_of(body_of(body_bytes, seed=n, stream=False, max_tokens=9)) for n in range(64)
        ]
        self._sent = 0
        self._began = 0.0

    async def start(self, targets: Sequence[Target]) -> None:
        """Connect all and begin."""
        for number in range(self._count):
            client = SmallClient(self.record, self._free)
            await open_client(targets[number % len(targets)], client)
            self._clients.append(client)
        self._began = now()
        self._idle = list(reversed(self._clients))
        if self._rate:
            self._pace()
        else:
            for client in self._clients:
                self._go(client)

    def _go(self, client: SmallClient) -> None:
        self._sent += 1
        client.send(self._bodies[self._sent % len(self._bodies)])

    def _free(self, client: SmallClient) -> None:
        if self._stopped or client.closing:
            return
        if self._rate:
            self._idle.insert(0, client)
        else:
            self._go(client)

    def _pace(self) -> None:
        """Send what is due; what finds no free connection is late, not lost."""
        if self._stopped:
            return
        due = int((now() - self._began) * self._rate)
        while self._sent < due and self._idle:
            self._go(self._idle.pop())
        loop = asyncio.get_running_loop()
        loop.call_later(0.001, self._pace)

    async def stop(self) -> None:
        """No more; those under way are given up."""
        self._stopped = True
        for client in self._clients:
            client.busy = False
            client.closing = True
            client.transport.abort()
        await asyncio.sleep(0.05)


async def open_client(target: Target, client: asyncio.Protocol) -> None:
    """Connect it. Raises OSError."""
    loop = asyncio.get_running_loop()
    if isinstance(target.address, str):
        await loop.create_unix_connection(lambda: client, target.address)
    else:
        await loop.create_connection(lambda: client, *target.address)
