"""Engines that take the time a real one takes, scaled: prefill, decode by batch, a prefix cache (engine_model).

    python -m bench.model_engine --engines 4 --speed 10

prints one line of JSON with the addresses once it listens, and runs until its standard input ends. An answer has
`max_tokens` tokens, one event each; the hexadecimal number in its id is when the engine had its first token, in
nanoseconds of CLOCK_MONOTONIC. Each engine listens on a loopback port and on a UNIX socket, and answers what
routers ask: /tokenize and /v1/chat/completions/render with token ids that follow the text.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import struct
import sys
import time
from typing import Any, Final

import uvloop

from bench.engine_model import CHARACTERS_PER_TOKEN, Engine, Event, Kind, Shape, blocks_of, tokens_of
from bench.wire import LAST, NOT_FOUND, SSE_HEAD, Connection, answer, chunk

MODEL: Final = "m"
_DELTA: Final = '"content":" token"'


def _json(value: Any) -> bytes:
    return answer(b"200 OK", json.dumps(value, separators=(",", ":")).encode())


_PAGES: Final = {
    b"/health": answer(b"200 OK", b""),
    b"/version": _json({"version": "0.32.0"}),
    b"/v1/models": _json(
        {
            "object": "list",
            "data": [
                {
                    "id": MODEL,
                    "object": "model",
                    "created": 1795176000,
                    "owned_by": "vllm",
                    "max_model_len": 32768,
                }
            ],
        }
    ),
}
_INFO: Final = _json(
    {
        "model_path": MODEL,
        "served_model_name": MODEL,
        "tokenizer_path": MODEL,
        "model_id": MODEL,
        "dp_size": 1,
        "max_running_requests": 32,
        "is_generation": True,
    }
)


def prompt_of(body: dict[str, Any]) -> str:
    """What the engine sees of a request, as workloads.Request.prompt has it."""
    if "messages" in body:
        return "".join(f"<|{message['role']}|>{message['content']}" for message in body["messages"])
    return str(body.get("prompt", body.get("text", "")))


def ids_of(text: str) -> list[int]:
    """A token id for each four characters."""
    data = text.encode("ascii", "replace")
    return list(struct.unpack_from(f"<{len(data) // CHARACTERS_PER_TOKEN}I", data))


class Station:
    """All engines of the process in scaled time, driven by one timer."""

    def __init__(self, count: int, shape: Shape, speed: float) -> None:
        self.engines = [Engine(shape, every_token=True) for _ in range(count)]
        self.speed = speed
        self.began = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """Model time, seconds."""
        return (time.monotonic() - self.began) * self.speed

    def stamp(self, at: float) -> int:
        """Model time as nanoseconds of CLOCK_MONOTONIC."""
        return int((self.began + at / self.speed) * 1e9)

    def advance(self) -> float:
        """Let all engines do what is due; the time that this was for."""
        now = self.now()
        for engine in self.engines:
            if engine.next_at is not None and engine.next_at <= now:
                for event in engine.advance(now):
                    self._tell(event)
        return now

    def arm(self) -> None:
        """Come again when the next thing happens."""
        times = [engine.next_at for engine in self.engines if engine.next_at is not None]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if times:
            wait = max(0.0, (min(times) - self.now()) / self.speed)
            self._timer = self._loop.call_later(wait, self._due)

    def _due(self) -> None:
        self._timer = None
        self.advance()
        self.arm()

    def _tell(self, event: Event) -> None:
        client = event.request
        assert isinstance(client, Client)  # noqa: S101 - for the type
        match event.kind:
            case Kind.FIRST:
                client.first(self.stamp(event.at))
            case Kind.TOKEN:
                client.token()
            case Kind.FINISHED:
                client.finished()


class Client(Connection):
    """A connection to one engine."""

    def __init__(self, station: Station, number: int) -> None:
        super().__init__()
        self._station = station
        self._engine = station.engines[number]
        self._event = b""
        self._stream = False
        self._tokens = 0

    def left(self) -> None:
        """The engine stops working for it."""
        if self.busy:
            self.busy = False
            self._engine.cancel(self, self._station.advance())
            self._station.arm()

    def asked(self, method: bytes, path: bytes, body: bytes) -> None:
        """A page, or a request that takes its time."""
        if method != b"POST" or not path.endswith((b"/completions", b"/generate", b"/responses")):
            self.write(self._page(path, body))
            return
        fields = json.loads(body)
        prompt = prompt_of(fields)
        shape = self._engine.shape
        self._stream = bool(fields.get("stream"))
        self._tokens = int(fields.get("max_tokens") or fields.get("max_completion_tokens") or 16)
        self.busy = True
        now = self._station.advance()
        self._engine.submit(self, blocks_of(prompt, shape.block_tokens), tokens_of(prompt), self._tokens, now)
        self._station.arm()

    def first(self, stamp: int) -> None:
        """Its first token."""
        if self._stream:
            self._event = self._of(stamp, _DELTA, "null")
            self.write(SSE_HEAD + self._of(stamp, '"role":"assistant","content":""', "null") + self._event)

    def token(self) -> None:
        """One more."""
        if self._stream:
            self.write(self._event)

    def finished(self) -> None:
        """That was the last."""
        if self._stream:
            self.write(self._of(0, '"content":""', '"length"') + chunk(b"data: [DONE]\n\n") + LAST)
        else:
            message = {"role": "assistant", "content": " token" * self._tokens}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            self.write(
                _json({"id": "chatcmpl-0", "object": "chat.completion", "model": MODEL, "choices": [choice]})
            )
        self.ended()

    @staticmethod
    def _of(stamp: int, delta: str, finish: str) -> bytes:
        return chunk(
            b'data: {"id":"chatcmpl-%016x","object":"chat.completion.chunk","created":1795176000,"model":"%b",'
            b'"choices":[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b}]}\n\n'
            % (stamp, MODEL.encode(), delta.encode(), finish.encode())
        )

    def _page(self, path: bytes, body: bytes) -> bytes:
        if path in _PAGES:
            return _PAGES[path]
        if path.endswith((b"server_info", b"model_info")):
            return _INFO
        if path in (b"/tokenize", b"/v1/chat/completions/render"):
            ids = ids_of(prompt_of(json.loads(body)))
            if path == b"/tokenize":
                return _json({"count": len(ids), "max_model_len": 32768, "tokens": ids, "token_strs": None})
            return _json({"request_id": "0", "token_ids": ids, "sampling_params": {}, "model": MODEL})
        return self._state(path)

    def _state(self, path: bytes) -> bytes:
        engine = self._engine
        if path == b"/metrics":
            return answer(b"200 OK", metrics(engine).encode(), b"text/plain; version=0.0.4; charset=utf-8")
        if path == b"/counts":
            return _json(counts(engine))
        if path in (b"/get_load", b"/v1/loads"):
            load = {"dp_rank": 0, "num_reqs": engine.running + engine.waiting, "num_tokens": 0}
            return _json([load | {"num_waiting_reqs": engine.waiting}])
        return NOT_FOUND


def counts(engine: Engine) -> dict[str, float]:
    """Sums since the engine started."""
    found = engine.counts
    return {
        "prompt_tokens": found.prompt_tokens,
        "cached_tokens": found.cached_tokens,
        "output_tokens": found.output_tokens,
        "prefill_busy_s": found.prefill_busy_s,
    }


def metrics(engine: Engine) -> str:
    """vLLM's names."""
    labels = f'{{engine="0",model_name="{MODEL}"}}'
    found = engine.counts
    rows = [
        ("gauge", "vllm:num_requests_running", engine.running),
        ("gauge", "vllm:num_requests_waiting", engine.waiting),
        ("gauge", "vllm:kv_cache_usage_perc", min(1.0, engine.running / engine.shape.max_num_seqs)),
        ("counter", "vllm:prefix_cache_queries_total", found.prompt_tokens),
        ("counter", "vllm:prefix_cache_hits_total", found.cached_tokens),
        ("counter", "vllm:prompt_tokens_total", found.prompt_tokens),
        ("counter", "vllm:generation_tokens_total", found.output_tokens),
    ]
    return "".join(
        f"# HELP {name} {name}\n# TYPE {name} {kind}\n{name}{labels} {float(value)}\n"
        for kind, name, value in rows
    )


async def _serve(count: int, uds: list[str], speed: float) -> None:
    loop = asyncio.get_running_loop()
    station = Station(count, Shape(), speed)
    ports = []
    servers: list[asyncio.AbstractServer] = []  # uvloop closes one that nobody holds
    for number in range(count):
        make = functools.partial(Client, station, number)
        server = await loop.create_server(make, "127.0.0.1", 0, backlog=4096)
        ports.append(server.sockets[0].getsockname()[1])
        servers.append(server)
        if number < len(uds):
            servers.append(await loop.create_unix_server(make, uds[number], backlog=4096))
    print(json.dumps({"ports": ports, "uds": uds}), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m bench.model_engine", description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--uds", action="append", default=[], help="of an engine; each listens on a port too")
    parser.add_argument("--speed", type=float, default=10.0, help="model seconds in a second")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args.engines, args.uds, args.speed))


if __name__ == "__main__":
    main()
