"""An engine of known timing whose model's name is its behaviour: `python behaving_engine.py` prints its port.

Sends the first token FIRST_S after a request, each later one GAP_S after the one before. Without dependencies: it is started
by tests of the load generator, whose environment is another one.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

FIRST_S = 0.03
GAP_S = 0.002
SLOW_S = 0.3
BROKEN_AFTER = 5
SHORT = 16
MORE = 8
BUNDLE = 4
BEHAVIOURS = (
    "healthy", "error event", "clean break", "reset", "half broken", "short", "long", "refused", "slow first", "role early",
    "several tokens",
)  # fmt: skip

Chunk = dict[str, Any]


class ResetError(Exception):
    """The connection is reset."""


class Engine:
    def __init__(self) -> None:
        self._asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            path = head.split(" ", 2)[1]
            length = next(
                (int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            if path == "/v1/models":
                models = {"data": [{"id": name, "max_model_len": 4096} for name in BEHAVIOURS]}
                _whole(writer, "200 OK", models)
            elif not path.endswith("completions"):
                _whole(writer, "404 Not Found", {"error": {"message": path, "code": 404}})
            elif body["model"] == "refused":
                _whole(writer, "400 Bad Request", {"error": {"message": "no", "code": 400}})
            else:
                await self._stream(writer, body, chat="chat" in path)
            await writer.drain()
            writer.close()
        except ResetError:
            writer.transport.abort()
        except (asyncio.IncompleteReadError, OSError):
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, body: Chunk, *, chat: bool) -> None:
        self._asked += 1
        behaviour = body["model"]
        if behaviour == "half broken":
            behaviour = "error event" if self._asked % 2 else "healthy"
        writer.write(
            b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        async for event in _events(behaviour, body, chat=chat):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


async def _events(behaviour: str, body: Chunk, *, chat: bool) -> AsyncIterator[bytes]:
    asked = int(body.get("max_completion_tokens") or body["max_tokens"])
    tokens = {"short": SHORT, "long": asked + MORE}.get(behaviour, asked)
    size = BUNDLE if behaviour == "several tokens" else 1
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    if chat and behaviour == "role early":
        yield _event(role)
    await asyncio.sleep(SLOW_S if behaviour == "slow first" else FIRST_S)
    if chat and behaviour != "role early":
        yield _event(role)
    for at in range(0, tokens, size):
        if at:
            await asyncio.sleep(GAP_S)
        text = "".join(f" w{number}" for number in range(at, min(at + size, tokens)))
        last = "length" if at + size >= tokens else None
        what = {"delta": {"content": text}} if chat else {"text": text}
        yield _event({"choices": [{"index": 0, **what, "finish_reason": last}]})
        if at + 1 == BROKEN_AFTER and behaviour == "error event":
            yield _event({"error": {"message": "the engine died", "code": 500}})
            yield b"data: [DONE]\n\n"
            return
        if at + 1 == BROKEN_AFTER and behaviour == "clean break":
            return
        if at + 1 == BROKEN_AFTER and behaviour == "reset":
            raise ResetError
    yield _event({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": tokens}})
    yield b"data: [DONE]\n\n"


def _event(chunk: Chunk) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def _whole(writer: asyncio.StreamWriter, status: str, content: Chunk) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


async def _main() -> None:
    server = await asyncio.start_server(Engine().serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    sys.exit(asyncio.run(_main()))
