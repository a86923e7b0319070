"""An engine with injected faults: a small HTTP/1.1 server that can also break its own framing.

    python -m chaos.engine --uds PATH --model NAME --log FILE --seed TEXT [--token-s S] [--faults SHARE]

Each request may draw a fault, seeded. Before the answer: `reset` (the connection), `500`, `503`, `mute`
(no byte ever), `nonsense` (bytes that are no HTTP), `slow` (a late first byte, no fault). A whole answer may be `half`
of one, cut, or `torn`: half of one under a length that fits it. Once it streams:
`fin` and `rst` (the connection ends inside a chunk), `early` (the stream ends as if whole, without [DONE]),
`stall` (it stops, the socket stays), `garbage` (bytes that are no chunk), `error` (an error event, then
[DONE], as vLLM's when its engine died), `broken` (an event that is no JSON; the stream goes on behind it), `unset` (it ends
as if whole behind a finish_reason that says nothing: "" or "null"), `pings` (it stops, comments go on).
`held` is no fault: tokens are computed and counted, and their text is held back for longer than the time-outs for silence
are, as a parser does with a tool call. `given up` is written where the connection ends meanwhile.
For the whole process: `kill` (-9) and `freeze` (every stream stops, /health stays well; `frozen` is who comes then). Each
fault is written to FILE with the requests it hit, before it happens.

SIGUSR2: everything takes ten times as long, or as long as before.
SIGUSR1 is a hang that does not end: as `freeze`, but the process stays until somebody ends it. Its /health says 200,
its /metrics answer, and requests whose clients leave stay on it, as in vLLM when its engine core hangs (vllm#36451). Every
second generation of a slot writes comments to its streams meanwhile, as an API server of its own does.
As vLLM, it computes on where nobody reads: what was computed waits in memory.
Engines of slots with an even number have vLLM's counters; those with an odd one have no /metrics.
A request with `poison` gets the connection closed by every engine, each time: `poison`.
`unwatched` is written once when nobody has asked for /health for longer than a supervisor may look away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from chaos import language

BEFORE = {"reset": 8, "500": 8, "503": 5, "mute": 2, "nonsense": 4, "slow": 10}
AMID = {"fin": 14, "rst": 14, "early": 8, "stall": 4, "garbage": 8, "error": 4, "broken": 10}
AMID |= {"unset": 8, "pings": 3, "held": 6}
WHOLE = {"kill": 3, "freeze": 1}
FREEZE_S = 30.0  # a frozen process that was not killed exits by itself
# Without a probe of /health for this long, the instance is not watched: fifty times probe_interval_s (main.CONFIG).
UNWATCHED_S = 25.0
# Half an event, and one behind which its rest comes as an event of its own.
BROKEN = (
    b'data: {"id": "x", "choi\xff\n\n',
    b'data: {"id":"x","choices":[{"index":0,"delta":{"con\n\ntent":"a"}}]}\n\n',
)
UNSET = ("", "null")
PING = b": ping\n\n"
PING_EVERY_S = 0.5
# Longer than idle_timeout_s, hung_timeout_s and first_token_timeout_s, shorter than answer_timeout_s (main.CONFIG).
HELD_S = 4.5
SLOW_S = (0.5, 1.5)
SLOWNESS = 10.0


class Broken(Exception):  # noqa: N818 - it breaks on purpose
    """The connection ended."""


class Exchange:
    """One request in progress."""

    def __init__(
        self, name: str, path: str, body: dict[str, Any], reader: asyncio.StreamReader | None = None
    ) -> None:
        self.name = name
        self.path = path
        self.body = body
        self.reader = reader  # of its connection
        self.sent = 0  # events with text, or whole answers


class Engine:
    """The process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.name = f"{args.seed} {Path(args.uds).stem}"  # slot and generation
        self.random = random.Random(self.name)  # noqa: S311 - seeded
        self.open: set[Exchange] = set()
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.log = os.open(args.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        slot, _, generation = Path(args.uds).stem.removeprefix("slot").partition("-")
        self.has_counters = int(slot) % 2 == 0
        self.pings = int(generation or 0) % 2 == 0
        self.hung = False
        self.ends: list[asyncio.TimerHandle] = []  # of a frozen process
        self.tokens = 0
        self.slowness = 1.0
        self.looked_at: float | None = None  # last probe of /health; None before the first

    def note(self, kind: str, *hit: Exchange) -> None:
        """Writes one line per injected fault; whole lines, because processes share the file."""
        for one in hit:
            line = {"name": one.name, "kind": kind, "at": time.monotonic(), "sent": one.sent}
            os.write(self.log, json.dumps(line | {"engine": self.name}).encode() + b"\n")

    def draw(self, asked: dict[str, Any]) -> str | None:
        """The fault to inject into one request, usually none. A calm one only meets other requests' faults."""
        if self.hung or "calm" in asked or self.random.random() >= self.args.faults:
            return None
        kinds = BEFORE | AMID | WHOLE
        if (
            not self.has_counters
        ):  # idle_timeout_s bounds the silence of an engine that does not tell whether it computes
            del kinds["held"]
        return self.random.choices(list(kinds), list(kinds.values()))[0]

    def kill(self) -> None:
        """Exits as if killed by the OOM killer."""
        self.note("kill", *self.open)
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self) -> None:
        """Stops every stream; health checks still succeed."""
        self.note("freeze", *self.open)
        self.thawed.clear()
        kill = asyncio.get_running_loop().call_later(FREEZE_S, os.kill, os.getpid(), signal.SIGKILL)
        self.ends.append(kill)

    def hang(self) -> None:
        """Stops computing; health checks still succeed. What was frozen before does not end by itself either."""
        for kill in self.ends:
            kill.cancel()
        self.hung = True
        self.note("hang", Exchange("", "", {}), *self.open)
        self.thawed.clear()

    def slow_down(self) -> None:
        """Takes ten times as long from now on; at the second call as long as before."""
        self.slowness = SLOWNESS if self.slowness == 1 else 1.0

    async def notice_neglect(self) -> None:
        """Checks once whether probes arrive. The pause catches probes that were delayed with this process."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(1)
            late = time.monotonic() - before - 1
            if self.looked_at is not None and late > 1:  # the whole host was frozen
                self.looked_at += late
            if self.looked_at is not None and time.monotonic() - self.looked_at > UNWATCHED_S:
                seen = self.looked_at
                await asyncio.sleep(1)
                if self.looked_at == seen:
                    self.note("unwatched", Exchange("", "", {}))
                    return

    def counters(self) -> str:
        """The metrics of vLLM (vllm/v1/metrics/loggers.py) that a supervisor reads."""
        labels = f'{{engine="0",model_name="{self.args.model}"}}'
        return "".join(
            f"vllm:{name}{labels} {float(value)}\n"
            for name, value in (
                ("num_requests_running", len(self.open)), ("num_requests_waiting", 0),
                ("generation_tokens_total", self.tokens), ("iteration_tokens_total_count", self.tokens),
            )
        )  # fmt: skip

    # --- HTTP ---------------------------------------------------------------------------------

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves the requests of one connection."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, Broken):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, path, _ = head.split("\r\n", 1)[0].split(" ")
                length = next(
                    (
                        int(line[15:])
                        for line in head.lower().split("\r\n")
                        if line.startswith("content-length:")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                await self.respond(reader, writer, method, path, body)
        writer.close()

    async def respond(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, method: str, path: str, body: bytes
    ) -> None:
        if path == "/health":
            self.looked_at = time.monotonic()
        if path == "/metrics":
            if self.has_counters:
                text(writer, self.counters())
            else:
                plain(writer, 404, {"detail": "Not Found"})
            return
        if method == "GET":
            entry = {"id": self.args.model, "object": "model", "created": 0, "owned_by": "chaos"}
            plain(writer, 200, {"object": "list", "data": [entry]} if path == "/v1/models" else {})
            return
        if path == "/tokenize":
            plain(writer, 404, {"detail": "Not Found"})
            return
        asked = json.loads(body)
        exchange = Exchange(str(asked.get("user", "")), path, asked, reader)
        if not exchange.name:  # the launcher's own canary always succeeds
            await self.answer(writer, exchange, None)
            return
        self.open.add(exchange)
        if not self.thawed.is_set():
            self.note("frozen", exchange)
        try:
            if "poison" in asked:
                self.note("poison", exchange)
                writer.transport.abort()
                raise Broken
            fault = self.draw(asked)
            if fault in BEFORE:
                await self.fail_before(writer, exchange, fault)
            await self.thawed.wait()
            await self.answer(writer, exchange, None if fault in BEFORE else fault)
        finally:
            self.open.discard(exchange)

    async def fail_before(self, writer: asyncio.StreamWriter, exchange: Exchange, fault: str) -> None:
        """Returns only if the request is answered in the end."""
        self.note(fault, exchange)
        match fault:
            case "slow":
                await asyncio.sleep(self.random.uniform(*SLOW_S))
                return
            case "mute":
                await asyncio.Event().wait()
            case "500" | "503":
                plain(
                    writer,
                    int(fault),
                    {"error": {"message": "engine trouble", "type": "x", "code": int(fault)}},
                )
            case "nonsense":
                writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
                writer.close()
            case _:
                writer.transport.abort()
        raise Broken

    async def answer(self, writer: asyncio.StreamWriter, exchange: Exchange, fault: str | None) -> None:
        context = language.render(exchange.path, exchange.body)
        limit = language.limit_of(exchange.path, exchange.body)
        await asyncio.sleep(self.slowness * self.args.first_s)
        if not exchange.body.get("stream"):
            await self.whole(writer, exchange, fault)
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        events = Events(exchange, self.args.model, f"{self.args.tag}{self.random.randrange(1 << 32):08x}")
        if events.chat:
            self.send(writer, events.role())
        breaks_at = self.random.randint(fault != "held", max(limit - 1, 1)) if fault else -1
        told = 0
        for text, finish in language.speak(context, limit):
            await asyncio.sleep(self.slowness * self.args.token_s * self.random.uniform(0.5, 1.5))
            await self.while_frozen(writer)
            if told == breaks_at and fault is not None:
                if fault == "unset":
                    self.send(writer, events.text(text, self.random.choice(UNSET)))
                    exchange.sent += 1
                await self.fail_amid(writer, exchange, fault)
            self.send(writer, events.text(text, finish))
            told += 1
            self.tokens += 1
            exchange.sent += 1
            if writer.transport.is_closing():
                raise Broken
        if (exchange.body.get("stream_options") or {}).get("include_usage"):
            self.send(writer, events.usage(context, told))
        self.send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    async def while_frozen(self, writer: asyncio.StreamWriter) -> None:
        """Returns as soon as the engine computes."""
        while not self.thawed.is_set():
            if not self.pings:
                await self.thawed.wait()
                return
            self.send(writer, PING)
            await asyncio.sleep(PING_EVERY_S)

    async def hold_back(self, exchange: Exchange) -> None:
        """Computes, and says nothing."""
        ends = time.monotonic() + HELD_S
        while time.monotonic() < ends:
            await asyncio.sleep(self.args.token_s * 10)
            await self.thawed.wait()
            self.tokens += 1
            if exchange.reader is not None and exchange.reader.at_eof():
                self.note("given up", exchange)
                raise Broken

    async def fail_amid(self, writer: asyncio.StreamWriter, exchange: Exchange, fault: str) -> None:
        """Returns only where the stream goes on behind the fault."""
        if fault == "kill":
            self.kill()
        if fault == "freeze":
            self.freeze()
            await self.while_frozen(writer)
        self.note(fault, exchange)
        if fault == "held":
            await self.hold_back(exchange)
        elif fault == "broken":
            self.send(writer, self.random.choice(BROKEN))
        else:
            await self.end_amid(writer, fault)

    async def end_amid(self, writer: asyncio.StreamWriter, fault: str) -> None:
        """Ends a stream, or lets it end. Raises Broken."""
        match fault:
            case "pings":
                while not writer.transport.is_closing():
                    self.send(writer, PING)
                    await asyncio.sleep(PING_EVERY_S)
            case "stall":
                await asyncio.Event().wait()
            case "fin":
                writer.write(b'80\r\ndata: {"id":"half')
                writer.close()
            case "early" | "unset":
                writer.write(b"0\r\n\r\n")
            case "garbage":
                writer.write(b"\x00\xffzz\r\ndata: garbage\n\n\r\n")
                writer.close()
            case "error":
                error = {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}
                self.send(writer, b"data: " + json.dumps(error).encode() + b"\n\n")
                self.send(writer, b"data: [DONE]\n\n")
                writer.write(b"0\r\n\r\n")
                writer.close()
            case _:
                writer.write(b'80\r\ndata: {"id":"half')
                await asyncio.sleep(0)
                writer.transport.abort()
        raise Broken

    async def whole(self, writer: asyncio.StreamWriter, exchange: Exchange, fault: str | None) -> None:
        text, finish, usage = language.answer(exchange.path, exchange.body)
        await asyncio.sleep(self.slowness * self.args.token_s * usage["completion_tokens"] / 2)
        await self.thawed.wait()
        self.tokens += usage["completion_tokens"]
        said: dict[str, Any] = {"text": text}
        if "messages" in exchange.body:
            said = {"message": {"role": "assistant", "content": text}}
        choice = {"index": 0, **said, "finish_reason": finish}
        payload = json.dumps(
            {"id": f"{self.args.tag}x", "model": self.args.model, "choices": [choice], "usage": usage}
        ).encode()
        if fault == "held":
            fault = None
        if fault in {"early", "garbage", "broken", "unset", "pings"}:
            self.note("torn", exchange)
            payload, fault = payload[: len(payload) // 2], None
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n".encode()
        if fault is None:
            writer.write(head + payload)
            await writer.drain()
            return
        if fault == "kill":
            self.kill()
        if fault == "freeze":
            self.freeze()
            await self.thawed.wait()
        self.note("half", exchange)
        writer.write(head + payload[: len(payload) // 2])
        writer.close()
        raise Broken

    @staticmethod
    def send(writer: asyncio.StreamWriter, event: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))


class Events:
    """The events of one response, as vLLM 0.32 sends them."""

    def __init__(self, exchange: Exchange, model: str, ident: str) -> None:
        self.chat = "messages" in exchange.body
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        self.pad = {"padding": "x" * int(exchange.body["padding"])} if "padding" in exchange.body else {}
        self.head = {"id": f"{prefix}-{ident}", "object": kind, "created": int(time.time()), "model": model}

    def _event(self, **more: Any) -> bytes:
        text = json.dumps(self.head | more, ensure_ascii=False, separators=(",", ":"))
        return b"data: " + text.encode() + b"\n\n"

    def role(self) -> bytes:
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._event(choices=[choice])

    def text(self, text: str, finish: str | None) -> bytes:
        said: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": finish}
        return self._event(choices=[choice], **self.pad)

    def usage(self, context: str, told: int) -> bytes:
        prompt = language.count(context)
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + told, "completion_tokens": told}
        return self._event(choices=[], usage=usage)


def plain(writer: asyncio.StreamWriter, status: int, payload: dict[str, Any]) -> None:
    """A whole JSON answer."""
    body = json.dumps(payload).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def text(writer: asyncio.StreamWriter, page: str) -> None:
    """A complete text response."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {len(page)}\r\n\r\n"
    writer.write((head + page).encode())


async def serve(args: argparse.Namespace) -> None:
    """Serves until SIGTERM, which ends it at once, as with vLLM."""
    engine = Engine(args)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGUSR1, engine.hang)
    loop.add_signal_handler(signal.SIGUSR2, engine.slow_down)
    neglect = asyncio.create_task(engine.notice_neglect())
    server = await asyncio.start_unix_server(engine.connected, args.uds)
    print("ready", flush=True)
    await stopped.wait()
    neglect.cancel()
    engine.note("stopped", *engine.open)
    server.close()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--uds", required=True)
    parser.add_argument("--model", default="chaos")
    parser.add_argument("--log", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--tag", default="", help="begins the id of each answer")
    parser.add_argument("--token-s", type=float, default=0.02)
    parser.add_argument("--first-s", type=float, default=0.0, help="before the first token")
    parser.add_argument("--faults", type=float, default=0.08)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
