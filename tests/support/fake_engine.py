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
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from aiohttp import web

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog"),
    *("while", "every", "core", "of", "the", "machine", "hums", "along"),
]


class Engine:
    """One fake instance."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.faults: set[str] = set()
        self.running = 0
        self.served = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
                web.get("/served", self.count),
                web.post("/v1/completions", self.complete),
                web.post("/v1/chat/completions", self.complete),
                web.post("/fault", self.fault),
            ]
        )
        if self.args.metrics is not None:
            app.add_routes([web.get("/metrics", self.metrics)])
        return app

    async def metrics(self, _request: web.Request) -> web.FileResponse:
        return web.FileResponse(self.args.metrics)

    async def health(self, _request: web.Request) -> web.Response:
        await self._hang()
        return web.Response(status=503 if "unhealthy" in self.faults else 200)

    async def models(self, _request: web.Request) -> web.Response:
        entry = {
            "id": self.args.model,
            "object": "model",
            "created": 0,
            "owned_by": "fake",
            "max_model_len": 4096,
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def count(self, _request: web.Request) -> web.Response:
        return web.json_response({"served": self.served, "running": self.running})

    async def fault(self, request: web.Request) -> web.Response:
        kind = (await request.json())["kind"]
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
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            loop = asyncio.get_running_loop()
            with contextlib.suppress(ValueError):
                loop.remove_signal_handler(signal.SIGTERM)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.faults.add(kind)
        return web.json_response({"armed": sorted(self.faults)})

    async def _hang(self, *also: str) -> None:
        if self.faults & {"hang", *also}:
            await asyncio.Event().wait()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        await self._hang("lie")
        if "refuse" in self.faults:
            return web.json_response(
                {"error": {"message": "engine trouble", "type": "internal", "code": 500}}, status=500
            )
        self.running += 1
        try:
            return await self._answer(request, body)
        finally:
            self.running -= 1
            self.served += 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        chat = request.path.startswith("/v1/chat")
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
            return web.json_response(
                {**head, "choices": [{"index": 0, "finish_reason": "length", **choice}], "usage": usage}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i, word in enumerate(words):
            if "cut" in self.faults and i == 2 and request.transport is not None:
                request.transport.abort()
                return response
            await self._hang()
            delta = {"delta": {"content": word + " "}} if chat else {"text": word + " "}
            last = "length" if i == count - 1 else None
            event = {**head, "choices": [{"index": 0, "finish_reason": last, **delta}]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(self.args.token_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            last_event = {**head, "choices": [], "usage": usage}
            await response.write(b"data: " + json.dumps(last_event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


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
    web.run_app(
        Engine(args).app(), path=args.uds, port=args.port, host=None if args.uds else "127.0.0.1", print=None
    )
    del weights


if __name__ == "__main__":
    main()
