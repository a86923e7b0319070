"""Errors in the proxy's own code, in each action: an honest end for the client, sums that add up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.fakes import SOON_S
from support.keys import new_key
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, answer_chat, event

from launcher.config.schema import Overflow
from launcher.proxy.downstream.connection import DownstreamConnection
from launcher.proxy.request.actions import Action
from launcher.proxy.request.decisions import INTERNAL_ERROR
from launcher.proxy.request.events import Event, Faulted
from launcher.proxy.request.record import Request

CHAT = "/v1/chat/completions"
FAILED: set[str | None] = set()  # ids of requests
PLAIN = b'{"model":"m","messages":[],"stream":false}'
STREAM = b'{"model":"m","messages":[],"stream":true}'


async def streams(call: Call) -> None:
    """A stream of events that come one by one."""
    await call.start_stream()
    for number in range(8):
        await call.chunk(event(f"w{number}"))
        await asyncio.sleep(0.002)
    await call.chunk(DONE)
    await call.end_stream()


async def breaks(call: Call) -> None:
    """It dies before its first byte."""
    await call.cut_now()


async def tears(call: Call) -> None:
    """It dies in the middle of a stream."""
    await call.start_stream()
    await call.chunk(event("one"))
    await asyncio.sleep(0.01)
    call.cut()


async def pours(call: Call) -> None:
    """A long stream that does not wait for its client."""
    await call.start_stream()
    for _ in range(500):  # 30 MB: more than kernels buffer
        await call.chunk(event("x" * 60_000))
    await call.chunk(DONE)
    await call.end_stream()


async def waits(call: Call) -> None:
    """Nothing for a while."""
    await asyncio.sleep(0.3)
    await answer_chat(call)


async def fails_first(call: Call) -> None:
    """500, and an answer where the request is tried again."""
    request_id = call.header("X-Request-Id")
    if request_id in FAILED:
        await answer_chat(call)
    else:
        FAILED.add(request_id)
        await call.json({"error": {"message": "no", "code": 500}}, 500)


Script = Callable[[Call], Awaitable[None]]


@dataclass
class Scene:
    """What makes an action due."""

    script: Script = answer_chat
    body: bytes = PLAIN
    path: str = CHAT
    method: str = "POST"
    settings: dict[str, object] = field(default_factory=dict)
    other: Script | None = None  # of a second instance
    engines: bool = True
    length: int | None = None  # announced, where it is not the body's
    reads_after: Action | None = (
        None  # the client reads nothing until this one was due; None: the action that fails
    )


CLOUD = Overflow(url="http://127.0.0.1:9/v1", models={"m": "m"})
SLOW: dict[str, object] = {"slow_client_buffer_bytes": 0}
SCENES: dict[Action, list[Scene]] = {
    Action.AUTHORIZE: [Scene()],
    Action.LOOK: [Scene(body=PLAIN[:-1] + b',"user":"%b"}' % (b"x" * 1_200_000))],
    Action.ADMIT: [Scene()],
    Action.RENDER_PAGE: [Scene(method="GET", path="/v1/models", body=b"")],
    Action.ENQUEUE: [Scene(breaks, other=breaks), Scene(breaks)],
    Action.SET_TIMER: [Scene(breaks)],
    Action.COUNT_RETRY: [Scene(breaks)],
    Action.SEND: [Scene(), Scene(streams, STREAM)],
    Action.SEND_OVERFLOW: [Scene(settings={"overflow": (CLOUD,)}, engines=False)],
    Action.READ: [Scene(), Scene(streams, STREAM), Scene(tears, STREAM)],
    Action.START: [Scene(streams, STREAM), Scene(tears, STREAM)],
    Action.FIRST_TOKEN: [Scene(streams, STREAM)],
    Action.SETTLE: [Scene(fails_first, other=fails_first)],
    Action.COMMENT: [Scene(waits, STREAM, settings={"keepalive_comment_s": 0.05})],
    Action.CHECK_CLIENT: [Scene(length=1000, settings={"body_timeout_s": 0.1})],
    Action.PAUSE: [Scene(pours, STREAM, settings=SLOW)],
    Action.RESUME: [Scene(pours, STREAM, settings=SLOW, reads_after=Action.PAUSE)],
    Action.DELIVER: [Scene()],
    Action.FINISH: [Scene(streams, STREAM)],
    Action.REFUSE: [Scene(body=b"no JSON"), Scene(breaks)],
    Action.BREAK_OFF: [Scene(tears, STREAM)],
    Action.ABORT: [Scene(pours, STREAM, settings={**SLOW, "client_stall_timeout_s": 0.2})],
    Action.WITHDRAW: [Scene(body=b"no JSON"), Scene(breaks)],
    Action.LEAVE: [Scene(), Scene(streams, STREAM), Scene(breaks), Scene(tears, STREAM)],
    Action.COUNT: [Scene(), Scene(streams, STREAM)],
    Action.LOG: [Scene(), Scene(streams, STREAM)],
}
ALWAYS = set(Action) - {Action.COUNT}  # what counts must be able to count


def test_every_action_has_a_scene() -> None:
    assert SCENES.keys() == set(Action) - {
        Action.FAULT
    }  # due after any error that is told, as in the next test


async def test_an_error_that_is_told_ends_the_request_and_stays_inside(
    proxy: ProxyUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    """A page's task can end with any BaseException."""
    await proxy.engine(0, waits)
    asked = asyncio.create_task(read(proxy))
    await until(lambda: proxy.sums()["in_flight"] == 1)
    (request,) = proxy.server.requests._in_flight
    error = KeyboardInterrupt()
    proxy.server.post(request, Faulted(error))
    status, body = await asked
    assert (status, b"internal proxy error" in body) == (502, True)
    (record,) = [record for record in caplog.records if record.exc_info is not None]
    assert record.exc_info is not None
    assert record.exc_info[1] is error
    assert proxy.sums()["failed"] == 1


async def read(proxy: ProxyUnderTest) -> tuple[int, bytes]:
    async with proxy.chat() as answer:
        return answer.status, await answer.read()


def note(proxy: ProxyUnderTest, action: Action) -> list[str]:
    """The requests for which the action is due from now on."""
    noted: list[str] = []
    do = proxy.server._executor._do
    real = do[action]

    def noting(request: Request, happened: Event, now: float) -> None:
        noted.append(request.request_id)
        real(request, happened, now)

    do[action] = noting
    return noted


def fail_at(proxy: ProxyUnderTest, action: Action, *, once: bool) -> list[str]:
    """From now on the action raises; the requests on which it did."""
    raised: list[str] = []
    do = proxy.server._executor._do
    real = do[action]

    def fault(request: Request, happened: Event, now: float) -> None:
        if once and raised:
            real(request, happened, now)
            return
        raised.append(request.request_id)
        raise ZeroDivisionError(action.name)

    do[action] = fault
    return raised


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
    if answer.startswith((b"HTTP/1.1 5", b"HTTP/1.1 4")):
        return "error" in json.loads(answer.partition(b"\r\n\r\n")[2])
    if not clean:
        return True
    whole = answer.endswith((b'"}}]}', b"[DONE]\n\n\r\n0\r\n\r\n"))
    told = b'data: {"error"' in answer and b"[DONE]" not in answer and answer.endswith(b"0\r\n\r\n")
    return whole or told


CASES = [
    pytest.param(action, scene, once, id=f"{action.name}-{number}-{'once' if once else 'always'}")
    for action, scenes in SCENES.items()
    for number, scene in enumerate(scenes)
    for once in (True, False)
    if once or action in ALWAYS
]


@pytest.mark.parametrize(("action", "scene", "once"), CASES)
async def test_an_internal_error_ends_the_request_honestly(  # noqa: PLR0917
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture, action: Action, scene: Scene, once: bool
) -> None:
    key = new_key(tmp_path / "keys", "app", concurrency=1)
    settings = {"park_timeout_s": 0.1, "queue_timeout_s": 1, **scene.settings}
    proxy = await build(api_keys_file=str(tmp_path / "keys"), **settings)
    if scene.engines:
        await proxy.engine(0, scene.script)
    if scene.other is not None:
        await proxy.engine(1, scene.other)
    raised = fail_at(proxy, action, once=once)
    due = raised if scene.reads_after is None else note(proxy, scene.reads_after)
    size = len(scene.body) if scene.length is None else scene.length
    fields = f"Host: h\r\nContent-Length: {size}\r\nAuthorization: Bearer {key}\r\n"
    head = f"{scene.method} {scene.path} HTTP/1.1\r\n{fields}\r\n"
    async with asyncio.timeout(SOON_S):
        reader, writer = await proxy.raw(head.encode() + scene.body)
        await until(lambda: bool(due))
        answer, clean = bytearray(), True
        try:
            while data := await rest_of(reader, proxy):
                answer += data
            clean = data is None
        except ConnectionError:
            clean = False
        writer.close()
    assert raised
    assert ends_honestly(bytes(answer), clean=clean), (clean, bytes(answer[-500:]))
    assert proxy.balanced()
    assert proxy.sums()["in_flight"] == 0
    assert [entry.limits.in_flight for entry in proxy.server._keys] == [0]
    faults = [record for record in caplog.records if record.getMessage().endswith(INTERNAL_ERROR)]
    assert [record.__dict__["request_id"] for record in faults] == [raised[0]]
    assert faults[0].exc_info is not None
    assert faults[0].exc_info[0] is ZeroDivisionError
    assert not [record for record in caplog.records if record.name == "asyncio"]


async def test_an_internal_error_while_a_client_leaves(build: Build, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "app", concurrency=1)
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    await proxy.engine(0, Call.until_left)
    raised = fail_at(proxy, Action.WITHDRAW, once=True)
    head = {"Authorization": f"Bearer {key}"}
    ask = asyncio.create_task(
        proxy.client.post("/v1/completions", data=b'{"model":"m"}', headers=head).__aenter__()
    )
    await until(lambda: proxy.sums()["in_flight"] == 1 and proxy.server.in_flight(0, 1) == 1)
    ask.cancel()
    await until(lambda: bool(raised))
    await until(lambda: proxy.sums()["in_flight"] == 0)
    assert proxy.server.in_flight(0, 1) == 0
    assert proxy.balanced()
    assert [entry.limits.in_flight for entry in proxy.server._keys] == [0]


async def test_an_internal_error_on_the_fast_path(proxy: ProxyUnderTest) -> None:
    """The event loop gives what the protocol raised to `connection_lost`."""
    writes: list[bytes] = []

    async def script(call: Call) -> None:
        (client,) = proxy.server._clients
        write = client.write

        def fail(data: bytes) -> None:
            writes.append(data)
            if len(writes) == 6:  # the first two or so are written by the slow path
                raise ZeroDivisionError
            write(data)

        client.write = fail
        await streams(call)

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True) as answer:
        body = await answer.read()
    assert DONE not in body
    assert json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["message"] == INTERNAL_ERROR
    assert proxy.sums()["failed"] == 1
    assert proxy.server.in_flight(0, 1) == 0


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
    assert proxy.sums()["refused"] == 1


async def test_the_clock_goes_on_when_a_connection_fails_in_a_tick(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection that fails is closed, its request ends as failed, and deadlines hold for all others."""
    proxy = await build(header_timeout_s=0.2, body_timeout_s=0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\n\r\n"
    reader, writer = await proxy.raw(head)
    await until(lambda: proxy.sums()["in_flight"] == 1)
    (broken,) = proxy.server._clients
    tick = DownstreamConnection.tick

    def fail(client: DownstreamConnection, now: float) -> None:
        if client is broken:
            raise RuntimeError("an internal error")
        tick(client, now)

    monkeypatch.setattr(DownstreamConnection, "tick", fail)
    silent, other = await proxy.raw(b"GET /health HTTP/1.1\r\n")
    async with asyncio.timeout(SOON_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 502 ")
        assert (await silent.read()).startswith(b"HTTP/1.1 408 ")
    assert proxy.sums()["failed"] == 1
    for end in (writer, other):
        end.close()
