"""A fault of our own code, wherever an answer leads: its client gets an honest end, its key its place, the sums add up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import SOON_S
from proxy.end_to_end.test_access_control import new_key
from proxy.proxy_under_test import Build, ProxyUnderTest, until
from proxy.scripted_engine import DONE, Call, answer_chat, event

from launcher.proxy.auth.api_keys import ApiKeys
from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.dispatch.desk import Desk
from launcher.proxy.dispatch.fleet import Fleet
from launcher.proxy.dispatch.intake import Intake
from launcher.proxy.dispatch.moves import Moves
from launcher.proxy.dispatch.relay import Relay
from launcher.proxy.downstream.connection import DownstreamConnection
from launcher.proxy.downstream.response import ResponseWriter
from launcher.proxy.sse.tracker import EventTracker
from launcher.proxy.upstream.reader import Attempt


async def streams(call: Call) -> None:
    """A stream of events that come one by one."""
    await call.start_stream()
    for number in range(8):
        await call.chunk(event(f"w{number}"))
        await asyncio.sleep(0.002)
    await call.chunk(DONE)
    await call.end_stream()


async def refuses(call: Call) -> None:
    """A 4xx in FastAPI's form."""
    await call.json({"detail": "no"}, 422)


async def breaks(call: Call) -> None:
    """It dies before its first byte."""
    await call.cut_now()


async def tears(call: Call) -> None:
    """It dies in the middle of a stream."""
    await call.start_stream()
    await call.chunk(event("one"))
    await asyncio.sleep(0.01)
    call.cut()


Script = Callable[[Call], Awaitable[None]]
WHOLE, STREAM, REFUSED, BROKEN, TORN = answer_chat, streams, refuses, breaks, tears
PLACES: list[tuple[Script, type, str]] = [
    # The four words of an instance.
    *((WHOLE, Attempt, name) for name in ("on_head", "on_body", "on_end")),
    *((STREAM, Attempt, name) for name in ("on_head", "on_body", "on_end")),
    *((BROKEN, Attempt, name) for name in ("on_broken", "broken")),
    *((TORN, Attempt, name) for name in ("on_broken", "broken")),
    # What they lead to.
    *((WHOLE, Relay, name) for name in ("answered", "answer", "_leave", "_learn_usage", "_end", "send", "start")),
    *((STREAM, Relay, name) for name in ("pass_events", "_commit", "ended", "_leave", "_end", "_listen")),
    *((REFUSED, Relay, name) for name in ("answered", "answer")),
    *((BROKEN, Relay, name) for name in ("broken", "_leave")),
    *((TORN, Relay, name) for name in ("broken", "_leave", "fail")),
    *((WHOLE, ResponseWriter, name) for name in ("whole",)),
    *((STREAM, ResponseWriter, name) for name in ("start", "send", "end", "_write")),
    *((TORN, ResponseWriter, name) for name in ("break_off",)),
    *((STREAM, Transcript, name) for name in ("feed", "arm")),
    *((STREAM, EventTracker, name) for name in ("feed", "rest")),
    *((BROKEN, Moves, name) for name in ("elsewhere", "_next")),
    *((TORN, Moves, name) for name in ("resume",)),
    *((WHOLE, Moves, name) for name in ("settle", "enter")),
    *((WHOLE, Desk, name) for name in ("left", "ended", "admit")),
    *((WHOLE, Fleet, name) for name in ("left", "submit", "_send")),
    *((WHOLE, Intake, name) for name in ("_demand", "_take_from_key")),
    *((WHOLE, ApiKeys, name) for name in ("check",)),
]  # fmt: skip
COUNTS = ((Relay, "_end"), (Desk, "ended"))  # who counts must be able to count


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, once: bool) -> list[str]:
    """From now on `owner.name` raises; the names of what was raised."""
    raised: list[str] = []
    real = getattr(owner, name)

    def fault(self: Any, *args: Any, **more: Any) -> Any:
        if once and raised:
            return real(self, *args, **more)
        raised.append(name)
        raise ZeroDivisionError(name)

    monkeypatch.setattr(owner, name, fault)
    return raised


async def guarded(build: Build, folder: Path, script: Script) -> tuple[ProxyUnderTest, dict[str, str]]:
    """A proxy whose one key has one place."""
    key = new_key(folder / "keys", "app", concurrency=1)
    proxy = await build(api_keys_file=str(folder / "keys"), park_timeout_s=0.1, queue_timeout_s=1)
    await proxy.engine(0, script)
    return proxy, {"Authorization": f"Bearer {key}"}


async def rest_of(reader: asyncio.StreamReader, proxy: ProxyUnderTest) -> bytes | None:
    """What comes next; b"" at the end of the connection, None where it is kept alive after the answer."""
    while True:
        over = proxy.sums()["in_flight"] == 0
        try:
            return await asyncio.wait_for(reader.read(65536), 0.3)
        except TimeoutError:
            if over:
                return None


def ends_honestly(answer: bytes, *, clean: bool) -> bool:
    """An error of ours, an event that tells of one, or no clean end; or all of the answer was there already."""
    if answer.startswith(b"HTTP/1.1 5"):
        return "error" in json.loads(answer.partition(b"\r\n\r\n")[2])
    if not clean:
        return True
    whole = answer.endswith((b'"}}]}', b"[DONE]\n\n\r\n0\r\n\r\n")) or b" 422 " in answer
    told = b'data: {"error"' in answer and b"[DONE]" not in answer and answer.endswith(b"0\r\n\r\n")
    return whole or told


@pytest.mark.parametrize(
    ("script", "owner", "name", "once"),
    [
        pytest.param(
            *place, once, id="-".join((*(each.__name__ for each in place[:2]), place[2], f"{once=}"))
        )
        for place in PLACES
        for once in (True, False)
        if once or place[1:] not in COUNTS
    ],
)
async def test_a_fault_of_ours_ends_the_request_honestly(  # noqa: PLR0917
    build: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: Script,
    owner: type,
    name: str,
    once: bool,
) -> None:
    proxy, head = await guarded(build, tmp_path, script)
    raised = fail_at(monkeypatch, owner, name, once=once)
    body = b'{"model":"m","messages":[],"stream":%s}' % (b"true" if script in {streams, tears} else b"false")
    fields = "".join(f"{key}: {value}\r\n" for key, value in head.items())
    asked = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n{fields}\r\n"
    reader, writer = await proxy.raw(asked.encode() + body)
    answer = bytearray()
    clean = True
    async with asyncio.timeout(SOON_S):
        await until(lambda: bool(raised))
        try:
            while data := await rest_of(reader, proxy):
                answer += data
            clean = data is None
        except ConnectionError:
            clean = False
    assert ends_honestly(bytes(answer), clean=clean), (clean, bytes(answer))
    assert proxy.balanced()
    assert proxy.sums()["in_flight"] == 0
    writer.close()
    faults = [record for record in caplog.records if "a fault of the front door" in record.getMessage()]
    assert len(faults) == len({record.__dict__["request_id"] for record in faults}) == 1
    assert faults[0].exc_info is not None
    assert faults[0].exc_info[0] is ZeroDivisionError
    assert not [record for record in caplog.records if record.name == "asyncio"]
    monkeypatch.undo()
    keys = proxy.server._keys
    assert [entry.limits.in_flight for entry in keys] == [0]


async def test_a_fault_while_a_client_leaves(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(call: Call) -> None:
        await call.until_left()

    proxy, head = await guarded(build, tmp_path, script)
    raised = fail_at(monkeypatch, Relay, "client_gone", once=True)
    ask = asyncio.create_task(
        proxy.client.post("/v1/completions", data=b'{"model":"m"}', headers=head).__aenter__()
    )
    await until(lambda: proxy.sums()["in_flight"] == 1)
    ask.cancel()
    await until(lambda: bool(raised))
    await until(lambda: proxy.sums()["in_flight"] == 0)
    assert proxy.balanced()
    assert [entry.limits.in_flight for entry in proxy.server._keys] == [0]


BAD = {
    "no UTF-8": b'{"detail":"\xff"}',
    "deep": b'{"detail":' + b"[" * 3000 + b"]" * 3000 + b"}",
    "half a surrogate": b'{"detail":"\\ud800"}',
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD)
@pytest.mark.parametrize("waits", [False, True], ids=["plain", "after comments"])
async def test_an_error_that_can_not_be_read_passes_as_it_is(build: Build, body: bytes, waits: bool) -> None:
    proxy = await build(keepalive_comment_s=0.05)

    async def script(call: Call) -> None:
        if waits:
            await asyncio.sleep(0.2)
        head = b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        await call.raw(head + body)

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=waits) as answer:
        got = await answer.read()
    if waits:
        assert b'"error"' in got
        assert b"[DONE]" not in got
    else:
        assert (answer.status, got) == (400, body)
    assert proxy.sums()["completed"] == 1


async def test_the_clock_goes_on_when_a_connection_fails_in_a_tick(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that fails is closed, its request ends as failed, and deadlines hold for all others."""
    proxy = await build(header_timeout_s=0.2)

    async def never(call: Call) -> None:
        await call.until_left()

    engine = await proxy.engine(0, never)
    body = b'{"model":"m","prompt":"hello"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
    reader, writer = await proxy.raw(head + body)
    await until(lambda: bool(engine.calls))
    (broken,) = proxy.server._clients
    tick = DownstreamConnection.tick

    def fail(client: DownstreamConnection, now: float) -> None:
        if client is broken:
            raise RuntimeError("a fault")
        tick(client, now)

    monkeypatch.setattr(DownstreamConnection, "tick", fail)
    silent, other = await proxy.raw(b"GET /health HTTP/1.1\r\n")
    async with asyncio.timeout(SOON_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 502 ")
        assert (await silent.read()).startswith(b"HTTP/1.1 408 ")
    assert proxy.sums()["failed"] == 1
    for end in (writer, other):
        end.close()
