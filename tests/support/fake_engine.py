"""A small OpenAI-compatible server with faults on demand: a real process for `engine.kind = "command"`.

    python fake_engine.py --uds PATH --model NAME [--startup-s S] [--token-s S] [--children N]

It answers /health, /v1/models, /v1/completions and /v1/chat/completions (streamed or not) with words
that depend on the prompt only. `POST /fault {"kind": ...}` arms a fault:

    exit CODE        the process ends at once        unhealthy   /health answers 503
    hang             every answer stops              refuse      completions answer 500
    lie              completions never answer, /health is well
    cut              streams are cut after 2 events  ignore-term SIGTERM is ignored
    eat MIB          takes so much memory at once    die LINE    prints LINE, then the process ends
    say LINE         prints LINE                     stray CPU   a thread may run on this CPU only

--children starts processes that only sleep, one of them in a session of its own, as an engine's workers.
--metrics answers /metrics with a file, its counters as they are.
--allocate takes so much memory and touches every page of it, as weights and a KV cache would.

Tests start hundreds of these: it is made of the standard library alone, which takes a quarter of the time to start.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # asyncio does without: a quarter of what its import takes.
    sys.modules["ssl"] = None  # type: ignore[assignment]
import asyncio

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"),
    *("while", "every", "core", "of", "the", "machine", "hums", "along"),
]


# As long as a stop waits for requests that run.
STOP_S = 60.0


@dataclass
class Call:
    """One request, and the connection on which its response goes."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    async def answer(self, body: bytes = b"", status: int = 200, type_: str = "application/json") -> None:
        self._head(status, f"Content-Type: {type_}\r\nContent-Length: {len(body)}\r\n")
        self.writer.write(b"" if self.method == "HEAD" else body)
        await self.writer.drain()

    async def json(self, content: Any, status: int = 200) -> None:
        await self.answer(json.dumps(content).encode(), status)

    async def begin_stream(self) -> None:
        self._head(200, "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n")
        await self.writer.drain()

    async def event(self, data: bytes) -> None:
        """Raises ConnectionError if the client has left."""
        self.writer.write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))
        await self.writer.drain()

    async def end_stream(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def _head(self, status: int, fields: str) -> None:
        self.writer.write(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{fields}\r\n".encode())


async def next_call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
    """Raises EOFError at the end of the connection."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
    }
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += await reader.readexactly(size)
            await reader.readuntil(b"\r\n")
        await reader.readuntil(b"\r\n")
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Call(method, target.partition("?")[0], headers, body, writer)


@dataclass
class Engine:
    """One fake instance."""

    args: argparse.Namespace
    faults: set[str] = field(default_factory=set)
    running: int = 0
    served: int = 0
    calls: int = 0
    """Requests of any kind that are not answered yet."""
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while not self.stopped.is_set():
                call = await next_call(reader, writer)
                self.calls += 1
                try:
                    await self.respond(call)
                finally:
                    self.calls -= 1
                    if not self.calls:
                        self.idle.set()
                if call.headers.get("connection", "").lower() == "close":
                    break
        writer.close()

    async def respond(self, call: Call) -> None:
        match call.path:
            case "/health":
                await self._hang()
                await call.answer(status=503 if "unhealthy" in self.faults else 200)
            case "/v1/models":
                entry = {"id": self.args.model, "object": "model", "created": 0, "owned_by": "fake"}
                await call.json({"object": "list", "data": [{**entry, "max_model_len": 4096}]})
            case "/served":
                await call.json({"served": self.served, "running": self.running})
            case "/v1/completions" | "/v1/chat/completions":
                await self.complete(call)
            case "/fault":
                await self.fault(call)
            case "/metrics" if self.args.metrics is not None:
                page = Path(self.args.metrics).read_bytes()  # noqa: ASYNC240 - a small file
                await call.answer(page, type_="text/plain")
            case _:
                await call.answer(b"404: Not Found", 404, "text/plain")

    async def fault(self, call: Call) -> None:
        kind = json.loads(call.body)["kind"]
        if kind.startswith("exit"):
            os._exit(int(kind.split()[1]))
        if kind.startswith("eat"):
            self.eaten = bytearray(b"\1") * (int(kind.split()[1]) << 20)
        if kind.startswith(("say ", "die ")):
            print(kind[4:], flush=True)
        if kind.startswith("die "):
            os._exit(1)
        if kind.startswith("stray "):
            threading.Thread(target=_stray, args=(int(kind[6:]),), name="stray", daemon=True).start()
        if kind == "ignore-term":
            asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.faults.add(kind)
        await call.json({"armed": sorted(self.faults)})

    async def _hang(self, *also: str) -> None:
        if self.faults & {"hang", *also}:
            await asyncio.Event().wait()

    async def complete(self, call: Call) -> None:
        body: dict[str, Any] = json.loads(call.body)
        await self._hang("lie")
        if "refuse" in self.faults:
            await call.json({"error": {"message": "engine trouble", "type": "internal", "code": 500}}, 500)
            return
        self.running += 1
        try:
            await self._answer(call, body)
        finally:
            self.running -= 1
            self.served += 1

    async def _answer(self, call: Call, body: dict[str, Any]) -> None:
        chat = call.path.startswith("/v1/chat")
        count = int(body.get("max_tokens") or 16)
        seed = len(json.dumps(body.get("messages") or body.get("prompt")))
        words = [WORDS[(seed + i) % len(WORDS)] for i in range(count)]
        head = {
            "id": f"cmpl-{seed}",
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
        }
        head["model"] = self.args.model
        usage = {"prompt_tokens": seed, "completion_tokens": count, "total_tokens": seed + count}
        if not body.get("stream"):
            await asyncio.sleep(self.args.token_s * count)
            text = " ".join(words)
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            await call.json(
                {**head, "choices": [{"index": 0, "finish_reason": "length", **choice}], "usage": usage}
            )
            return
        await call.begin_stream()
        for i, word in enumerate(words):
            if "cut" in self.faults and i == 2:
                call.writer.transport.abort()
                raise ConnectionAbortedError
            await self._hang()
            delta = {"delta": {"content": word + " "}} if chat else {"text": word + " "}
            last = "length" if i == count - 1 else None
            event = {**head, "choices": [{"index": 0, "finish_reason": last, **delta}]}
            await call.event(json.dumps(event).encode())
            await asyncio.sleep(self.args.token_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            await call.event(json.dumps({**head, "choices": [], "usage": usage}).encode())
        await call.event(b"[DONE]")
        await call.end_stream()

    async def serve(self) -> None:
        """Until SIGTERM or SIGINT; then requests that run are answered."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stopped.set)
        if self.args.uds:
            server = await asyncio.start_unix_server(self.connected, self.args.uds, limit=1 << 26)
        else:
            server = await asyncio.start_server(self.connected, "127.0.0.1", self.args.port, limit=1 << 26)
        await self.stopped.wait()
        server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                while self.calls:
                    self.idle.clear()
                    await self.idle.wait()


def _stray(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    threading.Event().wait()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--uds")
    where.add_argument("--port", type=int)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--startup-s", type=float, default=0.0)
    parser.add_argument("--token-s", type=float, default=0.0)
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--allocate", type=int, default=0, metavar="MIB")
    parser.add_argument("--metrics", metavar="FILE")
    parser.add_argument("--fail", metavar="LINE", help="print LINE and exit 1 instead of serving")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.fail is not None:
        print(args.fail, flush=True)
        sys.exit(1)
    for child in range(args.children):
        subprocess.Popen(["sleep", "1000"], start_new_session=child == 0)
    print("loading", flush=True)
    weights = bytearray(b"\1") * (args.allocate << 20)  # kept until the end
    time.sleep(args.startup_s)
    asyncio.run(Engine(args).serve())
    del weights


if __name__ == "__main__":
    main()
