"""SPOP as HAProxy speaks it: the frames are made here, from its specification, by other code than the agent's."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st
from support.flooding import WORST_S, least_wait, pipeline

from launcher.fleet import spoe
from launcher.fleet.spoe import Value, serve

WAIT_S = 10.0
HELLO: dict[str, Value] = {
    "supported-versions": "2.0",
    "max-frame-size": 65532,
    "capabilities": "pipelining,async",
}
U64 = st.integers(0, (1 << 64) - 1)


def varint(value: int) -> bytes:
    """Below 240 one byte; else four bits, then seven in each byte."""
    if value < 240:
        return bytes([value])
    parts, rest = [240 + (value - 240) % 16], (value - 240) // 16
    while rest >= 128:
        parts.append(128 + (rest - 128) % 128)
        rest = (rest - 128) // 128
    return bytes([*parts, rest])


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(len(data)) + data


def typed(value: Value) -> bytes:
    match value:
        case None:
            return b"\x00"
        case bool():
            return bytes([1 + 16 * value])
        case int():
            return b"\x05" + varint(value) if value >= 0 else b"\x04" + varint(value + (1 << 64))
        case str():
            return b"\x08" + text(value)
        case bytes():
            return b"\x09" + text(value)


def pairs(fields: Mapping[str, Value]) -> bytes:
    return b"".join(text(name) + typed(value) for name, value in fields.items())


def frame(kind: int, payload: bytes = b"", stream: int = 0, number: int = 0, flags: int = 1) -> bytes:
    body = struct.pack(">BI", kind, flags) + varint(stream) + varint(number) + payload
    return struct.pack(">I", len(body)) + body


def notify(name: str, fields: Mapping[str, Value], stream: int = 1, number: int = 1) -> bytes:
    return frame(3, text(name) + bytes([len(fields)]) + pairs(fields), stream, number)


class Agent:
    """An agent that answers `pick` when its event is set, or at once."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Mapping[str, Value]]] = []
        self.held: dict[str, asyncio.Event] = {}
        self.cancelled = 0

    async def handle(self, name: str, arguments: Mapping[str, Value]) -> Mapping[str, str]:
        self.seen.append((name, arguments))
        who = str(arguments.get("id"))
        if who == "bad":
            raise ValueError(who)
        if who in self.held:
            try:
                await self.held[who].wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        return {"server": f"h-{who}"}


class Peer:
    """HAProxy's end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def frame(self) -> tuple[int, bytes] | None:
        """Kind, and all after the flags; None where the agent closed."""
        async with asyncio.timeout(WAIT_S):
            try:
                length = int.from_bytes(await self.reader.readexactly(4), "big")
                body = await self.reader.readexactly(length)
            except (EOFError, ConnectionError):
                return None
        assert body[1:5] == b"\0\0\0\1"
        return body[0], body[5:]

    async def hello(self) -> None:
        self.send(frame(1, pairs(HELLO)))
        kind, payload = await self.frame() or (0, b"")
        assert kind == 101
        assert text("version") + typed("2.0") in payload
        assert text("max-frame-size") + b"\x03" + varint(65532) in payload

    async def refused(self, status: int) -> None:
        kind, payload = await self.frame() or (0, b"")
        assert kind == 102
        assert text("status-code") + b"\x03" + varint(status) in payload
        assert await self.frame() is None


@asynccontextmanager
async def connected(agent: Agent) -> AsyncIterator[Peer]:
    async def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer, agent.handle)

    server = await asyncio.start_server(serving, "127.0.0.1", 0)
    try:
        peer = Peer(*await asyncio.open_connection(*server.sockets[0].getsockname()))
        yield peer
        peer.writer.close()
    finally:
        server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=WAIT_S)


def ack(who: str, stream: int, number: int) -> tuple[int, bytes]:
    set_var = b"\x01\x03\x02" + text("server") + b"\x08" + text(f"h-{who}")
    return 103, varint(stream) + varint(number) + set_var


async def test_a_request_gets_its_variables() -> None:
    agent = Agent()
    async with connected(agent) as peer:
        await peer.hello()
        peer.send(notify("pick", {"id": "a", "key": None, "body": b"\xff{", "length": 70000}, 300, 70000))
        assert await peer.frame() == ack("a", 300, 70000)
    assert agent.seen == [("pick", {"id": "a", "key": None, "body": b"\xff{", "length": 70000})]


async def test_a_late_answer_holds_up_no_other() -> None:
    agent = Agent()
    agent.held["a"] = asyncio.Event()
    async with connected(agent) as peer:
        await peer.hello()
        peer.send(notify("pick", {"id": "a"}, 1) + notify("pick", {"id": "b"}, 2))
        assert await peer.frame() == ack("b", 2, 1)
        agent.held["a"].set()
        assert await peer.frame() == ack("a", 1, 1)


async def test_an_error_of_the_handler_costs_its_variables_only(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(Agent()) as peer:
        await peer.hello()
        peer.send(notify("pick", {"id": "bad"}, 1) + notify("pick", {"id": "b"}, 2))
        assert await peer.frame() == (103, varint(1) + varint(1))
        assert await peer.frame() == ack("b", 2, 1)
    assert "cannot answer the SPOP message pick" in caplog.text


async def test_several_messages_in_a_frame() -> None:
    async with connected(Agent()) as peer:
        await peer.hello()
        both = b"".join(text(name) + b"\1" + pairs({"id": name}) for name in ("x", "y"))
        peer.send(frame(3, both, 1, 1))
        one, other = (ack(name, 1, 1)[1] for name in "xy")
        assert await peer.frame() == (103, one + other[2:])


async def test_a_health_check_is_answered_and_closed() -> None:
    async with connected(Agent()) as peer:
        peer.send(frame(1, pairs(HELLO | {"healthcheck": True})))
        kind, _ = await peer.frame() or (0, b"")
        assert kind == 101
        assert await peer.frame() is None


async def test_a_disconnect_is_answered_and_cancels_what_is_held(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent()
    agent.held["a"] = asyncio.Event()
    async with connected(agent) as peer:
        await peer.hello()
        peer.send(notify("pick", {"id": "a"}) + notify("pick", {"id": "b"}))
        await peer.frame()
        peer.send(frame(2, pairs({"status-code": 0, "message": "bye"})))
        await peer.refused(0)
    assert agent.cancelled == 1
    assert not caplog.text


async def test_a_lost_connection_cancels_what_is_held() -> None:
    agent = Agent()
    agent.held["a"] = asyncio.Event()
    async with connected(agent) as peer:
        await peer.hello()
        peer.send(notify("pick", {"id": "a"}) + notify("pick", {"id": "b"}))
        await peer.frame()
    assert agent.cancelled == 1


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (frame(1, pairs(HELLO | {"supported-versions": "1.0, 3.0"})), 8),
        (frame(1, pairs({"max-frame-size": 65532})), 8),
        (frame(1, pairs({"supported-versions": "2.0"})), 6),
        (frame(1, b"\x05abc"), 4),
        (notify("pick", {"id": "a"}), 4),
        (struct.pack(">I", spoe.MAX_FRAME + 1), 3),
        (struct.pack(">I", 0), 4),
    ],
)
async def test_a_bad_first_frame_is_refused(sent: bytes, status: int) -> None:
    async with connected(Agent()) as peer:
        peer.send(sent)
        await peer.refused(status)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (frame(3, text("pick") + b"\1", 1, 1, flags=0), 10),
        (frame(0, b"more", 1, 1), 10),
        (frame(3, text("pick") + b"\2" + pairs({"id": "a"})), 4),
        (frame(3, text("pick") + b"\1" + text("id") + b"\x0e"), 4),
        (frame(3, text("pick") + b"\1" + text("id") + b"\x05" + b"\xff" * 20), 4),
        (frame(3, b"\xff" * 9), 4),
    ],
)
async def test_a_bad_message_is_refused(sent: bytes, status: int) -> None:
    agent = Agent()
    async with connected(agent) as peer:
        await peer.hello()
        peer.send(sent)
        await peer.refused(status)
    assert agent.seen == []


async def test_unknown_frames_are_ignored() -> None:
    async with connected(Agent()) as peer:
        await peer.hello()
        peer.send(frame(77, b"\xff\xff") + notify("pick", {"id": "a"}))
        assert await peer.frame() == ack("a", 1, 1)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.text(st.characters(codec="utf-8"), max_size=300),
    st.binary(max_size=300),
)


@given(fields=st.dictionaries(st.text("abc", max_size=3), VALUES, max_size=5), stream=U64, number=U64)
def test_what_haproxy_writes_is_read(fields: dict[str, Value], stream: int, number: int) -> None:
    agent = Agent()

    async def run() -> None:
        async with connected(agent) as peer:
            await peer.hello()
            peer.send(notify("m", fields | {"id": "a"}, stream, number))
            assert await peer.frame() == ack("a", stream, number)

    asyncio.run(run())
    assert agent.seen == [("m", fields | {"id": "a"})]


@given(
    begin=st.sampled_from([b"", frame(1, pairs(HELLO))]),
    kind=st.integers(0, 255),
    payload=st.binary(max_size=60),
    flags=st.sampled_from([1, 1, 0, 255]),
    rest=st.binary(max_size=20),
)
def test_no_bytes_stop_the_agent(begin: bytes, kind: int, payload: bytes, flags: int, rest: bytes) -> None:
    """Whatever comes, the connection ends in order, and a message that follows on another one is answered."""
    agent = Agent()
    failures: list[dict[str, object]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with connected(agent) as peer:
            body = struct.pack(">BI", kind, flags) + payload
            peer.send(begin + struct.pack(">I", len(body)) + body + rest)
            peer.writer.write_eof()
            while answer := await peer.frame():
                assert answer[0] in {101, 102, 103}
        async with connected(agent) as peer:
            await peer.hello()
            peer.send(notify("pick", {"id": "after"}))
            assert await peer.frame() == ack("after", 1, 1)

    asyncio.run(run())
    assert failures == []


FLOODS = {
    "questions": notify("pick", {"id": "a"}) * 3_000,
    "frames of no use": frame(200) * 10_000,
    "many messages in a frame": frame(3, (text("") + b"\0") * 16) * 500,
    "many fields": frame(1, pairs(HELLO) + (text("") + b"\0") * 50) * 500,
}


@pytest.mark.parametrize("kind", FLOODS)
@pytest.mark.bounded
def test_a_flood_of_frames_holds_up_no_other_connection(kind: str) -> None:
    async def measure() -> float:
        async with connected(Agent()) as peer:
            await peer.hello()
            address = peer.writer.get_extra_info("peername")

            async def ask() -> None:
                peer.send(notify("pick", {"id": "b"}, 2))
                assert await peer.frame() == ack("b", 2, 1)

            last = notify("last", {}, 77, 77)
            flood = frame(1, pairs(HELLO)) + FLOODS[kind] + last
            return await least_wait(ask, lambda: pipeline(address, flood, 1, varint(77) + varint(77)))

    assert uvloop.run(measure()) <= WORST_S


@pytest.mark.parametrize(
    "payload",
    [frame(3, (text("") + b"\0") * 17), frame(3, text("pick") + b"\xff" + (text("") + b"\0") * 255)],
    ids=["messages", "arguments"],
)
async def test_a_frame_with_too_much_in_it_ends_the_connection(payload: bytes) -> None:
    async with connected(Agent()) as peer:
        await peer.hello()
        peer.send(payload)
        await peer.refused(4)
