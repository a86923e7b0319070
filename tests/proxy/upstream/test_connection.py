"""One upstream connection over real sockets: what its sink hears, and when the connection is used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import SOON_S
from support.recording_sink import HEAD, NoPool, NoTransport, Peer, Play, RecordingSink, Server

from launcher.proxy.http1.fields import MAX_HEAD_BYTES
from launcher.proxy.upstream.connection import RESEND_S, TURN_BYTES, WRITE_HIGH_BYTES, UpstreamConnection
from launcher.proxy.upstream.pool import ConnectionPool, Endpoint

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TOLD = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"


class Upstream:
    """A pool and its server."""

    def __init__(self, server: Server, *, resend: bool) -> None:
        self.server = server
        self.pool = ConnectionPool(Endpoint(server.address, external=not resend), SOON_S)

    def send(self, body: bytes = b"{}", *, method: str = "POST", ago_s: float = 0.0) -> RecordingSink:
        sink = RecordingSink()
        head = HEAD.replace(b"Length: 2", b"Length: %d" % len(body))
        sink.connection = self.pool.send(sink, method, head, body, asyncio.get_running_loop().time() - ago_s)
        return sink


Serve = Callable[..., Awaitable[Upstream]]


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    async with AsyncExitStack() as stack:

        async def make(play: Play, *, resend: bool = True) -> Upstream:
            upstream = Upstream(await stack.enter_async_context(Server(tmp_path / "s", play)), resend=resend)
            stack.callback(upstream.pool.close)
            return upstream

        yield make


def answers(*responses: bytes) -> Play:
    """These responses, one for each request of a connection, in pieces where `|` is."""

    async def play(peer: Peer) -> None:
        for response in responses:
            await peer.request()
            for piece in response.split(b"|"):
                await peer.say(piece)
        await peer.until_left()

    return play


# --- responses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "body"),
    [
        (OK, b"hello"),
        (OK.replace(b"\r\n\r\n", b"\r|\n\r|\n"), b"hello"),
        (b"|".join(bytes([byte]) for byte in OK), b"hello"),
        (b"HTTP/1.1 204 No\r\n\r\n", b""),
        (b"HTTP/1.1 304 Not\r\nContent-Length: 10\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"hello"),
        (b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n|HTTP/1.1 100 C\r\n\r\n|" + OK, b"hello"),
        (CHUNKED + b"5\r\nhello\r\n0\r\n\r\n", b"hello"),
        (CHUNKED + b"5;a=b\r\nhel|lo\r|\n0\r\nTrailer: x\r\n\r\n", b"hello"),
    ],
)
async def test_a_whole_response_frees_its_connection(serve: Serve, response: bytes, body: bytes) -> None:
    upstream = await serve(answers(response, response))
    for _ in range(2):
        sink = upstream.send()
        assert await sink.end() == "completed"
        assert sink.body == body
        assert len(sink.heads) == 1
    assert upstream.server.connections == 1


async def test_a_response_to_head_has_no_body(serve: Serve) -> None:
    upstream = await serve(answers(TOLD, TOLD))
    for _ in range(2):
        sink = upstream.send(method="HEAD")
        assert await sink.end() == "completed"
        assert (sink.heads[0].length, sink.body) == (0, b"")
    assert upstream.server.connections == 1


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        OK + b"!",  # bytes behind the response: whose would they be
        CHUNKED + b"5\r\nhello\r\n0\r\n\r\n!",
    ],
)
async def test_a_connection_that_may_not_be_used_again_is_closed(serve: Serve, response: bytes) -> None:
    upstream = await serve(answers(response))
    for _ in range(2):
        sink = upstream.send()
        assert await sink.end() == "completed"
        assert sink.body == b"hello"
    assert upstream.server.connections == 2


async def test_a_response_may_end_with_its_connection(serve: Serve) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await peer.say(b"lo")

    upstream = await serve(play)
    sink = upstream.send()
    assert await sink.end() == "completed"
    assert sink.body == b"hello"
    assert sink.heads[0].until_close


async def test_chunks_are_passed_with_their_framing_where_that_is_whole(serve: Serve) -> None:
    upstream = await serve(
        answers(
            CHUNKED
            + b"|5\r\nhello\r\n|5;x=y\r\nhello\r\n|3\r\nhel|\r\n2\r\nlo\r\n|1\r\na\r\n1\r\nb\r\n|0\r\n\r\n"
        )
    )
    sink = upstream.send()
    assert await sink.end() == "completed"
    assert sink.parts == [
        (b"hello", b"5\r\nhello\r\n"),
        (b"hello", b"5;x=y\r\nhello\r\n"),  # of no more than one usual chunk's framing
        (b"hel", None),
        (b"lo", None),
        (b"ab", b"1\r\na\r\n1\r\nb\r\n"),
    ]


LARGE = b"".join(b"%d\n" % number for number in range(9000))
IN_CHUNKS = (
    b"".join(b"7\r\n%b\r\n" % LARGE[at : at + 7] for at in range(0, len(LARGE) // 7 * 7, 7)) + b"0\r\n\r\n"
)


async def test_a_large_read_comes_in_turns_and_whole(serve: Serve) -> None:
    """Its client falls behind in the middle; the connection carries the next request."""
    upstream = await serve(answers(CHUNKED + IN_CHUNKS, OK))
    sink = upstream.send()
    connection = sink.connection
    assert connection is not None

    def wait_a_little() -> None:
        if len(sink.parts) == 2:
            connection.pause()
            asyncio.get_running_loop().call_later(0.01, connection.resume)

    sink.at_part = wait_a_little
    assert await sink.end() == "completed"
    assert sink.body == LARGE[: len(LARGE) // 7 * 7]
    assert max(len(payload) for payload, _ in sink.parts) <= TURN_BYTES
    again = upstream.send()
    assert await again.end() == "completed"
    assert (again.body, upstream.server.connections) == (b"hello", 1)


async def test_a_large_read_that_nobody_wants_any_more(serve: Serve) -> None:
    """Aborted in its middle, and followed by bytes that no request asked for: neither is heard, nor the connection kept."""
    upstream = await serve(answers(CHUNKED + IN_CHUNKS), resend=False)
    sink = upstream.send()
    assert sink.connection is not None
    sink.at_part = sink.connection.abort
    async with asyncio.timeout(SOON_S):
        while not sink.parts:  # noqa: ASYNC110 - nothing to await in what is watched
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.01)
    assert (len(sink.parts), sink.ends) == (1, [])
    other = await serve(answers(CHUNKED + b"0\r\n\r\n" + IN_CHUNKS))
    sink = other.send()
    assert await sink.end() == "completed"
    assert sink.body == b""
    assert await other.send().end() == "completed"
    assert other.server.connections == 2


# --- responses that break -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "reason", "everywhere"),
    [
        (b"SSH-2.0-x\r\n\r\n", "not the head of an HTTP/1.1", False),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "switch", True),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            "Transfer-Encoding",
            True,
        ),
        (CHUNKED + b"zz\r\n", "bad answer", False),
        (CHUNKED + b"5\r\nhello!!", "bad answer", False),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1), "head is too large", False),
    ],
)
async def test_a_response_that_can_not_be_read(
    serve: Serve, response: bytes, reason: str, everywhere: bool
) -> None:
    left = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(response)
        await peer.until_left()
        left.set()

    upstream = await serve(play)
    sink = upstream.send()
    assert reason in await sink.end()
    assert (sink.sent, sink.deterministic) == (True, everywhere)
    async with asyncio.timeout(SOON_S):
        await left.wait()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 2", TOLD, TOLD + b"some", CHUNKED + b"5\r\nhel"])
@pytest.mark.parametrize("resets", [False, True])
async def test_a_connection_that_is_closed_too_early(serve: Serve, said: bytes, resets: bool) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(said)
        if resets:
            peer.writer.transport.abort()

    upstream = await serve(play)
    sink = upstream.send()
    assert await sink.end() in {"it closed the connection", "the connection was reset"}
    assert sink.sent
    assert upstream.server.connections == 1


async def test_nobody_listens(tmp_path: Path) -> None:
    upstream = Upstream(Server(tmp_path / "nobody", answers()), resend=True)
    sink = upstream.send()
    assert await sink.end() == "cannot connect: No such file or directory"
    assert sink.sent is False


async def test_an_error_of_the_proxys_own_is_told_as_one(serve: Serve) -> None:
    """It is raised on the fast path, in `data_received`; the event loop passes it to `connection_lost`."""
    fault = ZeroDivisionError("own")

    def write(_: bytes) -> None:
        raise fault

    upstream = await serve(answers(CHUNKED + b'|16\r\ndata: {"choices":[]}\n\n\r\n'))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda *_: None)  # asyncio tells it, too
    sink = upstream.send()
    assert sink.connection is not None
    sink.at_head = lambda: sink.connection.arm_any(write)  # type: ignore[union-attr]
    assert await sink.end() == "faulted"
    assert sink.error is fault


# --- connections that are used again --------------------------------------------------------------


async def test_a_stale_connection_is_replaced_once(serve: Serve) -> None:
    """The upstream closed it as the request was written: it has read nothing of it."""

    async def play(peer: Peer) -> None:
        await peer.request()
        if peer.number < 2:
            await peer.say(OK)
            await peer.request()
        else:
            await peer.say(OK)
            await peer.until_left()

    upstream = await serve(play)
    assert await upstream.send().end() == "completed"
    again = upstream.send()
    assert await again.end() == "completed"  # connection 0 closes, connection 1 answers
    assert again.body == b"hello"
    assert upstream.server.connections == 2
    assert await upstream.send(b"x" * WRITE_HIGH_BYTES * 2).end() == "completed"  # 1 closes, 2 answers
    assert upstream.server.connections == 3


async def test_an_instance_that_dies_of_a_request_was_reached(serve: Serve) -> None:
    """The request goes out again, and nobody listens any more: that is no connect that failed."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()
        upstream.server.unlink()

    upstream = await serve(play)
    assert await upstream.send().end() == "completed"
    sink = upstream.send()
    assert await sink.end() == "cannot connect: No such file or directory"
    assert sink.sent


async def test_a_request_that_was_sent_long_ago_is_not_sent_again(serve: Serve) -> None:
    """An idle connection closes as the request is written, not later: the request may have killed the instance."""

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()

    upstream = await serve(play)
    assert await upstream.send().end() == "completed"
    sink = upstream.send(ago_s=RESEND_S)
    assert await sink.end() == "it closed the connection"
    assert sink.sent
    assert upstream.server.connections == 1


async def test_a_new_connection_is_not_replaced(serve: Serve) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        if peer.number == 0:
            await peer.say(OK)
            await peer.request()

    upstream = await serve(play)
    assert await upstream.send().end() == "completed"
    assert await upstream.send().end() == "it closed the connection"
    assert upstream.server.connections == 2


@pytest.mark.parametrize(("resend", "said"), [(False, b""), (True, b"H")])
async def test_what_may_have_been_read_is_not_sent_again(serve: Serve, resend: bool, said: bytes) -> None:
    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()
        await peer.say(said)

    upstream = await serve(play, resend=resend)
    assert await upstream.send().end() == "completed"
    sink = upstream.send()
    assert await sink.end() == "it closed the connection"
    assert sink.sent
    assert upstream.server.connections == 1


async def test_a_stale_connection_of_a_closed_pool_is_not_replaced(serve: Serve) -> None:
    go = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        await peer.request()
        await go.wait()

    upstream = await serve(play)
    assert await upstream.send().end() == "completed"
    sink = upstream.send()
    upstream.pool.close()
    go.set()
    assert await sink.end() == "it closed the connection"
    assert upstream.server.connections == 1


async def test_bytes_on_an_idle_connection_close_it(serve: Serve) -> None:
    left = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(OK)
        if peer.number == 0:
            await peer.say(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await peer.until_left()
        left.set()

    upstream = await serve(play)
    assert await upstream.send().end() == "completed"
    async with asyncio.timeout(SOON_S):
        await left.wait()
    sink = upstream.send()
    assert await sink.end() == "completed"
    assert sink.heads[0].status == 200
    assert upstream.server.connections == 2


async def test_a_connection_with_unsent_bytes_is_not_used_again(serve: Serve) -> None:
    """The upstream answered before it had read the whole body."""

    async def play(peer: Peer) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        await peer.say(OK)
        await peer.until_left()

    upstream = await serve(play)
    for _ in range(2):
        assert await upstream.send(b"x" * 8_000_000).end() == "completed"
    assert upstream.server.connections == 2


# --- back-pressure, and ends from this side -------------------------------------------------------


async def test_a_large_body_arrives_whole(serve: Serve) -> None:
    bodies: list[bytes] = []

    async def play(peer: Peer) -> None:
        for _ in range(2):
            bodies.append(await peer.request())
            await peer.say(OK)

    upstream = await serve(play)
    sent = [bytes(range(256)) * 16_000, bytes(range(255, -1, -1)) * 16_000]
    for body in sent:
        assert await upstream.send(body).end() == "completed"
    assert bodies == sent


async def test_a_paused_response_waits(serve: Serve) -> None:
    size = 8_000_000
    written = asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        await peer.say(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        await peer.say(b"x" * size)
        written.set()
        await peer.request()
        await peer.say(OK)

    upstream = await serve(play)
    sink = upstream.send()
    connection = sink.connection
    assert connection is not None
    sink.at_head = connection.pause
    async with asyncio.timeout(SOON_S):
        while not sink.heads:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    connection.pause()  # twice is once
    await asyncio.sleep(0.1)
    assert len(sink.body) < size / 2
    assert not written.is_set()
    connection.resume()
    connection.resume()
    assert await sink.end() == "completed"
    assert len(sink.body) == size
    assert await upstream.send().end() == "completed"
    assert upstream.server.connections == 1


async def test_a_connection_is_read_again_after_a_response_that_ended_paused(serve: Serve) -> None:
    upstream = await serve(answers(OK, OK))
    sink = upstream.send()
    assert sink.connection is not None
    sink.at_head = sink.connection.pause  # all of the response is in this read
    assert await sink.end() == "completed"
    assert await upstream.send().end() == "completed"
    assert upstream.server.connections == 1


@pytest.mark.parametrize("when", ["connecting", "sent", "head", "part"])
async def test_nothing_is_told_after_an_abort(serve: Serve, when: str) -> None:
    asked, left = asyncio.Event(), asyncio.Event()

    async def play(peer: Peer) -> None:
        await peer.request()
        asked.set()
        try:
            await peer.say(CHUNKED + b"5\r\nhello\r\n")
            await peer.say(b"5\r\nhello\r\n")
            await peer.until_left()
        finally:
            left.set()

    upstream = await serve(play)
    sink = upstream.send()
    connection = sink.connection
    assert connection is not None
    if when == "connecting":
        connection.abort()
        await asyncio.sleep(0.05)
        assert not asked.is_set()
    else:
        sink.at_head = connection.abort if when == "head" else sink.at_head
        sink.at_part = connection.abort if when == "part" else sink.at_part
        async with asyncio.timeout(SOON_S):
            await asked.wait()
            if when == "sent":
                connection.abort()
            heard = len(sink.parts)
            await left.wait()
        await asyncio.sleep(0.01)
        assert len(sink.parts) == heard if when == "sent" else len(sink.parts) <= (when == "part")
    assert sink.ends == []


# --- any chunking ---------------------------------------------------------------------------------

STREAM = (
    b"HTTP/1.1 103 Early\r\nLink: </a>\r\n\r\n"
    + CHUNKED
    + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (b"data: %d\n\n" % n for n in range(40)))
    + b"0\r\nTrailer: x\r\n\r\n"
)


async def read_in(cuts: list[int], *, armed: bool) -> tuple[bytes, list[UpstreamConnection]]:
    """The payload of STREAM, cut there; what the fast path relayed is taken apart here."""
    pool = NoPool()
    connection = UpstreamConnection(pool)
    connection.connection_made(NoTransport())
    sink = RecordingSink(connection)
    got = bytearray()

    def relayed(data: bytes) -> None:
        for chunk in data.split(b"\r\n")[1::2]:
            got.extend(chunk)

    def part() -> None:
        got.extend(sink.parts[-1][0])
        if armed and connection.between_chunks:
            connection.arm_any(relayed)

    sink.at_part = part
    connection.send(sink, "POST", HEAD, b"{}", 0.0)
    ends = sorted({*cuts, len(STREAM)})
    for start, end in zip([0, *ends], ends, strict=False):
        if start < end:
            connection.data_received(STREAM[start:end])
    assert sink.ends == ["completed"]
    return bytes(got), pool.kept


BOUNDARIES = [at + 2 for at in range(len(STREAM)) if STREAM.startswith(b"\n\r\n", at)]


@given(cuts=st.lists(st.integers(0, len(STREAM)) | st.sampled_from(BOUNDARIES)), armed=st.booleans())
def test_any_chunking_gives_the_same_body(cuts: list[int], armed: bool) -> None:
    """One byte at a time, several chunks in a read, boundaries or not; with and without the fast path."""
    body, kept = asyncio.run(read_in(cuts, armed=armed))
    assert body == b"".join(b"data: %d\n\n" % n for n in range(40))
    assert len(kept) == 1


def test_byte_by_byte() -> None:
    body, kept = asyncio.run(read_in(list(range(len(STREAM))), armed=True))
    assert body.endswith(b"data: 39\n\n")
    assert len(kept) == 1
