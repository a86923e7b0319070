"""Broken and hostile clients: they do not read, never finish sending, or send nothing.

The proxy must end each connection within a bound, with a code that docs/routes-and-errors.md states where it
had asked something, and must not keep others from being served.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import time
from collections.abc import Awaitable, Callable

from chaos.clients import CHAT, PATIENCE_S, Result, code_of
from chaos.wire import Dropped, Wire

# Of the padding in each event of an answer that nobody reads: 80 of them are more than all buffers on the way hold.
PADDING = 8192
# A body that does not end is given up by then: upload_wait_s, body_timeout_s (main.CONFIG), and a busy machine.
UPLOAD_WITHIN_S = 45.0
# One that never shakes hands or never sends its head, by then: header_timeout_s (main.CONFIG) and a busy machine.
SILENT_WITHIN_S = 60.0
# Nobody can answer it: it is told so by then, after a few attempts whose instances may be frozen as it comes
# (first_token_timeout_s in main.CONFIG), and a busy machine.
POISON_WITHIN_S = 45.0
# A burst of these is more than a turn of the event loop may take.
PIPELINED = 5000
PIPELINED_WITHIN_S = 60.0
PIPELINED_PAUSE_S = 3.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POLL_S = 0.5

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Unread:
    """Requests one long stream, reads the response head, then stops reading."""

    def __init__(self, number: int, path: str, results: list[Result]) -> None:
        self._path = path
        self._result = Result(f"u{number}", "unread", streamed=True, plain=False, begun=time.monotonic())
        self._results = results

    async def run(self, until: float) -> None:
        """Runs until the proxy closes the connection, or the given time.monotonic()."""
        loop = asyncio.get_running_loop()
        result = self._result
        result.begun = time.monotonic()
        self._results.append(result)
        body = {
            "model": "chaos", "stream": True, "max_tokens": 80, "temperature": 0, "user": result.name, "calm": True,
            "padding": PADDING, "messages": [{"role": "user", "content": "Speak of all that nobody reads"}],
        }  # fmt: skip
        payload = json.dumps(body).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            got = b""
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await loop.sock_connect(sock, self._path)
                    await loop.sock_sendall(sock, head.encode() + payload)
                    while b"\r\n\r\n" not in got and (data := await loop.sock_recv(sock, 256)):
                        got += data
                result.status = int(got.split(b" ", 2)[1])
                result.outcome = "aborted" if result.status == 200 else "failed"
            except TimeoutError:
                result.outcome, result.detail = "lost", f"no answer within {PATIENCE_S} s"
            except (OSError, IndexError, ValueError) as error:
                result.outcome, result.detail = "failed", f"{type(error).__name__}: {error}"
            while not gone(sock) and time.monotonic() < until:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(POLL_S)
        result.ended = time.monotonic()


def gone(sock: socket.socket) -> bool:
    """Whether the peer closed the connection, with or without unread data."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return any(events & (select.POLLHUP | select.POLLRDHUP | select.POLLERR) for _, events in poll.poll(0))


class Upload:
    """Announces a large body, sends its start, then sends single bytes or nothing; repeats."""

    def __init__(self, number: int, path: str, results: list[Result], *, first: int, drips: bool) -> None:
        self._number = number
        self._path = path
        self._results = results
        self._first = first
        self._drips = drips

    async def run(self, until: float) -> None:
        """Runs until the given time.monotonic()."""
        turn = 0
        while time.monotonic() < until:
            turn += 1
            name = f"b{self._number}-{turn}"
            result = Result(name, "upload", streamed=False, plain=False, begun=time.monotonic())
            self._results.append(result)
            try:
                await self._one(result, until)
            except OSError as error:
                result.outcome, result.detail = "failed", f"{type(error).__name__}: {error}"
            result.ended = time.monotonic()
            await asyncio.sleep(POLL_S)

    async def _one(self, result: Result, until: float) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path)
        answer = asyncio.create_task(error_of(reader), name=f"answer to {result.name}")
        try:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {7 << 20}\r\n\r\n"
            writer.write(head.encode() + b'{"model":"chaos","messages":[{"role":"user","content":"')
            writer.write(b"x" * self._first)
            late = result.begun + UPLOAD_WITHIN_S
            while not answer.done() and time.monotonic() < min(until, late):
                if self._drips:
                    writer.write(b"x")
                await asyncio.wait({answer}, timeout=POLL_S)
            if answer.done():
                result.status, result.detail = answer.result()
                result.outcome = "refused" if result.status else "failed"
            elif time.monotonic() < late:
                result.outcome = "aborted"
            else:
                result.outcome, result.detail = (
                    "lost",
                    f"a body that does not end is read for {UPLOAD_WITHIN_S} s",
                )
        finally:
            answer.cancel()
            writer.transport.abort()


async def error_of(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and code of an error response; (0, reason) if the connection ends without one."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        length = int(head.partition("content-length:")[2].split("\r\n", 1)[0])
        body = json.loads(await reader.readexactly(length))
        return int(head.split(" ", 2)[1]), str(body["error"]["code"])
    except (OSError, EOFError, ValueError, KeyError) as error:
        return 0, f"no error in OpenAI's form: {type(error).__name__}: {error}"


class Silent:
    """Connects and sends nothing; reconnects when closed."""

    def __init__(self, kind: str, connect: Connect) -> None:
        self.kind = kind
        self._connect = connect
        self.closed = 0
        self.longest_s = 0.0
        """How long one connection was kept."""

    async def run(self, until: float) -> None:
        """Runs until the given time.monotonic()."""
        while time.monotonic() < until:
            try:
                reader, writer = await self._connect()
            except OSError:
                await asyncio.sleep(POLL_S)
                continue
            begun = time.monotonic()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(max(until - begun, 0)):
                    await reader.read()
            self.closed += time.monotonic() < until
            self.longest_s = max(self.longest_s, time.monotonic() - begun)
            writer.transport.abort()


class Poison:
    """Asks for what makes every engine close the connection; repeats."""

    def __init__(self, number: int, path: str, results: list[Result]) -> None:
        self._number = number
        self._wire = Wire(path)
        self._results = results

    async def run(self, until: float) -> None:
        """Runs until the given time.monotonic()."""
        turn = 0
        while time.monotonic() < until:
            turn += 1
            streamed = turn % 2 == 0
            name = f"p{self._number}-{turn}"
            result = Result(name, "poison", streamed=streamed, plain=False, begun=time.monotonic())
            self._results.append(result)
            try:
                async with asyncio.timeout(POISON_WITHIN_S):
                    await self._one(result)
            except TimeoutError:
                result.outcome, result.detail = "lost", f"no end within {POISON_WITHIN_S} s"
            except (Dropped, OSError) as error:
                result.outcome, result.detail = "failed", f"{type(error).__name__}: {error}"
            result.ended = time.monotonic()
            self._wire.close()
            await asyncio.sleep(POLL_S)

    async def _one(self, result: Result) -> None:
        body = {
            "model": "chaos", "stream": result.streamed, "max_tokens": 8, "user": result.name, "poison": True,
            "messages": [{"role": "user", "content": "Speak of what nobody survives"}],
        }  # fmt: skip
        answer = await self._wire.post(CHAT, json.dumps(body).encode(), result.name)
        whole = b"".join([piece async for piece in answer.payload()])
        result.status, result.detail = answer.status, code_of(whole)
        told = (answer.status, result.detail) == (502, "upstream_error")
        if answer.status == 200:  # after a comment while it waited
            told = b'\ndata: {"error":{"message":' in whole and b"[DONE]" not in whole
        result.outcome = "refused" if answer.status == 429 else "told" if told else "wrong"


class Pipeliner:
    """Sends thousands of requests at once on one connection and reads the responses; repeats."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.asked = 0
        self.answered = 0
        self.wrong: list[str] = []

    async def run(self, until: float) -> None:
        """Runs until the given time.monotonic()."""
        while time.monotonic() < until:
            try:
                async with asyncio.timeout(PIPELINED_WITHIN_S):
                    await self._burst()
            except (OSError, EOFError, TimeoutError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
            await asyncio.sleep(PIPELINED_PAUSE_S)

    async def _burst(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._path)
        try:
            self.asked += PIPELINED
            writer.write(HEALTH * PIPELINED)
            for _ in range(PIPELINED):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = int(head.partition("content-length:")[2].split("\r\n", 1)[0])
                await reader.readexactly(length)
                if not head.startswith(("http/1.1 200", "http/1.1 503")):
                    self.wrong.append(head.partition("\r\n")[0])
                self.answered += 1
        finally:
            writer.transport.abort()
