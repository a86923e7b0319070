"""What leaves this host: to whom, what of it, and what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fakes import SOON_S
from proxy.auth.test_api_keys import make, put
from proxy.pages.test_application import Backroom, Open, let_in, open_room  # noqa: F401 - a fixture

from launcher.config import schema
from launcher.config.schema import Model, Proxy
from launcher.errors import LauncherError
from launcher.proxy.upstream.overflow import Ending, Overflow

CHAT = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nSet-Cookie: a=b\r\nX-Secret: 1\r\n\r\n{}"


@dataclass
class Cloud:
    """An endpoint elsewhere that answers with the bytes of its script and keeps what it got."""

    url: str
    script: list[bytes] = field(default_factory=lambda: [OK])
    got: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    """While clear, it answers up to the last piece."""
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                top = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in top[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.got.append((top[0], headers, body))
                for piece in self.script[:-1]:
                    writer.write(piece)
                    await writer.drain()
                gone = asyncio.ensure_future(reader.read(1))
                held = asyncio.ensure_future(self.hold.wait())
                await asyncio.wait({gone, held}, return_when=asyncio.FIRST_COMPLETED)
                held.cancel()
                if gone.done():
                    break
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
                writer.write(self.script[-1])
                if b"Content-Length" not in self.script[0] and b"chunked" not in self.script[0]:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.left.set()
            writer.close()

    def settings(self, **more: object) -> schema.Overflow:
        return schema.Overflow(url=self.url, models={"m": "big-model"}, **more)  # type: ignore[arg-type]


@pytest.fixture
async def cloud() -> AsyncIterator[Cloud]:
    async with AsyncExitStack() as stack:
        made = Cloud("")
        server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
        await stack.enter_async_context(server)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/"
        made.hold.set()
        yield made
        made.hold.set()


Make = Callable[..., Awaitable[Backroom]]


@pytest.fixture
def room_with(open_room: Open, cloud: Cloud) -> Make:  # noqa: F811
    async def make_room(
        keys: str | None = None, *, proxy: dict[str, object] | None = None, **more: object
    ) -> Backroom:
        model = Model(name="m", path="/m", aliases=("gpt-4o",))
        return await open_room(model, keys=keys, overflow=cloud.settings(**more), **(proxy or {}))

    return make_room


def overflow(room: Backroom) -> Overflow:
    assert room.application.overflow is not None
    return room.application.overflow


def body(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "é"}], **fields}).encode()


async def test_a_request_goes_there_and_back(room_with: Make, cloud: Cloud, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sk-there\n")
    room = await room_with(api_key_file=str(key_file))
    sent = b'{"model": "gpt-4o", "temperature": 0.30000000000000004, "messages": [{"a":  1}], "stream":false}'
    answer = await room.send(
        "POST", CHAT, "Authorization: Bearer nl-secret", "X-Api-Key: nl-secret", "Cookie: c=d", "X-Request-Id: r-1",
        "traceparent: 00-aa-bb-01", "Content-Type: application/json", "X-Forwarded-For: 10.0.0.1", body=sent,
    )  # fmt: skip
    assert (answer.status, answer.body) == (200, b"{}")
    assert answer.headers["x-served-by"] == "overflow"
    assert not {"set-cookie", "x-secret"} & answer.headers.keys()
    line, headers, got = cloud.got[0]
    assert line == "POST /v1/chat/completions HTTP/1.1"
    assert headers["authorization"] == "Bearer sk-there"
    assert (headers["x-request-id"], headers["traceparent"]) == ("r-1", "00-aa-bb-01")
    assert not {"cookie", "x-api-key", "x-forwarded-for"} & headers.keys()
    assert "secret" not in json.dumps(headers)
    # Only the model is another; everything else is as it was written.
    assert (
        got
        == b'{"model":"big-model","temperature":0.30000000000000004,"messages":[{"a":  1}],"stream":false}'
    )
    assert overflow(room).sent == {"m": 1}
    assert overflow(room).ended == {("m", Ending.COMPLETED): 1}
    assert overflow(room).in_flight == 0


async def test_no_key_of_ours_no_authorization(room_with: Make, cloud: Cloud) -> None:
    room = await room_with()
    await room.send("POST", CHAT, "Authorization: Bearer mine", body=body())  # the only model needs no name
    assert "authorization" not in cloud.got[0][1]


async def test_a_stream_comes_as_it_is_made(room_with: Make, cloud: Cloud) -> None:
    cloud.script = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n",
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    ]
    cloud.hold.clear()
    room = await room_with()
    reader, writer = await asyncio.open_unix_connection(sock=await room.inside.connect())
    sent = body(model="m", stream=True)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
    async with asyncio.timeout(SOON_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head
        assert b"X-Served-By: overflow" in head
        assert b"data: 1" in await reader.readuntil(b"\n\n")
        assert overflow(room).in_flight == 1
        cloud.hold.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).count(b"[DONE]") == 1
    writer.close()
    assert overflow(room).ended == {("m", Ending.COMPLETED): 1}


async def test_a_client_that_leaves_ends_it(room_with: Make, cloud: Cloud) -> None:
    cloud.script = [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n", b""]
    cloud.hold.clear()
    room = await room_with()
    reader, writer = await asyncio.open_unix_connection(sock=await room.inside.connect())
    sent = body(model="m", stream=True)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
    async with asyncio.timeout(SOON_S):
        await reader.readuntil(b"data: 1")
        writer.close()
        await cloud.left.wait()
    assert overflow(room).ended == {("m", Ending.CLIENT_ABORTED): 1}
    assert overflow(room).in_flight == 0


@pytest.mark.parametrize(
    "script",
    [
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", b"5\r\nab"],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", b"zz\r\n"],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\ndata: 1\n\n", b"rest"],
    ],
)
async def test_an_answer_that_breaks_is_broken_off(
    room_with: Make, cloud: Cloud, script: list[bytes]
) -> None:
    cloud.script = script
    cloud.hold.clear()
    room = await room_with(proxy={"idle_timeout_s": 0.2})
    reader, writer = await asyncio.open_unix_connection(sock=await room.inside.connect())
    sent = body(model="m", stream=True)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent)
    async with asyncio.timeout(SOON_S):
        await reader.readuntil(b"data: 1\n\n")
        cloud.hold.set()
        try:
            rest = await reader.read()
        except ConnectionResetError:
            rest = b""
    assert b"0\r\n\r\n" not in rest  # nobody takes it for whole
    writer.close()
    assert overflow(room).ended == {("m", Ending.FAILED): 1}


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"401 Unauthorized", 502),  # our key is wrong, not the client's
        (b"403 Forbidden", 502),
        (b"302 Found\r\nLocation: http://10.0.0.1/", 502),
        (b"400 Bad Request", 400),
        (b"429 Too Many\r\nRetry-After: 9", 429),
        (b"500 Oh", 500),
    ],
)
async def test_its_errors(room_with: Make, cloud: Cloud, first: bytes, status: int) -> None:
    cloud.script = [b"HTTP/1.1 " + first + b"\r\nContent-Length: 2\r\n\r\n{}"]
    room = await room_with()
    answer = await room.send("POST", CHAT, body=body(model="m"))
    assert answer.status == status
    assert ("retry-after" in answer.headers) == (status == 429)
    if status == 502:
        assert b'"code":"overflow_failed"' in answer.body
        assert overflow(room).ended == {("m", Ending.FAILED): 1}


@pytest.mark.parametrize(
    "script", [[b""], [b"garbage\r\n\r\n"], [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b""]]
)
async def test_nobody_there(room_with: Make, cloud: Cloud, script: list[bytes]) -> None:
    cloud.script = script
    if len(script) == 2:
        cloud.hold.clear()  # a head and then silence
    room = await room_with(proxy={"answer_timeout_s": 0.2})
    assert (await room.send("POST", CHAT, body=body(model="m"))).status == 502


async def test_nothing_listens_there(open_room: Open) -> None:  # noqa: F811
    settings = schema.Overflow(url="http://127.0.0.1:1/v1", models={"m": "x"})
    room = await open_room(overflow=settings)
    assert (await room.send("POST", CHAT, body=body(model="m"))).status == 502


async def test_the_cap(room_with: Make, cloud: Cloud) -> None:
    cloud.hold.clear()
    room = await room_with(max_requests=1)
    first = asyncio.create_task(room.send("POST", CHAT, body=body(model="m")))
    while overflow(room).in_flight == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    assert not overflow(room).takes(CHAT, "m", local_only=False)
    answer = await room.send("POST", CHAT, body=body(model="m"))
    assert (answer.status, answer.headers["retry-after"]) == (429, "1")
    cloud.hold.set()
    assert (await first).status == 200
    assert overflow(room).ended == {("m", Ending.REJECTED): 1, ("m", Ending.COMPLETED): 1}


async def test_what_may_go_there(room_with: Make) -> None:
    there = overflow(await room_with())
    assert there.takes(CHAT, "m", local_only=False)
    assert not there.takes(CHAT, "m", local_only=True)
    assert not there.takes(CHAT, "other", local_only=False)
    assert not there.takes(CHAT, None, local_only=False)
    assert not there.takes("/v1/responses", "m", local_only=False)


async def test_a_local_only_key_stays_here_whoever_asks(
    room_with: Make, cloud: Cloud, tmp_path: Path
) -> None:
    ann, record = make("ann", local_only=True)
    bob, bob_record = make("bob")
    put(tmp_path / "keys", record, bob_record)
    room = await room_with(str(tmp_path / "keys"))
    assert (await room.send("POST", CHAT, let_in(ann), body=body(model="m"))).status == 403
    assert not cloud.got
    assert (await room.send("POST", CHAT, let_in(bob), body=body(model="m"))).status == 200


@pytest.mark.parametrize("sent", [b"{", b"[]", b'{"model": 5}', b"\xff", b"[" * 100_000])
async def test_no_json(room_with: Make, cloud: Cloud, sent: bytes) -> None:
    room = await room_with()
    assert (await room.send("POST", CHAT, body=sent)).status == 400
    assert not cloud.got


async def test_other_models_and_routes_do_not_overflow(room_with: Make, cloud: Cloud) -> None:
    room = await room_with()
    assert (await room.send("POST", CHAT, body=body(model="other"))).status == 404
    assert (await room.send("POST", "/v1/messages", body=body(model="m"))).status == 404
    assert (await room.send("POST", "/v1/load_lora_adapter", body=body(model="m"))).status == 404
    assert not cloud.got


async def test_a_body_that_is_too_large(room_with: Make, cloud: Cloud) -> None:
    room = await room_with(proxy={"max_body_bytes": 1000})
    assert (await room.send("POST", CHAT, body=b" " * 2000)).status == 413


async def test_a_new_key_is_read(
    room_with: Make, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.proxy.auth.watched_file.LOOK_EVERY_S", 0.0)
    key_file = tmp_path / "key"
    key_file.write_text("one")
    room = await room_with(api_key_file=str(key_file))
    for text in ("one", "three", ""):  # the last one is no key: the one before stays
        key_file.write_text(text)
        await room.send("POST", CHAT, body=body(model="m"))
    assert [headers["authorization"] for _, headers, _ in cloud.got] == [
        "Bearer one",
        "Bearer three",
        "Bearer three",
    ]


@pytest.mark.parametrize("text", ["", "two words", "é", "a\nb"])
def test_bad_keys_are_errors_at_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    settings = schema.Overflow(url="http://x/v1", models={"m": "x"}, api_key_file=str(path))
    with pytest.raises(LauncherError, match="no such file"):
        Overflow(settings, Proxy(), lambda _: "m")
    path.write_text(text)
    with pytest.raises(LauncherError, match=r"cannot (read|use) the overflow endpoint's key"):
        Overflow(settings, Proxy(), lambda _: "m")
