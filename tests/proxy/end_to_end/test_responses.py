"""One attempt's ways: when this comes from the instance, this must leave to the client."""

from __future__ import annotations

import asyncio
import io
import json
import random

import aiohttp
import pytest
from support.fakes import SOON_S
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, ENGINE_ERROR, Call, answer_chat, event
from yarl import URL

BOTH = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])


def events_of(body: bytes) -> list[bytes]:
    assert body.endswith(b"\n\n")
    return body[:-2].split(b"\n\n")


def last_error(body: bytes) -> dict[str, object]:
    last = events_of(body)[-1]
    assert last.startswith(b"data: ")
    error = json.loads(last[6:])["error"]
    assert isinstance(error, dict)
    return error


# --- streams ---------------------------------------------------------------------------------------


async def test_each_event_leaves_when_it_comes(proxy: ProxyUnderTest) -> None:
    go = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await call.start_stream()
        for text in ("one", "two"):
            await call.chunk(event(text))
            await go.acquire()
        await call.chunk(DONE)
        await call.end_stream()

    await proxy.engine(0, script)
    async with proxy.chat(stream=True) as answer, asyncio.timeout(SOON_S):
        for text in ("one", "two"):  # the engine sends no further event before this one is here
            assert await answer.content.readuntil(b"\n\n") == event(text)
            go.release()
        assert await answer.content.read() == DONE
    assert "Content-Encoding" not in answer.headers
    assert answer.headers["Transfer-Encoding"] == "chunked"


async def test_any_chunking_gives_the_same_bytes(proxy: ProxyUnderTest) -> None:
    chance = random.Random(3)  # noqa: S311
    data = b"".join(event(f"wörd {n} [DONE] error") for n in range(40)) + b": comment\n\n" + DONE

    async def script(call: Call) -> None:
        await call.start_stream()
        rest = data
        while rest:
            size = chance.randrange(1, 200)
            await call.chunk(rest[:size])
            rest = rest[size:]
            if chance.random() < 0.3:
                await asyncio.sleep(0)
        await call.end_stream()

    await proxy.engine(0, script)
    for _ in range(10):
        async with proxy.chat(stream=True) as answer:
            assert await answer.read() == data


async def test_no_done_after_an_error_event(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(event("one"))
        await asyncio.sleep(0.02)
        await call.chunk(ENGINE_ERROR[:20])
        await call.chunk(ENGINE_ERROR[20:] + DONE)
        await call.end_stream()

    await proxy.engine(0, script)
    async with proxy.chat(stream=True) as answer:
        assert await answer.read() == event("one") + ENGINE_ERROR
    assert proxy.sums()["failed"] == 1
    assert proxy.suspects == [(0, 1, "its engine failed in the middle of the answer")]


async def test_an_error_event_that_comes_first_moves_the_request(proxy: ProxyUnderTest) -> None:
    """vLLM answers 200 and then the error when its engine dies while the request waits."""
    failed: list[int] = []

    async def script(call: Call) -> None:
        if not failed:
            failed.append(1)
            await call.start_stream()
            await call.chunk(ENGINE_ERROR)
            await call.chunk(DONE)
            await call.end_stream()
        else:
            await answer_chat(call)

    await proxy.engine(0, script)
    await proxy.engine(1, script)
    async with proxy.chat(stream=True) as answer:
        assert answer.status == 200
        assert (await answer.read()).endswith(event("three") + DONE)
    assert proxy.server.readings.stats()["retried"] == 1


async def test_an_error_event_that_is_all_there_is_becomes_a_plain_error(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(ENGINE_ERROR + DONE)
        await call.end_stream()

    await proxy.engine(0, script)
    async with proxy.chat(stream=True) as answer:
        assert answer.status == 500
        assert (await answer.json())["error"]["message"] == "EngineCore died"


@pytest.mark.parametrize("half", [b"", b'data: {"choices":[{"del'], ids=["between", "inside"])
@pytest.mark.parametrize("how", ["reset", "eof", "clean end", "removed"])
async def test_a_cut_stream_ends_in_an_error_event(proxy: ProxyUnderTest, how: str, half: bytes) -> None:
    seen = asyncio.Event()

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(event("one"))
        await seen.wait()
        if half:
            await call.chunk(half)
            await asyncio.sleep(0.02)
        match how:
            case "reset":
                call.cut()
            case "eof":
                call.writer.close()
            case "clean end":
                await call.end_stream()
            case _:
                for slot in range(2):
                    proxy.server.remove_upstream(slot, 1, "exit code 0")
                await call.until_left()

    await proxy.engine(0, script)
    await proxy.engine(1, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True) as answer:
        first = await answer.content.readuntil(b"\n\n")
        seen.set()
        body = first + await answer.content.read()  # the chunked body ends well
    error = last_error(body)
    assert error["type"] == "upstream_error"
    assert events_of(body)[:-1] == [event("one")[:-2]]
    assert DONE not in body
    assert proxy.sums() == {
        "accepted": 1, "completed": 0, "refused": 0, "client_aborted": 0, "rejected": 0, "failed": 1, "in_flight": 0
    }  # fmt: skip


async def test_a_silent_stream_ends_in_an_error_event(build: Build) -> None:
    proxy = await build(idle_timeout_s=0.1)

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(event("one"))
        await call.until_left()

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True) as answer:
        assert "within 0.1 s" in str(last_error(await answer.read())["message"])


async def test_bad_chunk_framing_is_no_end(build: Build) -> None:
    proxy = await build(idle_timeout_s=0.2)

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(event("one"))
        await asyncio.sleep(0.02)
        await call.raw(b"zz\r\nnonsense\r\n" + b"0\r\n\r\n")
        await call.until_left()

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True) as answer:
        body = await answer.read()
    assert last_error(body)["type"] == "upstream_error"


async def test_a_stream_that_need_not_end_in_done_ends(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b'event: response.created\ndata: {"response":{"id":"resp_1"}}\n\n')
        await call.chunk(b'event: response.completed\ndata: {"type":"response.completed","response":{}}\n\n')
        await call.end_stream()

    await proxy.engine(0, script)
    async with proxy.client.post("/v1/responses", data=b'{"model":"m"}') as answer:
        assert (await answer.read()).endswith(b'"response":{}}\n\n')
    assert proxy.sums()["completed"] == 1


# --- before the first byte -------------------------------------------------------------------------


async def refuse_500(call: Call) -> None:
    await call.json({"error": {"message": "EngineCore encountered an issue", "code": 500}}, 500)


async def refuse_503(call: Call) -> None:
    await call.json({"error": {"message": "draining"}}, 503)


async def hang_up(call: Call) -> None:
    call.cut()


async def close(call: Call) -> None:
    call.writer.close()


async def half_a_head(call: Call) -> None:
    await call.raw(b"HTTP/1.1 200 OK\r\nContent-Ty")
    call.cut()


async def half_a_body(call: Call) -> None:
    await call.raw(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"id":')
    await asyncio.sleep(0.01)
    call.cut()


async def head_only(call: Call) -> None:
    await call.start_stream()
    await asyncio.sleep(0.01)
    call.cut()


async def half_an_event(call: Call) -> None:
    await call.start_stream()
    await call.chunk(b'data: {"choices"')
    await asyncio.sleep(0.01)
    call.cut()


async def empty_stream(call: Call) -> None:
    await call.start_stream()
    await call.end_stream()


async def nonsense(call: Call) -> None:
    await call.raw(b"SSH-2.0-OpenSSH_9.2\r\n")
    call.writer.close()


BREAKS = [
    refuse_500, refuse_503, hang_up, close, half_a_head, half_a_body, head_only, half_an_event, empty_stream, nonsense
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("break_", BREAKS, ids=lambda script: script.__name__)
async def test_what_breaks_before_the_first_byte_moves_on(
    proxy: ProxyUnderTest, break_: object, stream: bool
) -> None:
    for slot in range(3):
        await proxy.engine(slot, break_)  # type: ignore[arg-type]
    await proxy.engine(3)
    for _ in range(8):
        async with asyncio.timeout(SOON_S), proxy.chat(stream=stream) as answer:
            assert answer.status == 200
            assert await answer.read()
    sums = proxy.sums()
    assert (sums["accepted"], sums["completed"], sums["failed"]) == (8, 8, 0)
    assert {slot for slot, _, _ in proxy.suspects} == {0, 1, 2}


@BOTH
async def test_a_dead_socket_moves_on(proxy: ProxyUnderTest, stream: bool) -> None:
    dead = await proxy.engine(0)
    await dead.die()
    await proxy.engine(1)
    for _ in range(8):
        async with proxy.chat(stream=stream) as answer:
            assert answer.status == 200
            await answer.read()
    assert (0, 1) in {suspect[:2] for suspect in proxy.suspects}


@BOTH
async def test_a_hung_instance_moves_on(build: Build, stream: bool) -> None:
    proxy = await build(answer_timeout_s=1.0, first_token_timeout_s=1.0)
    await proxy.engine(0, Call.until_left)
    await proxy.engine(1)
    for _ in range(4):
        async with proxy.chat(stream=stream) as answer:
            assert answer.status == 200
            await answer.read()


@BOTH
async def test_removed_before_the_first_byte_moves_on(proxy: ProxyUnderTest, stream: bool) -> None:
    async def script(call: Call) -> None:
        proxy.server.remove_upstream(0, 1, "signal 9")
        await call.until_left()

    await proxy.engine(0, script)
    await proxy.engine(1)
    for _ in range(4):
        async with asyncio.timeout(SOON_S), proxy.chat(stream=stream) as answer:
            assert answer.status == 200
            await answer.read()


async def test_a_5xx_of_all_is_passed_on_as_it_is(proxy: ProxyUnderTest) -> None:
    for slot in range(2):
        await proxy.engine(slot, refuse_500)
    async with proxy.chat() as answer:
        assert answer.status == 500
        assert (await answer.json())["error"]["message"] == "EngineCore encountered an issue"
    assert proxy.sums()["failed"] == 1


async def test_all_dead_is_said(build: Build) -> None:
    proxy = await build(park_timeout_s=0.2)
    for slot in range(2):
        await (await proxy.engine(slot)).die()
    async with proxy.chat(stream=True) as answer:
        assert answer.status == 502
        assert int(answer.headers["Retry-After"]) >= 1
        error = (await answer.json())["error"]
    assert error["type"] == "upstream_error"
    assert "cannot connect" in error["message"]
    assert str(proxy.folder) not in error["message"]
    assert proxy.sums()["failed"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_gives_up_what_comes_has_failed(proxy: ProxyUnderTest, stream: bool) -> None:
    """vLLM 0.32 answers so, with status 200, while it is shutting down."""

    async def gives_up(call: Call) -> None:
        if not stream:
            choice = {"index": 0, "message": {"content": ""}, "finish_reason": "abort"}
            await call.json({"id": "x", "choices": [choice]})
            return
        await call.start_stream()
        await call.chunk(
            b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
        )
        await call.chunk(b"data: [DONE]\n\n")
        await call.end_stream()

    first = await proxy.engine(0, gives_up)
    async with proxy.chat(stream=stream, temperature=0) as answer:
        pass
    proxy.server.remove_upstream(0, 1, "exit 0")
    assert len(first.calls) >= 1
    assert proxy.suspects
    proxy.suspects.clear()
    await proxy.engine(1, gives_up)
    await proxy.engine(2)
    for _ in range(2):
        async with proxy.chat(stream=stream, temperature=0) as answer:
            assert answer.status == 200
            body = await answer.read()
        assert b"abort" not in body
        assert body.endswith(DONE) == stream
    assert proxy.suspects
    assert proxy.balanced()


async def test_an_event_stream_with_a_length_is_framed_anew(proxy: ProxyUnderTest) -> None:
    """Middleware that buffers a stream gives it a length."""
    events = (
        b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n' + DONE
    )

    async def script(call: Call) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n"
        await call.raw(head % len(events) + events)

    await proxy.engine(0, script)
    async with proxy.chat(stream=True) as answer:
        assert await answer.read() == events
    assert proxy.sums()["completed"] == 1


async def test_a_4xx_is_the_clients_and_goes_no_further(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.json({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 400)

    engines = [await proxy.engine(slot, script) for slot in range(2)]
    async with proxy.chat(stream=True) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == "too long"
    assert sum(len(engine.calls) for engine in engines) == 1
    assert proxy.suspects == []
    assert proxy.sums()["refused"] == 1


async def test_detail_is_rewritten(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.json({"detail": "Not Found"}, 404)

    await proxy.engine(0, script)
    async with proxy.client.post("/v1/embeddings", data=b"{}") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["type"] == "NotFoundError"


# --- plain answers ---------------------------------------------------------------------------------


async def test_a_large_plain_answer_that_breaks_has_no_clean_end(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.raw(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9000000\r\n\r\n"
        )
        await call.raw(b"x" * 3_000_000)
        await asyncio.sleep(0.05)
        call.cut()

    await proxy.engine(0, script)
    with pytest.raises(aiohttp.ClientError):
        async with asyncio.timeout(SOON_S), proxy.chat() as answer:
            await answer.read()
    await until(lambda: proxy.sums()["failed"] == 1)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 5 << 20])
@pytest.mark.parametrize("chunked", [False, True])
async def test_plain_answers_of_any_size(proxy: ProxyUnderTest, size: int, chunked: bool) -> None:
    data = random.Random(size).randbytes(size)  # noqa: S311
    if chunked and size:
        data = b"1" if size == 1 else b'"%b"' % (b"x" * (size - 2))
    kind = b"application/json" if size else b"audio/wav"

    async def script(call: Call) -> None:
        if chunked:
            await call.raw(
                b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % kind
            )
            for at in range(0, size, 70_000):
                await call.chunk(data[at : at + 70_000])
            await call.end_stream()
        else:
            head = f"HTTP/1.1 200 OK\r\nContent-Type: audio/wav\r\nContent-Length: {size}\r\n\r\n"
            await call.raw(head.encode() + data)

    await proxy.engine(0, script)
    async with proxy.chat() as answer:
        assert await answer.read() == data
    assert proxy.sums()["completed"] == 1


async def test_what_passes_and_what_does_not(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.json(
            {}, 200, "Connection: close, X-Hop", "X-Hop: 1", "X-Kept: 2", "Server: uvicorn", "X-Request-Id: z"
        )

    engine = await proxy.engine(0, script)
    headers = {
        "Connection": "keep-alive, X-Mine",
        "X-Mine": "1",
        "Authorization": "Bearer k",
        "X-Request-Id": "my-id",
        "User-Agent": "me",
        "TE": "trailers",
        "Content-Type": "application/json",
    }
    body = b'{"model": "m",  "x": "\xc3\xa9"}'
    url = URL(proxy.server.endpoint + "/v1/chat/completions?a=%2F&b", encoded=True)
    async with proxy.client.post(url, data=body, headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["X-Request-Id"] == "my-id"
        assert answer.headers["Server"] == "numa-launcher"
        assert answer.headers["X-Kept"] == "2"
        assert "X-Hop" not in answer.headers
    call = engine.calls[0]
    assert call.target == "/v1/chat/completions?a=%2F&b"
    assert call.body == body
    assert call.header("authorization") == "Bearer k"
    assert call.header("x-request-id") == "my-id"
    assert call.header("user-agent") == "me"
    assert call.header("host") == "localhost"
    names = [name.lower() for name, _ in call.headers]
    assert "x-mine" not in names
    assert "te" not in names
    assert len(names) == len(set(names))


async def test_a_large_body_goes_on_byte_for_byte_and_again_on_a_retry(proxy: ProxyUnderTest) -> None:
    body = b'{"model":"m","prompt":"' + b"x" * (9 << 20) + b'"}'
    bad = await proxy.engine(0, refuse_500)
    good = await proxy.engine(1)
    for _ in range(4):
        async with proxy.client.post("/v1/completions", data=body_of(body)) as answer:
            assert answer.status == 200
    assert {call.body for call in bad.calls + good.calls} == {body}
    assert bad.calls


def body_of(data: bytes) -> aiohttp.payload.Payload:
    return aiohttp.payload.BytesIOPayload(io.BytesIO(data))


# --- clients that leave or are slow ----------------------------------------------------------------


@BOTH
async def test_a_client_that_leaves_aborts_its_request(proxy: ProxyUnderTest, stream: bool) -> None:
    async def script(call: Call) -> None:
        if stream:
            await call.start_stream()
            await call.chunk(event("one"))
        await call.until_left()

    engine = await proxy.engine(0, script)
    body = b'{"model":"m"}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await proxy.raw(head.encode() + body)
    if stream:
        await reader.readuntil(b"\n\n")
    else:
        await until(lambda: bool(engine.calls))
    assert proxy.server.in_flight(0, 1) == 1
    writer.close()
    async with asyncio.timeout(SOON_S):
        await engine.calls[0].left.wait()
    await until(lambda: proxy.server.in_flight(0, 1) == 0)
    assert proxy.sums()["client_aborted"] == 1
    assert proxy.suspects == []


async def test_a_client_that_leaves_at_done_has_got_its_answer(proxy: ProxyUnderTest) -> None:
    """guidellm does: it does not wait for the last chunk, and so may be gone before the instance has sent it."""

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(event("one"))
        await call.chunk(DONE)
        await call.until_left()

    await proxy.engine(0, script)
    body = b'{"model":"m","stream":true}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await proxy.raw(head.encode() + body)
    await reader.readuntil(DONE)
    writer.close()
    await until(lambda: proxy.sums()["completed"] == 1)
    assert proxy.sums()["client_aborted"] == 0
    assert proxy.server.in_flight(0, 1) == 0
    assert proxy.balanced()


async def test_a_slow_client_slows_its_instance_and_nobody_else(build: Build) -> None:
    """Where no memory is given to it."""
    proxy = await build(slow_client_buffer_bytes=0)
    sent = 0
    piece = event("x" * 60_000)

    async def script(call: Call) -> None:
        nonlocal sent
        if b"slow" not in call.body:
            await answer_chat(call)
            return
        await call.start_stream()
        for _ in range(1000):  # 60 MB in all
            await call.chunk(piece)
            sent += len(piece)
        await call.chunk(DONE)
        await call.end_stream()

    await proxy.engine(0, script)
    body = b'{"model":"m","user":"slow"}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, _ = await proxy.raw(head.encode() + body)
    await reader.readuntil(b"\r\n\r\n")
    before = -1
    while before != sent:  # until everything between them is full
        before = sent
        await asyncio.sleep(0.2)
    assert sent < 20_000_000
    async with asyncio.timeout(SOON_S), proxy.chat() as answer:
        assert answer.status == 200
    async with asyncio.timeout(SOON_S):
        rest = 0
        while chunk := await reader.read(1 << 20):
            rest += len(chunk)
            if chunk.endswith(b"0\r\n\r\n"):
                break
    assert rest > 60_000_000
    await until(lambda: proxy.sums()["completed"] == 2)


async def test_a_client_that_takes_nothing_is_given_up(build: Build) -> None:
    proxy = await build(client_stall_timeout_s=0.3)

    async def script(call: Call) -> None:
        await call.start_stream()
        for _ in range(1000):
            await call.chunk(event("x" * 60_000))

    await proxy.engine(0, script)
    body = b'{"model":"m"}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    await proxy.raw(head.encode() + body)
    await until(lambda: proxy.sums()["client_aborted"] == 1)
    assert proxy.suspects == []


async def test_64_streams_at_once(proxy: ProxyUnderTest) -> None:
    for slot in range(4):
        await proxy.engine(slot)

    async def one(n: int) -> bytes:
        async with proxy.chat(stream=True, user=str(n)) as answer:
            return await answer.read()

    bodies = await asyncio.gather(*(one(n) for n in range(64)))
    assert set(bodies) == {event("one") + event("two") + event("three") + DONE}
    assert proxy.sums()["completed"] == 64
    assert proxy.balanced()
