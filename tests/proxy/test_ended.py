"""What the proxy enters of ended requests: equal to what their clients were told, to the key's sum and to /metrics."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.fakes import SOON_S
from support.keys import new_key
from support.overflow import Cloud, Make, cloud, proxy_with
from support.plain_engine import CHAT, COMPLETIONS, PlainEngine
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, ENGINE_ERROR, Call, Script
from support.token_engine import PROMPT, TokenEngine

from launcher.accounts.ended_request import EndedRequest
from launcher.base.money import token_prices

__all__ = ["cloud", "proxy_with"]  # fixtures
SAID = tuple(f" w{number}" for number in range(20))
ENGINE = TokenEngine(CHAT, SAID)
PROMPTED = TokenEngine(COMPLETIONS, SAID)
USAGE = {"stream_options": {"include_usage": True}}
OUTPUT = len(SAID) + 1  # and the token that ends it


def streams(engine: TokenEngine | PlainEngine, until_event: int | None = None) -> Script:
    """Answer; with `until_event` the connection ends after so many."""

    async def answer(call: Call) -> None:
        await call.start_stream()
        for event in engine.answer(call.body)[:until_event]:
            await call.chunk(event)
        if until_event is None:
            await call.end_stream()
        else:
            call.cut()

    return answer


def says(payload: object) -> Script:
    async def answer(call: Call) -> None:
        await call.json(payload)

    return answer


def in_turn(*scripts: Script) -> Script:
    left = list(scripts)

    async def answer(call: Call) -> None:
        await left.pop(0)(call)

    return answer


async def ended(proxy: ProxyUnderTest) -> EndedRequest:
    """The entry of the only request."""
    await until(lambda: len(proxy.entries) == 1)
    return proxy.entries[0]


def tokens(entry: EndedRequest) -> tuple[int, int, int]:
    return entry.prompt_tokens, entry.cached_tokens, entry.output_tokens


async def metered(proxy: ProxyUnderTest) -> tuple[int, int, int]:
    """The sums of /metrics."""
    page = await proxy.server.metrics_page()
    found = [
        re.search(rf'numa_launcher_{kind}_tokens_total{{model="m"}} ([\d.]+)', page)
        for kind in ("prompt", "cached_prompt", "output")
    ]
    prompt, cached, output = (int(float(each[1])) for each in found if each is not None)
    return prompt, cached, output


def counted(payload: bytes) -> tuple[int, int, int]:
    """What a client makes of the usage in its response."""
    text = payload.decode()
    prompt = [int(n) for n in re.findall(r'"(?:prompt|input)_tokens": ?(\d+)', text)][-1]
    output = ([int(n) for n in re.findall(r'"(?:completion|output)_tokens": ?(\d+)', text)] or [0])[-1]
    cached = ([int(n) for n in re.findall(r'"cached_tokens": ?(\d+)', text)] or [0])[-1]
    return prompt, cached, output


# --- whole responses ------------------------------------------------------------------------------

CHAT_USAGE = {
    "prompt_tokens": 31,
    "completion_tokens": 9,
    "total_tokens": 40,
    "prompt_tokens_details": {"cached_tokens": 16},
}
READ_USAGE = {"prompt_tokens": 31, "total_tokens": 31}
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int, int]]] = {
    CHAT: ({"messages": []}, {"choices": [], "usage": CHAT_USAGE}, (31, 16, 9)),
    COMPLETIONS: (
        {"prompt": ["a", "b"], "n": 2},
        {"choices": [], "usage": CHAT_USAGE, "prompt_logprobs": None},
        (31, 16, 9),
    ),
    "/v1/embeddings": ({"input": "a"}, {"data": [{"embedding": [0.1]}], "usage": READ_USAGE}, (31, 0, 0)),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, {"usage": READ_USAGE, "results": []}, (31, 0, 0)),
    "/v1/score": ({"text_1": "a", "text_2": "b"}, {"data": [], "usage": READ_USAGE}, (31, 0, 0)),
    "/pooling": ({"input": "a"}, {"data": [], "usage": READ_USAGE | {"completion_tokens": 0}}, (31, 0, 0)),
    "/v1/responses": (
        {"input": "a"},
        {
            "id": "resp_1",
            "tools": [{"parameters": {"properties": {"usage": {"input_tokens": 5}}}}],
            "usage": {
                "input_tokens": 31,
                "input_tokens_details": {"cached_tokens": 16},
                "output_tokens": 9,
                "total_tokens": 40,
            },
        },
        (31, 16, 9),
    ),
    "/v1/messages": (
        {"messages": [], "max_tokens": 9},
        {
            "type": "message",
            "stop_reason": "end_turn",
            "usage": {"input_tokens": 15, "cache_read_input_tokens": 16, "output_tokens": 9},
        },
        (31, 16, 9),  # Anthropic's input tokens exclude the cached ones
    ),
}


@pytest.mark.parametrize("path", WHOLE)
async def test_a_whole_response_is_entered_as_its_usage_says(build: Build, tmp_path: Path, path: str) -> None:
    asked, answer, expected = WHOLE[path]
    keys = tmp_path / "keys"
    key = new_key(keys, "alice")
    proxy = await build(api_keys_file=str(keys), prices=token_prices(2, 10, 1))
    await proxy.engine(0, says(answer))
    head = {"Authorization": f"Bearer {key}"}
    async with proxy.client.post(path, json={"model": "m", **asked}, headers=head) as response:
        assert response.status == 200
        await response.read()
    entry = await ended(proxy)
    assert tokens(entry) == await metered(proxy) == expected
    assert (entry.exact, entry.streamed) == (True, False)
    assert (entry.key, entry.model, entry.path, entry.status) == ("alice", "m", path, 200)
    assert (entry.outcome, entry.slot, entry.attempts, entry.continued) == ("completed", 0, 1, 0)
    assert entry.picos == (15 * 2 + 16 * 1 if expected[1] else 31 * 2) * 10**6 + expected[2] * 10**7
    assert proxy.server._keys.sums["alice"].tokens == expected[0] + expected[2]


async def test_a_response_that_is_delivered_in_pieces(proxy: ProxyUnderTest) -> None:
    """Embeddings of many texts are too large to be held back."""
    numbers = [{"index": n, "embedding": [0.123456789] * 1024} for n in range(200)]
    await proxy.engine(0, says({"data": numbers, "usage": READ_USAGE}))
    async with proxy.client.post("/v1/embeddings", json={"model": "m", "input": ["a"]}) as response:
        assert len(await response.read()) > 1 << 21
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact) == ((31, 0, 0), True)


async def test_a_usage_between_two_pieces(proxy: ProxyUnderTest) -> None:
    """The last piece begins at any byte of it."""
    body = json.dumps({"data": "x" * (1 << 20), "usage": READ_USAGE}).encode()

    def cut(split: int) -> Script:
        async def answer(call: Call) -> None:
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            await call.raw(head.encode() + body[:-split])
            await asyncio.sleep(0.002)
            await call.raw(body[-split:])

        return answer

    engine = await proxy.engine(0, cut(1))
    for split in range(1, 90):
        engine.script = cut(split)
        proxy.entries.clear()
        async with proxy.client.post("/v1/embeddings", json={"model": "m", "input": "a"}) as response:
            assert await response.read() == body, split
        entry = await ended(proxy)
        assert (tokens(entry), entry.exact) == ((31, 0, 0), True), split


async def test_embeddings_as_bytes_have_their_usage_in_a_field_of_the_head(proxy: ProxyUnderTest) -> None:
    async def answer(call: Call) -> None:
        told = json.dumps({"data": [], "usage": READ_USAGE})
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nmetadata: {told}\r\nContent-Length: 4\r\n\r\n"
        await call.raw(head.encode() + b"\x00\x01\x02\x03")

    await proxy.engine(0, answer)
    asked = {"model": "m", "input": "a", "encoding_format": "bytes"}
    async with proxy.client.post("/v1/embeddings", json=asked) as response:
        assert await response.read() == b"\x00\x01\x02\x03"
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact) == ((31, 0, 0), True)


async def test_what_computes_no_prompt_takes_no_tokens(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0, says({"count": 3, "usage": CHAT_USAGE}))
    async with proxy.client.post("/tokenize", json={"model": "m", "prompt": "a b c"}) as response:
        assert response.status == 200
    async with proxy.client.get(
        "/v1/responses/resp_1"
    ) as response:  # its tokens were entered when it was made
        assert response.status == 200
    for page in ("/health", "/v1/models", "/metrics"):
        async with proxy.client.get(page) as response:
            await response.read()
    await until(lambda: len(proxy.entries) == 2)
    assert [(entry.path, tokens(entry), entry.exact) for entry in proxy.entries] == [
        ("/tokenize", (0, 0, 0), True),
        ("/v1/responses/resp_1", (0, 0, 0), True),
    ]


async def test_an_upstream_that_does_not_count(proxy: ProxyUnderTest) -> None:
    """It is estimated, and the entry says so."""
    await proxy.engine(0, says({"choices": [{"message": {"content": "hi"}}]}))
    asked = {"model": "m", "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 30}
    async with proxy.client.post(CHAT, json=asked) as response:
        await response.read()
    entry = await ended(proxy)
    assert not entry.exact
    assert 300 < entry.prompt_tokens < 1000
    assert 0 < entry.output_tokens <= 30
    assert tokens(entry) == await metered(proxy)


async def test_a_transcription_is_an_estimate(proxy: ProxyUnderTest) -> None:
    """vLLM says how many seconds it was."""
    await proxy.engine(0, says({"text": "word " * 80, "usage": {"type": "duration", "seconds": 9}}))
    form = aiohttp.FormData({"model": "m", "file": io.BytesIO(b"RIFF")})
    async with proxy.client.post("/v1/audio/transcriptions", data=form) as response:
        assert response.status == 200
        await response.read()
    entry = await ended(proxy)
    assert not entry.exact
    assert 80 < entry.output_tokens < 160


# --- streams --------------------------------------------------------------------------------------


async def read(proxy: ProxyUnderTest, engine: TokenEngine | PlainEngine, **more: Any) -> bytes:
    async with (
        asyncio.timeout(SOON_S),
        proxy.client.post(engine.path, data=engine.request(max_tokens=50, **more)) as response,
    ):
        assert response.status == 200
        return await response.read()


@pytest.mark.parametrize("token_ids", [True, False])
@pytest.mark.parametrize("engine", [ENGINE, PROMPTED], ids=["chat", "completions"])
async def test_a_stream_is_counted_and_its_client_sees_nothing_of_it(
    proxy: ProxyUnderTest, engine: TokenEngine, token_ids: bool
) -> None:
    served = await proxy.engine(0, streams(engine), token_ids=token_ids)
    assert await read(proxy, engine) == b"".join(engine.answer(engine.request(max_tokens=50)))
    assert json.loads(served.calls[0].body)["stream_options"] == {"include_usage": True}
    entry = await ended(proxy)
    assert tokens(entry) == (len(PROMPT), 0, OUTPUT) == await metered(proxy)
    assert entry.exact


async def test_cached_tokens_of_a_stream(proxy: ProxyUnderTest) -> None:
    engine = PlainEngine(CHAT, SAID)
    await proxy.engine(0, streams(engine))
    await read(proxy, engine)
    assert tokens(await ended(proxy)) == (7, 6, OUTPUT)


@pytest.mark.parametrize("engine", [ENGINE, PROMPTED], ids=["chat", "completions"])
async def test_a_client_that_asks_for_usage_gets_what_the_engine_writes(
    proxy: ProxyUnderTest, engine: TokenEngine
) -> None:
    served = await proxy.engine(0, streams(engine))
    payload = await read(proxy, engine, **USAGE)
    assert payload == b"".join(engine.answer(engine.request(max_tokens=50, **USAGE)))
    assert served.calls[0].body == engine.request(max_tokens=50, **USAGE)
    assert tokens(await ended(proxy)) == counted(payload) == (len(PROMPT), 0, OUTPUT)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": "off"}, {"include_usage": True}),
        ({"include_usage": False, "continuous_usage_stats": True}, {"include_usage": True}),
        (
            {"include_usage": None, "include_obfuscation": False},
            {"include_obfuscation": False, "include_usage": True},
        ),
    ],
)
async def test_stream_options_without_usage_are_changed(
    proxy: ProxyUnderTest, options: object, asked: object
) -> None:
    served = await proxy.engine(0, streams(ENGINE))
    payload = await read(proxy, ENGINE, stream_options=options)
    assert payload == b"".join(ENGINE.answer(ENGINE.request(max_tokens=50)))
    assert json.loads(served.calls[0].body) == json.loads(ENGINE.request(max_tokens=50)) | {
        "stream_options": asked
    }
    assert (await ended(proxy)).exact


@pytest.mark.parametrize("options", [7, "x", [], {"include_usage": "yes"}, {"include_usage": 1}])
async def test_stream_options_that_the_engine_must_judge_are_left_alone(
    proxy: ProxyUnderTest, options: object
) -> None:
    served = await proxy.engine(0, says({"error": {"message": "stream_options: bad"}}))
    await read(proxy, ENGINE, stream_options=options)
    assert served.calls[0].body == ENGINE.request(max_tokens=50, stream_options=options)


async def test_an_escaped_name_is_the_same_name(proxy: ProxyUnderTest) -> None:
    """Its value would win over one that was put in front."""
    served = await proxy.engine(0, streams(ENGINE))
    body = ENGINE.request(**USAGE).replace(b"stream_options", b"stream\\u005foptions")
    async with proxy.client.post(CHAT, data=body) as response:
        assert counted(await response.read()) == (len(PROMPT), 0, OUTPUT)
    assert served.calls[0].body == body


@pytest.mark.parametrize("stream", [1, "true", "on"])
async def test_a_stream_is_one_however_its_client_asks(proxy: ProxyUnderTest, stream: object) -> None:
    served = await proxy.engine(0, streams(ENGINE))
    assert await read(proxy, ENGINE, stream=stream) == b"".join(ENGINE.answer(ENGINE.request(max_tokens=50)))
    assert json.loads(served.calls[0].body)["stream_options"] == {"include_usage": True}
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact) == ((len(PROMPT), 0, OUTPUT), True)


async def test_a_large_body_is_asked_for_its_usage_too(proxy: ProxyUnderTest) -> None:
    served = await proxy.engine(0, streams(ENGINE))
    pad = "x" * 900_000
    assert await read(proxy, ENGINE, user=pad) == b"".join(ENGINE.answer(ENGINE.request(max_tokens=50)))
    asked = json.loads(served.calls[0].body)
    assert (asked["user"], asked["stream_options"]) == (pad, {"include_usage": True})
    assert tokens(await ended(proxy)) == (len(PROMPT), 0, OUTPUT)


async def test_an_engine_that_refuses_to_tell_usage(proxy: ProxyUnderTest) -> None:
    """Its client gets the stream all the same; further requests of the model are not asked for it."""

    async def answer(call: Call) -> None:
        if b"stream_options" in call.body:
            await call.json({"error": {"message": "unknown field `stream_options`"}}, 400)
        else:
            await streams(ENGINE)(call)

    served = await proxy.engine(0, answer)
    for _ in range(2):
        assert await read(proxy, ENGINE) == b"".join(ENGINE.answer(ENGINE.request(max_tokens=50)))
    assert [b"stream_options" in call.body for call in served.calls] == [True, False, False]
    await until(lambda: len(proxy.entries) == 2)
    assert [entry.exact for entry in proxy.entries] == [False, False]
    assert [entry.output_tokens for entry in proxy.entries] == [OUTPUT, OUTPUT]
    assert proxy.server.readings.stats()["retried"] == 0
    assert proxy.balanced()


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
async def test_an_error_that_quotes_the_request_says_nothing_of_usage(
    proxy: ProxyUnderTest, options: dict[str, Any]
) -> None:
    """vLLM quotes what it refuses: a client could switch off for a whole model what is asked for."""

    async def answer(call: Call) -> None:
        text = json.loads(call.body)["temperature"]
        if isinstance(text, str):
            await call.json({"error": {"message": f"temperature: not a number: {text}"}}, 400)
        else:
            await streams(ENGINE)(call)

    served = await proxy.engine(0, answer)
    poison = ENGINE.request(temperature="stream_options, include_usage", **options)
    for _ in range(2):
        async with proxy.client.post(CHAT, data=poison) as response:
            assert response.status == 400
            assert "not a number" in await response.text()
    assert served.calls[1].body == poison
    await read(proxy, ENGINE)
    assert json.loads(served.calls[-1].body)["stream_options"] == {"include_usage": True}
    await until(lambda: len(proxy.entries) == 3)
    assert [entry.exact for entry in proxy.entries] == [True, True, True]
    assert [tokens(entry)[2] for entry in proxy.entries] == [0, 0, OUTPUT]
    assert proxy.balanced()


async def test_an_error_that_passes_says_nothing_where_others_got_their_usage(proxy: ProxyUnderTest) -> None:
    """A client's own server may refuse an image once: its address is quoted, and the second try succeeds."""
    fetched = 0

    async def answer(call: Call) -> None:
        nonlocal fetched
        fetched += b"http" in call.body
        if fetched == 1:
            fetched += 1
            await call.json({"error": {"message": "404, url='http://h/x?stream_options'"}}, 400)
        else:
            await streams(ENGINE)(call)

    served = await proxy.engine(0, answer)
    for user in ("first", "http://h/x?stream_options", "last"):
        assert await read(proxy, ENGINE, user=user) == b"".join(ENGINE.answer(ENGINE.request(max_tokens=50)))
    assert [b'"include_usage":true' in call.body for call in served.calls] == [True, True, False, True]


async def test_another_error_is_the_clients(proxy: ProxyUnderTest) -> None:
    async def answer(call: Call) -> None:
        await call.json({"error": {"message": "the prompt is too long"}}, 400)

    served = await proxy.engine(0, answer)
    async with proxy.client.post(CHAT, data=ENGINE.request()) as response:
        assert response.status == 400
    assert len(served.calls) == 1
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact, entry.outcome) == ((0, 0, 0), True, "refused")


async def observed(proxy: ProxyUnderTest) -> dict[str, int]:
    """How many requests each latency of /metrics is of."""
    page = await proxy.server.metrics_page()
    names = ("first_byte_seconds", "request_duration_seconds", "first_token_seconds")
    counts = {name: re.search(rf"numa_launcher_{name}_count(?:{{.*?}})? ([\d.]+)", page) for name in names}
    return {name: 0 if found is None else int(float(found[1])) for name, found in counts.items()}


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_an_upstream_refuses_is_in_no_latency(proxy: ProxyUnderTest, streamed: bool) -> None:
    """It comes at once: many of them would look like a fast engine."""
    error = {"error": {"message": "the prompt is too long", "type": "BadRequestError", "code": 400}}

    async def refuses(call: Call) -> None:
        if streamed:
            await call.start_stream()
            await call.chunk(f"data: {json.dumps(error)}\n\n".encode())
            await call.chunk(DONE)
            await call.end_stream()
        else:
            await call.json(error, 400)

    await proxy.engine(0, in_turn(streams(ENGINE), *[refuses] * 3))
    for _ in range(4):
        async with proxy.client.post(CHAT, data=ENGINE.request()) as response:
            await response.read()
    await until(lambda: len(proxy.entries) == 4)
    assert [entry.outcome for entry in proxy.entries] == ["completed", "refused", "refused", "refused"]
    assert {tokens(entry) for entry in proxy.entries[1:]} == {(0, 0, 0)}
    assert (proxy.sums()["completed"], proxy.sums()["refused"]) == (1, 3)
    assert await observed(proxy) == {
        "first_byte_seconds": 1,
        "request_duration_seconds": 1,
        "first_token_seconds": 1,
    }


async def test_a_stream_that_ends_in_an_error_of_the_request_has_failed(proxy: ProxyUnderTest) -> None:
    error = {"error": {"message": "no valid JSON can follow", "type": "BadRequestError", "code": 400}}

    async def breaks(call: Call) -> None:
        await call.start_stream()
        for event in ENGINE.answer(ENGINE.request())[:6]:
            await call.chunk(event)
        await call.chunk(f"data: {json.dumps(error)}\n\n".encode())
        await call.chunk(DONE)
        await call.end_stream()

    await proxy.engine(0, breaks)
    assert b"no valid JSON" in await read(proxy, ENGINE)
    entry = await ended(proxy)
    assert (entry.outcome, entry.exact) == ("failed", False)


def named(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


RESPONSE_USAGE = {"input_tokens": 31, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 9}
RESPONSE = [
    named("response.created", response={"id": "resp_1", "usage": None}),
    named("response.output_text.delta", delta="one"),
    named("response.completed", response={"id": "resp_1", "usage": RESPONSE_USAGE}),
]
MESSAGE = [
    named("message_start", message={"usage": {"input_tokens": 31, "output_tokens": 0}}),
    named("content_block_start", index=0),
    *(named("content_block_delta", delta={"text": word}) for word in SAID[:8]),
    named(
        "message_delta",
        delta={"stop_reason": "end_turn"},
        usage={"input_tokens": 15, "output_tokens": 9, "cache_read_input_tokens": 16},
    ),
    named("message_stop"),
]
BRIEF_MESSAGE = [
    *MESSAGE[:-2],
    named("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 9}),
    MESSAGE[-1],
]
CHUNK = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}


def chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    return (
        b"data: "
        + json.dumps({**CHUNK, "choices": choices, **more}, separators=(",", ":")).encode()
        + b"\n\n"
    )


TWO = [chunk([{"index": number % 2, "delta": {"content": "x"}}]) for number in range(9)]
LAST = chunk([], usage=CHAT_USAGE)
STREAMED: dict[str, tuple[str, dict[str, Any], list[bytes], tuple[int, int, int], list[bytes]]] = {
    "responses": ("/v1/responses", {"input": "a"}, RESPONSE, (31, 16, 9), RESPONSE),
    "messages": ("/v1/messages", {"messages": [], "max_tokens": 9}, MESSAGE, (31, 16, 9), MESSAGE),
    "messages whose end counts output only": (
        "/v1/messages", {"messages": [], "max_tokens": 9}, BRIEF_MESSAGE, (31, 0, 9), BRIEF_MESSAGE,
    ),
    "several choices": (CHAT, {"messages": [], "n": 2}, [*TWO, LAST, DONE], (31, 16, 9), [*TWO, DONE]),
    "in one read": (CHAT, {"messages": [], "n": 2}, [b"".join([*TWO, LAST, DONE])], (31, 16, 9), [*TWO, DONE]),
    "spaces in its JSON": (
        CHAT,
        {"messages": [], "n": 2},
        [*TWO, LAST.replace(b":", b": ").replace(b"data: ", b"data:", 1), DONE],
        (31, 16, 9),
        [*TWO, DONE],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", STREAMED)
async def test_streams_of_other_shapes(proxy: ProxyUnderTest, kind: str) -> None:
    path, asked, events, expected, told = STREAMED[kind]

    async def answer(call: Call) -> None:
        await call.start_stream()
        for event in events:
            await asyncio.sleep(0.001)
            await call.chunk(event)
        await call.end_stream()

    await proxy.engine(0, answer)
    async with proxy.client.post(path, json={"model": "m", "stream": True, **asked}) as response:
        assert await response.read() == b"".join(told)
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact) == (expected, True)


# --- streams that are cut, left, refused ---------------------------------------------------------


@pytest.mark.parametrize("after", [2, 9, 20])
@pytest.mark.parametrize("asked", [{}, USAGE], ids=["unasked", "asked"])
@pytest.mark.parametrize("engine", [ENGINE, PROMPTED], ids=["chat", "completions"])
async def test_a_continued_stream_is_entered_as_one(
    proxy: ProxyUnderTest, engine: TokenEngine, asked: dict[str, Any], after: int
) -> None:
    """The prompt once, and all that was generated for the client: what it said so far was a part of the next prompt."""
    script = in_turn(streams(engine, after), streams(engine))
    for slot in range(2):
        await proxy.engine(slot, script, token_ids=True)
    payload = await read(proxy, engine, **asked)
    entry = await ended(proxy)
    assert tokens(entry) == await metered(proxy) == (len(PROMPT), 0, OUTPUT)
    assert (entry.exact, entry.continued) == (True, 1)
    assert (b'"usage"' in payload) is bool(asked)
    if asked:
        assert counted(payload) == tokens(entry)


async def test_a_stream_whose_continuation_counts_by_events_is_an_estimate(proxy: ProxyUnderTest) -> None:
    engine = PlainEngine(CHAT, SAID)
    script = in_turn(streams(engine, 15), streams(engine))
    for slot in range(2):
        await proxy.engine(slot, script)
    await read(proxy, engine)
    entry = await ended(proxy)
    assert tokens(entry) == (7, 7, OUTPUT)
    assert (entry.exact, entry.continued) == (False, 1)


@pytest.mark.parametrize("after", [21, 22])
async def test_a_stream_that_lacks_only_its_end(proxy: ProxyUnderTest, after: int) -> None:
    await proxy.engine(0, streams(ENGINE, after + 1), token_ids=True)
    await proxy.engine(1, streams(ENGINE), token_ids=True)
    payload = await read(proxy, ENGINE)
    assert payload.endswith(DONE)
    entry = await ended(proxy)
    # Without a usage nobody said how much of the prompt was cached.
    assert (tokens(entry), entry.exact) == ((len(PROMPT), 0, OUTPUT), after == 22)


async def leave_after(proxy: ProxyUnderTest, events: int, path: str, body: bytes) -> None:
    async with proxy.client.post(path, data=body) as response:
        for _ in range(events):
            await response.content.readuntil(b"\n\n")
        response.close()


def holds_after(events: list[bytes]) -> Script:
    async def answer(call: Call) -> None:
        await call.start_stream()
        for event in events:
            await call.chunk(event)
        await call.until_left()

    return answer


async def test_a_client_that_leaves_is_charged_what_was_generated(proxy: ProxyUnderTest) -> None:
    told = ENGINE.answer(ENGINE.request(return_token_ids=True))[:8]  # the role, and 7 tokens
    await proxy.engine(0, holds_after(told), token_ids=True)
    await leave_after(proxy, 8, CHAT, ENGINE.request())
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact, entry.outcome) == ((len(PROMPT), 0, 7), False, "client_aborted")
    assert tokens(entry) == await metered(proxy)


def says_cached(cached: int | None, *, prompt: int = 1024) -> list[bytes]:
    """A chat of a role and ten words, and its usage."""
    words = [{"role": "assistant", "content": ""}, *({"content": f" w{number}"} for number in range(10))]
    events: list[dict[str, Any]] = [
        {
            "id": "c",
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": each, "finish_reason": None}],
        }
        for each in words
    ]
    events.append({"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": 10, "total_tokens": prompt + 10}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    events.append({"id": "c", "choices": [], "usage": usage})
    return [*(f"data: {json.dumps(each)}\n\n".encode() for each in events), DONE]


@pytest.mark.parametrize("told", [0, None], ids=["the engine tells cached tokens", "it does not"])
@pytest.mark.parametrize("left_after", [4, 0], ids=["in mid-stream", "before the first byte"])
async def test_a_client_that_leaves_pays_for_cached_tokens_what_the_others_pay(
    proxy: ProxyUnderTest, told: int | None, left_after: int
) -> None:
    """The same prompt again, aborted: nearly all of it is cached, and no usage came that says so."""
    events = says_cached(told)
    asked = json.dumps(
        {"model": "m", "stream": True, "messages": [{"role": "user", "content": "word " * 1000}]}
    ).encode()

    async def whole(call: Call) -> None:
        await call.start_stream()
        for event in events:
            await call.chunk(event)
        await call.end_stream()

    async def silent(call: Call) -> None:
        await call.until_left()

    served = await proxy.engine(0, in_turn(whole, holds_after(events[:left_after]) if left_after else silent))
    async with proxy.client.post(CHAT, data=asked) as response:
        await response.read()
    if left_after:
        await leave_after(proxy, left_after, CHAT, asked)
    else:
        waits = asyncio.ensure_future(proxy.client.post(CHAT, data=asked))
        await until(lambda: len(served.calls) == 2)
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
    await until(lambda: len(proxy.entries) == 2)
    first, second = proxy.entries
    assert (tokens(first), first.exact) == ((1024, 0, 10), True)
    assert (second.outcome, second.exact) == ("client_aborted", False)
    if told is None:
        assert second.cached_tokens == 0, "the whole response paid the full price, too"
    else:
        assert 0.8 * second.prompt_tokens < second.cached_tokens < second.prompt_tokens
    prices = token_prices("1", "1", "0.1")
    full = prices.amount(second.prompt_tokens, 0, second.output_tokens)
    paid = prices.amount(second.prompt_tokens, second.cached_tokens, second.output_tokens)
    assert (paid < 0.4 * full) is (told is not None)


@pytest.mark.parametrize("tools", [{}, {"tools": [{"type": "function"}]}])
async def test_without_token_ids_it_is_the_events(proxy: ProxyUnderTest, tools: dict[str, Any]) -> None:
    await proxy.engine(0, holds_after(ENGINE.answer(ENGINE.request())[:8]))
    await leave_after(proxy, 8, CHAT, ENGINE.request(**tools))
    entry = await ended(proxy)
    assert (entry.output_tokens, entry.exact) == (7, False)


async def test_messages_that_are_left_have_an_exact_prompt_only(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0, holds_after(MESSAGE[:7]))
    asked = json.dumps({"model": "m", "stream": True, "messages": [], "max_tokens": 99}).encode()
    await leave_after(proxy, 7, "/v1/messages", asked)
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact) == ((31, 0, 5), False)


async def test_a_client_that_leaves_before_its_response(proxy: ProxyUnderTest) -> None:
    async def answer(call: Call) -> None:
        await call.until_left()

    served = await proxy.engine(0, answer)
    asked = asyncio.ensure_future(proxy.client.post(CHAT, data=ENGINE.request()))
    await until(lambda: bool(served.calls))
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    entry = await ended(proxy)
    assert entry.prompt_tokens > 0
    assert (entry.output_tokens, entry.exact, entry.outcome) == (0, False, "client_aborted")


async def test_a_stream_that_breaks_for_good(proxy: ProxyUnderTest) -> None:
    """What its client got of it is entered."""

    async def answer(call: Call) -> None:
        await call.start_stream()
        for event in ENGINE.answer(ENGINE.request(return_token_ids=True))[:8]:
            await call.chunk(event)
        await call.chunk(ENGINE_ERROR)
        await call.end_stream()

    await proxy.engine(0, answer, token_ids=True)
    payload = await read(proxy, ENGINE, seed=7, temperature=1)
    assert b"error" in payload
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact, entry.outcome) == ((len(PROMPT), 0, 7), False, "failed")


async def test_attempts_that_delivered_nothing_cost_nothing(proxy: ProxyUnderTest) -> None:
    async def dies(call: Call) -> None:
        call.cut()

    script = in_turn(dies, says({"choices": [], "usage": CHAT_USAGE}))
    for slot in range(2):
        await proxy.engine(slot, script)
    async with proxy.client.post(CHAT, json={"model": "m", "messages": []}) as response:
        assert response.status == 200
    entry = await ended(proxy)
    assert (tokens(entry), entry.attempts, entry.exact) == ((31, 16, 9), 2, True)


@pytest.mark.parametrize(
    ("payload", "status", "outcome"),
    [
        ({"model": "another", "messages": []}, 404, "rejected"),
        ({"model": "m", "messages": []}, 502, "failed"),
    ],
)
async def test_a_request_that_was_not_served_takes_nothing(
    build: Build, payload: dict[str, Any], status: int, outcome: str
) -> None:
    proxy = await build(park_timeout_s=0.2)

    async def dies(call: Call) -> None:
        call.cut()

    await proxy.engine(0, dies)
    async with proxy.client.post(CHAT, json=payload) as response:
        assert response.status == status
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact, entry.outcome, entry.status) == ((0, 0, 0), True, outcome, status)


# --- overflow -------------------------------------------------------------------------------------


def endpoint_streams(*events: bytes) -> list[bytes]:
    """A cloud's script: a head, then these events, each in a read of its own."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return [head, *(b"%x\r\n%b\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]


NULL = [event.replace(b"}\n\n", b',"usage":null}\n\n') for event in TWO]
ASKED_OUTSIDE = {"model": "m", "stream": True, "messages": [], "n": 2, "max_tokens": 40}


@pytest.mark.parametrize("together", [False, True])
async def test_a_stream_of_an_overflow_endpoint(proxy_with: Make, cloud: Cloud, together: bool) -> None:
    """OpenAI's API writes null into each event but the last, where it is asked for usage."""
    told = [*NULL, LAST, DONE]
    cloud.script = endpoint_streams(*([b"".join(told)] if together else told))
    proxy = await proxy_with(input=2.0, output=10.0, cached=1.0)
    async with proxy.client.post(CHAT, json=ASKED_OUTSIDE) as response:
        assert await response.read() == b"".join([*NULL, DONE])
    ((_, _, body),) = cloud.got
    assert json.loads(body) == ASKED_OUTSIDE | USAGE | {"model": "big-model"}
    entry = await ended(proxy)
    assert (tokens(entry), entry.exact) == ((31, 16, 9), True)
    assert entry.picos == (15 * 2 + 16 * 1 + 9 * 10) * 10**6
    assert tokens(entry) == await metered(proxy)


async def test_an_overflow_endpoint_that_refuses_to_tell_usage(proxy_with: Make, cloud: Cloud) -> None:
    refused = b'{"error":{"message":"unknown field stream_options"}}'
    head = b"HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(refused)
    usual = endpoint_streams(*TWO, DONE)
    proxy = await proxy_with()

    def next_script() -> None:
        cloud.script = usual if cloud.got and b"stream_options" not in cloud.got[-1][2] else [head + refused]

    cloud.before = next_script
    for _ in range(2):
        async with proxy.client.post(CHAT, json=ASKED_OUTSIDE) as response:
            assert await response.read() == b"".join([*TWO, DONE])
    assert [b"stream_options" in body for _, _, body in cloud.got] == [True, False, False]
