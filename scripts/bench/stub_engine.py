"""Engines that cost little: fixed answers, and many streams paced by one timer.

One process serves several engines, each on a TCP port of loopback and/or a UNIX socket. A streamed answer is
what vLLM writes through uvicorn: chunked, one chunk per event, first a role event, then one event per token,
the finish event, usage where it was asked for, and [DONE]; each event is a write of its own. `max_tokens`
says how many tokens, `return_token_ids` asks for their ids. An answer that is not streamed is small and comes at once.

    python -m bench.stub_engine --port 0 --port 0 --uds /tmp/a.sock --interval-ms 25

prints one line of JSON with the addresses once it listens, and runs until its standard input ends.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import re
import sys
import time
from typing import Any, Final

import uvloop

from bench.wire import LAST, NOT_FOUND, SSE_HEAD, Connection, answer, chunk

TICK_S: Final = 0.001
KEPT_BYTES: Final = 65536  # of a body's start, and of its end: where `stream` and `max_tokens` are looked for
DEFAULT_TOKENS: Final = 16
MODEL: Final = "m"

_STREAM: Final = re.compile(rb'"stream"\s*:\s*true')
_TOKENS: Final = re.compile(rb'"max(?:_completion)?_tokens"\s*:\s*(\d+)')
_IDS: Final = re.compile(rb'"return_token_ids"\s*:\s*true')
_PROMPT_IDS: Final = b"[%b]" % b",".join(b"%d" % (1000 + 97 * number) for number in range(100))
_USAGE: Final = re.compile(rb'"include_usage"\s*:\s*true')

_DONE: Final = b"e\r\ndata: [DONE]\n\n\r\n"


def _role(number: int, ids: bool) -> bytes:
    """The first event; with `ids` it brings those of the prompt."""
    return chunk(
        b'data: {"id":"chatcmpl-%032x","object":"chat.completion.chunk","created":1795176000,"model":"%b",'
        b'"choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        b'"prompt_token_ids":%b,"prompt_text":null}\n\n'
        % (number, MODEL.encode(), _PROMPT_IDS if ids else b"null")
    )


def _event(number: int, delta: str, finish: str, ids: bytes = b"null") -> bytes:
    """One chat.completion.chunk as vLLM writes it, as a chunk of the body."""
    return chunk(
        b'data: {"id":"chatcmpl-%032x","object":"chat.completion.chunk","created":1795176000,"model":"%b",'
        b'"choices":[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b,"token_ids":%b}]}\n\n'
        % (number, MODEL.encode(), delta.encode(), finish.encode(), ids)
    )


def _usage(number: int, tokens: int) -> bytes:
    return chunk(
        b'data: {"id":"chatcmpl-%032x","object":"chat.completion.chunk","created":1795176000,"model":"%b",'
        b'"choices":[],"usage":{"prompt_tokens":100,"total_tokens":%d,"completion_tokens":%d}}\n\n'
        % (number, MODEL.encode(), 100 + tokens, tokens)
    )


def _json(value: Any) -> bytes:
    return answer(b"200 OK", json.dumps(value, separators=(",", ":")).encode())


_COMPLETION: Final = _json(
    {
        "id": f"chatcmpl-{0:032x}",
        "object": "chat.completion",
        "created": 1795176000,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello! How can I help you today?",
                    "refusal": None,
                    "tool_calls": [],
                    "reasoning": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": None,
            }
        ],
        "usage": {"prompt_tokens": 100, "total_tokens": 109, "completion_tokens": 9},
    }
)
# What proxies ask of an engine before they send requests to it: vLLM's pages, and sglang's names for them.
_PAGES: Final = {
    b"/health": answer(b"200 OK", b""),
    b"/v1/models": _json(
        {
            "object": "list",
            "data": [
                {
                    "id": MODEL,
                    "object": "model",
                    "created": 1795176000,
                    "owned_by": "vllm",
                    "root": MODEL,
                    "parent": None,
                    "max_model_len": 32768,
                }
            ],
        }
    ),
    b"/version": _json({"version": "0.32.0"}),
    b"/v1/traces": _json({}),  # as a collector
    b"/tokenize": _json({"count": 4, "max_model_len": 32768, "tokens": [1, 2, 3, 4], "token_strs": None}),
}
_INFO: Final = _json({"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "dp_size": 1})


class Stream:
    """One answer in the making."""

    __slots__ = ("client", "ending", "event", "left")

    def __init__(self, client: Client, number: int, tokens: int, body: bytes) -> None:
        ids = b"[29953]" if _IDS.search(body) else b"null"
        self.client: Client | None = client
        self.event = _event(number, '"content":" token"', "null", ids)
        self.left = tokens
        # Popped from the end.
        self.ending = [_DONE + LAST, _event(number, '"content":""', '"length"', ids)]
        if _USAGE.search(body):
            self.ending.insert(1, _usage(number, tokens))

    def step(self) -> bool:
        """Write the next event; False after the last, and when the client has gone."""
        client = self.client
        if client is None:
            return False
        if self.left:
            self.left -= 1
            client.write(self.event)
            return True
        client.write(self.ending.pop())
        if self.ending:
            return True
        client.over()
        client.ended()
        return False


class Wheel:
    """All streams of the process, in as many buckets as there are ticks between two events."""

    def __init__(self, interval_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._buckets: list[list[Stream]] = [[] for _ in range(max(1, round(interval_s / TICK_S)))]
        self._began = time.monotonic()
        self._turned = 0

    def join(self, stream: Stream) -> None:
        """The stream's next event comes one interval from now."""
        self._buckets[self._turned % len(self._buckets)].append(stream)

    def turn(self) -> None:
        """Do what is due, and come again."""
        due = int((time.monotonic() - self._began) / TICK_S)
        for tick in range(self._turned + 1, due + 1):
            self._turned = tick
            index = tick % len(self._buckets)
            streams = self._buckets[index]
            if streams:
                self._buckets[index] = []
                self._buckets[index].extend([stream for stream in streams if stream.step()])
        self._loop.call_at(self._loop.time() + TICK_S, self.turn)


class Engine:
    """One engine: what its clients share."""

    def __init__(self, wheel: Wheel) -> None:
        self.wheel = wheel
        self.streams = 0
        self.requests = 0
        self.events = 0

    def page(self, path: bytes) -> bytes:
        """The answer to a GET, and to what routers POST to learn about the engine."""
        if path == b"/metrics":
            return answer(b"200 OK", self._metrics().encode(), b"text/plain; version=0.0.4; charset=utf-8")
        if path.endswith((b"server_info", b"model_info")):
            return _INFO
        if path == b"/get_load":
            return _json([{"dp_rank": 0, "num_reqs": self.streams, "num_waiting_reqs": 0, "num_tokens": 0}])
        return _PAGES.get(path, NOT_FOUND)

    def _metrics(self) -> str:
        labels = f'{{engine="0",model_name="{MODEL}"}}'
        rows = [
            ("gauge", "vllm:num_requests_running", self.streams),
            ("gauge", "vllm:num_requests_waiting", 0),
            ("gauge", "vllm:kv_cache_usage_perc", 0.1),
            ("counter", "vllm:prefix_cache_queries_total", 0),
            ("counter", "vllm:prefix_cache_hits_total", 0),
            ("counter", "vllm:prompt_tokens_total", 100 * self.requests),
            ("counter", "vllm:generation_tokens_total", self.events),
        ]
        return "".join(
            f"# HELP {name} {name}\n# TYPE {name} {kind}\n{name}{labels} {float(value)}\n"
            for kind, name, value in rows
        )


class Client(Connection):
    """A connection to one of the engines."""

    kept_bytes = KEPT_BYTES

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._stream: Stream | None = None

    def left(self) -> None:
        """Its stream ends: the wheel drops it when it comes round."""
        if self._stream is not None:
            self._stream.client = None
            self.over()

    def over(self) -> None:
        """The stream is no more."""
        self._stream = None
        self._engine.streams -= 1

    def asked(self, method: bytes, path: bytes, body: bytes) -> None:
        """A page, a small answer or a stream."""
        engine = self._engine
        if method != b"POST" or not path.endswith((b"/completions", b"/generate", b"/responses")):
            self.write(engine.page(path))
            return
        engine.requests += 1
        if not _STREAM.search(body):
            self.write(_COMPLETION)
            return
        found = _TOKENS.search(body)
        tokens = int(found[1]) if found else DEFAULT_TOKENS
        engine.streams += 1
        engine.events += tokens
        self.busy = True
        self._stream = Stream(self, engine.requests, tokens, body)
        self.write(SSE_HEAD + _role(engine.requests, _IDS.search(body) is not None))
        engine.wheel.join(self._stream)


async def _serve(ports: list[int], paths: list[str], interval_s: float) -> None:
    loop = asyncio.get_running_loop()
    wheel = Wheel(interval_s)
    addresses: dict[str, list[object]] = {"ports": [], "uds": []}
    servers: list[asyncio.AbstractServer] = []  # uvloop closes one that nobody holds
    engines = [Engine(wheel) for _ in range(max(len(ports), len(paths)))]
    for engine, port in zip(engines, ports, strict=False):
        make = functools.partial(Client, engine)
        server = await loop.create_server(make, "127.0.0.1", port, backlog=4096)
        addresses["ports"].append(server.sockets[0].getsockname()[1])
        servers.append(server)
    for engine, path in zip(engines, paths, strict=False):
        servers.append(await loop.create_unix_server(functools.partial(Client, engine), path, backlog=4096))
        addresses["uds"].append(path)
    wheel.turn()
    print(json.dumps(addresses), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.stub_engine", description=__doc__)
    parser.add_argument("--port", type=int, action="append", default=[], help="of an engine; 0: any free")
    parser.add_argument("--uds", action="append", default=[], help="of an engine; may be given beside --port")
    parser.add_argument("--interval-ms", type=float, default=25.0, help="between two events of a stream")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.port, args.uds, args.interval_ms / 1000))


if __name__ == "__main__":
    main()
