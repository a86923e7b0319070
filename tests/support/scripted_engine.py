"""A real HTTP/1.1 server on a UNIX socket that does exactly what its script says, byte for byte.

`script(call)` is run once per request, after it was read; what it raises is kept for the test's end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from support.fakes import SOON_S

from launcher.base.address import UnixAddress

HELD_S = 3 * SOON_S  # longer than any client waits here


@dataclass
class Call:
    """One request that the engine got, and the way to answer it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    left: asyncio.Event = field(default_factory=asyncio.Event)  # the proxy has closed the connection

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    async def raw(self, data: bytes) -> None:
        if (
            self.writer.is_closing()
        ):  # asyncio's transports forget what is written then, uvloop's raise RuntimeError
            raise ConnectionResetError("the proxy has closed the connection")
        self.writer.write(data)
        await self.writer.drain()

    async def json(self, payload: object, status: int = 200, *extra: str) -> None:
        body = json.dumps(payload).encode()
        head = [
            f"HTTP/1.1 {status} X",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *extra,
        ]
        await self.raw("\r\n".join(head).encode() + b"\r\n\r\n" + body)

    async def start_stream(self, *extra: str) -> None:
        head = ["HTTP/1.1 200 OK", "Content-Type: text/event-stream; charset=utf-8"]
        await self.raw("\r\n".join([*head, "Transfer-Encoding: chunked", *extra]).encode() + b"\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        await self.raw(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def end_stream(self) -> None:
        await self.raw(b"0\r\n\r\n")

    def cut(self) -> None:
        """End the connection at once, unclean."""
        self.writer.transport.abort()

    async def cut_now(self) -> None:
        self.cut()

    async def until_left(self) -> None:
        async with asyncio.timeout(HELD_S):
            await self.left.wait()


Script = Callable[[Call], Awaitable[None]]


def event(text: str) -> bytes:
    payload = {"choices": [{"index": 0, "delta": {"content": text}}]}
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ENGINE_ERROR = (
    b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'
)


async def answer_chat(call: Call) -> None:
    """A well engine: plain or streamed by `stream` in the body; lists itself under /v1/models."""
    if call.target == "/v1/models":
        await call.json({"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 2048}]})
    elif call.target == "/metrics":
        await answer_metrics(call)
    elif b'"stream": true' in call.body:
        await call.start_stream()
        for word in ("one", "two", "three"):
            await call.chunk(event(word))
        await call.chunk(DONE)
        await call.end_stream()
    else:
        await call.json({"id": "x", "choices": [{"message": {"content": "hi"}}]})


async def answer_metrics(call: Call) -> None:
    page = b'# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name="m"} 1.0\n'
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(page)}\r\n\r\n"
    await call.raw(head.encode() + page)


async def not_found(call: Call) -> None:
    await call.json({"detail": "Not Found"}, 404)


class FakeEngine:
    """Listens on `path`; `script` may be changed between requests. What the proxy asks on its own, whenever it likes, is no
    call: `tokenizer` answers what it asks of the template, `metrics` for its counters (None: `script` does, as a call).
    """

    def __init__(
        self,
        path: Path,
        script: Script = answer_chat,
        tokenizer: Script = not_found,
        metrics: Script | None = None,
    ) -> None:
        self.path = path
        self.address = UnixAddress(str(path))
        self.script = script
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.calls: list[Call] = []
        self.faults: list[BaseException] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.die()
        assert not self.faults, self.faults

    async def die(self) -> None:
        """Stop listening and drop every connection, as a killed process."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.path.unlink(missing_ok=True)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        except BaseException as fault:  # kept for the test's end
            self.faults.append(fault)
        finally:
            writer.close()
            try:
                # An error of the connection that nobody asked for is logged whenever the garbage collector finds it.
                await writer.wait_closed()
            except OSError:
                pass
            except asyncio.CancelledError:
                writer.transport.abort()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request, *lines = head.decode().rstrip().split("\r\n")
        method, target, _ = request.split(" ")
        headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
        call = Call(method, target, headers, await reader.readexactly(length), reader, writer)
        script = self._unasked(call)
        if script is None:
            self.calls.append(call)
            script = self.script
        watch = asyncio.create_task(self._watch(call), name="watch")
        try:
            await script(call)
        finally:
            watch.cancel()
            await asyncio.wait({watch})

    def _unasked(self, call: Call) -> Script | None:
        """What answers that which no client of the proxy asked for."""
        if call.target in {"/tokenize", "/apply-template"} and b'"return_token_strs": true' in call.body:
            return self.tokenizer
        return self.metrics if call.target == "/metrics" else None

    async def _watch(self, call: Call) -> None:
        with suppress(ConnectionError):
            await call.reader.read()
        call.left.set()
