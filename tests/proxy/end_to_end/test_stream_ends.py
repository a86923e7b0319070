"""Streams of every route that has them: the whole stream, one that was cut before its end, one that its engine gave up.

The events are those of vLLM 0.32 and 0.33, shortened.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import aiohttp
import pytest
from support.fakes import SOON_S
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, Script

MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
COHERE = "/cohere/v2/chat"
GENERATE = "/inference/v1/generate"
AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")
USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


def data(payload: object) -> bytes:
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def named(payload: dict[str, object]) -> bytes:
    return f"event: {payload['type']}\n".encode() + data(payload)


def choice(**more: object) -> bytes:
    return data({"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [5], "text": "a", **more}]})


def message(type_: str, **more: object) -> bytes:
    return named({"type": type_, **more})


def response(type_: str, **more: object) -> bytes:
    status = type_.removeprefix("response.")
    usage = {"input_tokens": 9, "output_tokens": 5, "total_tokens": 14}
    return named({"type": type_, "response": {"id": "resp_1", "status": status, "usage": usage, **more}})


def cohere_end(reason: str, **more: object) -> bytes:
    counts = {"input_tokens": 9.0, "output_tokens": 5.0}
    usage = {"billed_units": counts, "tokens": counts}
    return data(
        {"id": "c", "type": "message-end", "delta": {"finish_reason": reason, "usage": usage, **more}}
    )


BEGUN = message(
    "message_start", message={"stop_reason": None, "usage": {"input_tokens": 9, "output_tokens": 0}}
)
BLOCK = message("content_block_delta", index=0, delta={"type": "text_delta", "text": "message_stop"})
STOPPED = message(
    "message_delta", delta={"stop_reason": "end_turn"}, usage={"input_tokens": 9, "output_tokens": 5}
)
GIVEN_UP = message(
    "message_delta", delta={"stop_reason": None}, usage={"input_tokens": 9, "output_tokens": 2}
)
CREATED = response("response.created", usage=None)
DELTA = named({"type": "response.output_text.delta", "delta": "response.completed"})
COHERE_BEGUN = data({"id": "c", "type": "message-start", "delta": {"message": {"role": "assistant"}}})
COHERE_TEXT = data({"type": "content-delta", "delta": {"message": {"content": {"text": "message-end"}}}})
ASKED = data({"choices": [], "usage": USAGE})


@dataclass(frozen=True)
class Told:
    """A route, what an engine says before the end of a stream, and the end."""

    path: str
    before: tuple[bytes, ...]
    end: tuple[bytes, ...]
    asked: bytes = b""  # the usage that the proxy asked for, before the last event

    @property
    def form(self) -> bool:
        return self.path in AUDIO


def _audio(path: str) -> Told:
    return Told(path, (choice(), choice(), choice(finish_reason="stop")), (DONE,), ASKED)


STREAMS = (
    Told(MESSAGES, (BEGUN, BLOCK, BLOCK), (STOPPED, message("message_stop"))),
    Told(RESPONSES, (CREATED, DELTA, DELTA), (response("response.completed"),)),
    Told(RESPONSES, (CREATED, DELTA, DELTA), (response("response.incomplete"),)),
    Told(COHERE, (COHERE_BEGUN, COHERE_TEXT), (cohere_end("COMPLETE"), DONE)),
    Told(GENERATE, (choice(), choice(), choice(finish_reason="stop")), (DONE,), ASKED),
    *map(_audio, AUDIO),
)
named_streams = pytest.mark.parametrize(
    "told", STREAMS, ids=lambda told: f"{told.path}-{told.end[0][7:25]!r}"
)


def engine_of(events: Iterable[bytes], *, one_read: bool = False) -> Script:
    async def answer(call: Call) -> None:
        await call.start_stream()
        if one_read:
            await call.chunk(b"".join(events))
        else:
            for event in events:
                await call.chunk(event)
                await asyncio.sleep(0)
        await call.end_stream()

    return answer


def request_of(told: Told) -> dict[str, object]:
    if told.form:
        form = aiohttp.FormData()
        form.add_field("model", "m")
        form.add_field("stream", "True")
        form.add_field("file", b"RIFF", filename="a.wav", content_type="audio/wav")
        return {"data": form}
    body = {"model": "m", "stream": True, "messages": [], "input": "x", "prompt": "x", "token_ids": [1, 2]}
    return {"data": json.dumps(body)}


async def ask(proxy: ProxyUnderTest, told: Told) -> bytes:
    async with asyncio.timeout(SOON_S), proxy.client.post(told.path, **request_of(told)) as got:  # type: ignore[arg-type]
        assert got.status == 200
        return await got.read()


@named_streams
@pytest.mark.parametrize("one_read", [False, True])
async def test_a_whole_stream_is_whole_and_its_tokens_are_counted(
    proxy: ProxyUnderTest, told: Told, *, one_read: bool
) -> None:
    events = (*told.before, *told.end[:-1], told.asked, told.end[-1])
    engine = await proxy.engine(0, engine_of(filter(None, events), one_read=one_read))
    assert await ask(proxy, told) == b"".join((*told.before, *told.end))
    await until(lambda: bool(proxy.entries))
    (entry,) = proxy.entries
    assert (entry.outcome, entry.streamed, entry.exact) == ("completed", True, True)
    assert (entry.prompt_tokens, entry.output_tokens) == (9, 5)
    (call,) = engine.calls
    assert (b"include_usage" in call.body) == bool(told.asked)


@named_streams
async def test_a_stream_without_its_end_is_broken_off(proxy: ProxyUnderTest, told: Told) -> None:
    engine = await proxy.engine(0)
    events = (*told.before, *told.end)
    # An answer that has told why it ends needs no [DONE], message_stop or the like.
    whole = 0 if told.path == RESPONSES else 1
    for cut in range(2, len(events) - whole):  # the first one may be none that brings output
        engine.script = engine_of(events[:cut])
        got = await ask(proxy, told)
        passed = b"".join(told.before[:cut])
        assert got.startswith(passed), cut
        assert b"error" in got.removeprefix(passed).lower(), cut
        assert DONE not in got
        await until(lambda at=cut: len(proxy.entries) == at - 1)  # type: ignore[misc]
        assert proxy.entries[-1].outcome == "failed", cut


@pytest.mark.parametrize(
    ("told", "added"),
    [
        (Told(MESSAGES, (BEGUN, BLOCK), (STOPPED,)), message("message_stop")),
        (Told(COHERE, (COHERE_BEGUN, COHERE_TEXT), (cohere_end("COMPLETE"),)), b""),
    ],
    ids=["messages", "cohere"],
)
async def test_an_answer_that_has_told_why_it_ends_is_whole(
    proxy: ProxyUnderTest, told: Told, added: bytes
) -> None:
    """Cohere's own API has no [DONE]; servers that translate leave message_stop out."""
    events = (*told.before, *told.end)
    await proxy.engine(0, engine_of(events))
    for count in range(1, 5):  # no instance is ejected for it
        assert await ask(proxy, told) == b"".join(events) + added
        await until(lambda n=count: len(proxy.entries) == n)  # type: ignore[misc]
    assert {entry.outcome for entry in proxy.entries} == {"completed"}


@pytest.mark.parametrize(
    "told",
    [Told(RESPONSES, (CREATED, DELTA), (DONE,)), Told(MESSAGES, (BEGUN, BLOCK), (DONE,))],
    ids=["responses", "messages"],
)
async def test_no_done_passes_before_the_end_of_another_api(proxy: ProxyUnderTest, told: Told) -> None:
    """OpenAI's SDK reads nothing behind it: it would take half of the answer for a whole one."""
    await proxy.engine(0, engine_of((*told.before, *told.end)))
    got = await ask(proxy, told)
    assert got.startswith(b"".join(told.before))
    assert DONE not in got
    assert b"error" in got
    if told.path == RESPONSES:
        assert b'"sequence_number":2' in got.rpartition(b"event: response.failed")[2]


REFUSALS = (
    {"error": {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"}},
    {"error": {"message": "too long", "type": "BadRequestError"}},
    {"error": {"message": "too long", "type": "Bad Request", "code": None}},
    {"error": {"message": "too long", "code": "invalid_image_url"}},
    {"error": "too long", "error_type": "validation"},
    {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400},
    {"type": "error", "error": {"type": "BadRequestError", "message": "too long"}},
    {"type": "error", "code": "invalid_prompt", "message": "too long", "param": None, "sequence_number": 1},
    {"type": "response.failed", "response": {"error": {"code": "invalid_prompt", "message": "too long"}}},
)


@pytest.mark.parametrize("path", ["/v1/chat/completions", RESPONSES, MESSAGES])
@pytest.mark.parametrize("said", REFUSALS, ids=lambda said: json.dumps(said)[:60])
async def test_a_refusal_in_a_stream_is_told_once_whatever_its_words(
    proxy: ProxyUnderTest, said: dict[str, object], path: str
) -> None:
    """By its type or its code, where it has no status: no instance is asked again, and no client asks again."""
    names = {"error", "response.failed"}
    event = named(said) if said.get("type") in names else data(said)
    engines = [await proxy.engine(slot, engine_of((event,))) for slot in range(2)]
    got = await ask(proxy, Told(path, (), ()))
    assert sum(len(engine.calls) for engine in engines) == 1
    assert got.count(b"too long") == 1
    told = json.loads(got.rpartition(b"data: ")[2])
    match path:
        case "/v1/messages":
            assert told == {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": "too long"},
            }
        case "/v1/responses":
            assert told["response"]["error"]["code"] in {"invalid_prompt", "context_length_exceeded"}
        case _:
            assert told["error"]["message"] == "too long"
    await until(lambda: proxy.sums()["refused"] == 1)


def stopped(reason: object) -> bytes:
    return message("message_delta", delta={"stop_reason": reason}, usage={"output_tokens": 2})


GIVEN = (
    Told(MESSAGES, (BEGUN, BLOCK), (GIVEN_UP, message("message_stop"))),
    *(Told(MESSAGES, (BEGUN, BLOCK), (stopped(it), message("message_stop"))) for it in ("", "null", 7)),
    *(
        Told(RESPONSES, (CREATED, DELTA), (response("response.completed", status=it),))
        for it in ("", "null", None, "in_progress")
    ),
    *(Told(COHERE, (COHERE_BEGUN, COHERE_TEXT), (cohere_end(it), DONE)) for it in ("", "null", "TIMEOUT")),
    Told(GENERATE, (choice(), choice()), (choice(finish_reason="error"), DONE)),
    Told(RESPONSES, (CREATED, DELTA), (response("response.completed", status="cancelled"),)),
    Told(
        COHERE,
        (COHERE_BEGUN, COHERE_TEXT),
        (cohere_end("ERROR", error="EngineCore encountered an issue"), DONE),
    ),
    Told(COHERE, (COHERE_BEGUN, COHERE_TEXT), (DONE,)),
    Told(GENERATE, (choice(), choice()), (choice(finish_reason="abort"), DONE)),
)


@pytest.mark.parametrize("told", GIVEN, ids=lambda told: f"{told.path}-{told.end[0][7:25]!r}")
@pytest.mark.parametrize("one_read", [False, True])
async def test_a_stream_that_its_engine_gave_up_is_broken_off(
    proxy: ProxyUnderTest, told: Told, *, one_read: bool
) -> None:
    await proxy.engine(0, engine_of((*told.before, *told.end), one_read=one_read))
    got = await ask(proxy, told)
    if not one_read:
        assert got.startswith(b"".join(told.before))
    assert told.end[0] not in got
    assert b"[DONE]" not in got
    assert b"message_stop\n" not in got
    assert b"error" in got.lower()
    await until(lambda: bool(proxy.entries))
    assert proxy.entries[0].outcome == "failed"


async def test_an_error_beside_other_fields_ends_a_stream(proxy: ProxyUnderTest) -> None:
    """As routers in front of engines write it."""
    failed = data({"id": "a", "choices": [], "error": {"message": "overloaded", "code": 502}})
    told = Told(GENERATE, (choice(), choice()), (failed, DONE))
    await proxy.engine(0, engine_of((*told.before, *told.end)))
    assert await ask(proxy, told) == b"".join(told.before) + failed
    await until(lambda: bool(proxy.entries))
    assert proxy.entries[0].outcome == "failed"


async def test_the_end_of_a_cohere_stream_that_broke_off_is_one_that_its_clients_know(
    proxy: ProxyUnderTest,
) -> None:
    told = Told(COHERE, (COHERE_BEGUN, COHERE_TEXT), ())
    await proxy.engine(0, engine_of(told.before))
    got = await ask(proxy, told)
    last = json.loads(got.rpartition(b"data: ")[2])
    assert (last["type"], last["delta"]["finish_reason"]) == ("message-end", "ERROR")


@pytest.mark.parametrize(
    ("path", "bad", "good"),
    [
        (
            MESSAGES,
            {"type": "message", "content": [], "usage": {"input_tokens": 3, "output_tokens": 0}},
            {"type": "message", "content": [], "stop_reason": "end_turn", "usage": {"input_tokens": 3, "output_tokens": 1}},
        ),
        *(
            (MESSAGES, {"type": "message", "stop_reason": unset}, {"type": "message", "stop_reason": "end_turn"})
            for unset in ("", "null", 7)
        ),
        (RESPONSES, {"id": "resp_1", "status": ""}, {"id": "resp_1", "status": "queued"}),
        (COHERE, {"id": "c", "finish_reason": "null"}, {"id": "c", "finish_reason": "MAX_TOKENS"}),
        (RESPONSES, {"id": "resp_1", "status": "cancelled"}, {"id": "resp_1", "status": "completed"}),
        (
            RESPONSES,
            {"id": "resp_1", "status": "failed"},
            {"id": "resp_1", "status": "incomplete", "metadata": {"status": "cancelled"}},
        ),
        (COHERE, {"id": "c", "finish_reason": "ERROR"}, {"id": "c", "finish_reason": "COMPLETE"}),
    ],
)  # fmt: skip
async def test_a_whole_response_that_its_engine_gave_up_is_asked_for_again(
    proxy: ProxyUnderTest, path: str, bad: dict[str, object], good: dict[str, object]
) -> None:
    said = [bad, good]

    async def answer(call: Call) -> None:
        await call.json(said.pop(0))

    engine = await proxy.engine(0, answer)
    await proxy.engine(1, answer)
    async with proxy.client.post(path, data=json.dumps({"model": "m", "messages": [], "input": "x"})) as got:
        assert (got.status, await got.json()) == (200, good)
    assert len(engine.calls) <= 1


async def test_a_client_that_leaves_at_the_end_has_all_of_it(proxy: ProxyUnderTest) -> None:
    told = STREAMS[0]
    release = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"".join((*told.before, *told.end)))
        await release.wait()

    await proxy.engine(0, answer)
    async with proxy.client.post(told.path, **request_of(told)) as got:  # type: ignore[arg-type]
        seen = b""
        while b"event: message_stop" not in seen:
            seen += await got.content.readany()
        got.close()
    await until(lambda: bool(proxy.entries))
    release.set()
    assert proxy.entries[0].outcome == "completed"


async def test_an_audio_stream_that_waits_gets_comments(build: Build) -> None:
    """As any stream does: its head goes out before an instance is free."""
    proxy = await build(keepalive_comment_s=0.05)
    release = asyncio.Event()

    async def slow(call: Call) -> None:
        await release.wait()
        await engine_of((choice(), DONE))(call)

    await proxy.engine(0, slow)
    told = _audio(AUDIO[0])
    async with asyncio.timeout(SOON_S), proxy.client.post(told.path, **request_of(told)) as got:  # type: ignore[arg-type]
        assert (await got.content.readline()).startswith(b":")
        release.set()
        assert (await got.read()).endswith(choice() + DONE)


@pytest.mark.parametrize("value", ["0", "false", "no", "", "2"])
async def test_an_audio_request_that_asks_for_no_stream_is_none(proxy: ProxyUnderTest, value: str) -> None:
    async def answer(call: Call) -> None:
        await call.json({"text": "hello", "usage": {"type": "duration", "seconds": 3}})

    engine = await proxy.engine(0, answer)
    form = aiohttp.FormData({"model": "m", "stream": value, "x": "y"})
    form.add_field("file", b"RIFF", filename="a.wav")
    async with proxy.client.post(AUDIO[0], data=form) as got:
        assert (await got.json())["text"] == "hello"
    assert b"include_usage" not in engine.calls[0].body


async def test_an_audio_client_that_asks_for_the_usage_gets_it(proxy: ProxyUnderTest) -> None:
    engine = await proxy.engine(0, engine_of((choice(), ASKED, DONE)))
    form = aiohttp.FormData({"model": "m", "stream": "1", "stream_include_usage": "true"})
    form.add_field("file", b"RIFF", filename="a.wav")
    async with proxy.client.post(AUDIO[0], data=form) as got:
        assert await got.read() == choice() + ASKED + DONE
    assert engine.calls[0].body.count(b"include_usage") == 1


# --- Engines that end their streams without [DONE]. ---

CALLED = {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}
TOOLS: dict[str, object] = {"tools": [{"type": "function", "function": {"name": "f"}}]}
SAID: dict[str, dict[str, object]] = {
    "text": {"delta": {"content": "a"}},
    "tool call": {"delta": CALLED},
    "reasoning": {"delta": {"reasoning": "a"}},
    "logprobs": {"logprobs": {"content": [{"token": "a", "logprob": -1.0}]}},
}


def unended(said: dict[str, object], reasons: Iterable[object], *, spaced: bool = False) -> list[bytes]:
    """Of as many choices as there are reasons; a list: one for each event."""
    told = list(enumerate(reasons))
    end = "stop" if "content" in str(said) else "tool_calls"
    last = [choice(index=n, delta={}, finish_reason=end if reason == "set" else reason) for n, reason in told]
    before = [choice(index=n, **said, finish_reason=None) for _ in range(8) for n, _ in told]
    events = [choice(index=n, delta={"role": "assistant", "content": ""}) for n, _ in told] + before + last
    return (
        [event.replace(b":", b": ").replace(b"data:  ", b"data: ") for event in events] if spaced else events
    )


async def chat(proxy: ProxyUnderTest, choices: int, **more: object) -> bytes:
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True, n=choices, **more) as got:
        return await got.read()


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("spaced", [False, True])
async def test_an_answer_whose_choices_have_all_ended_needs_no_done(
    proxy: ProxyUnderTest, said: str, choices: int, *, spaced: bool
) -> None:
    events = unended(SAID[said], ["set"] * choices, spaced=spaced)
    await proxy.engine(0, engine_of(events))
    await proxy.engine(1, engine_of(events))
    for _ in range(4):
        assert await chat(proxy, choices, **TOOLS) == b"".join(events) + DONE
    assert proxy.sums()["completed"] == 4
    assert proxy.suspects == []
    assert [proxy.server.counters.slots[slot].ejected for slot in range(2)] == [0, 0]


async def test_the_last_event_of_an_answer_needs_no_blank_line(proxy: ProxyUnderTest) -> None:
    events = unended(SAID["tool call"], ["set"])
    await proxy.engine(0, engine_of([*events[:-1], events[-1].removesuffix(b"\n\n")]))
    assert await chat(proxy, 1, **TOOLS) == b"".join(events) + DONE


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize(
    "reasons",
    [[None], [""], ["null"], ["abort"], ["error"], [7], ["set", None], ["", "set"], ["set", "null"]],
)
async def test_an_answer_with_a_choice_that_has_not_ended_is_not_complete(
    proxy: ProxyUnderTest, said: str, reasons: list[object]
) -> None:
    await proxy.engine(0, engine_of(unended(SAID[said], reasons)))
    got = await chat(proxy, len(reasons), **TOOLS)
    assert b'"error"' in got
    assert DONE not in got
    assert proxy.sums()["failed"] == 1


async def test_each_prompt_of_a_list_has_a_choice(proxy: ProxyUnderTest) -> None:
    events = [choice(index=0, finish_reason="stop")]
    await proxy.engine(0, engine_of(events))
    for prompts, whole in ((["x"], True), (["x", "y"], False)):
        body = json.dumps({"model": "m", "stream": True, "prompt": prompts, "logprobs": 1})
        async with asyncio.timeout(SOON_S), proxy.client.post("/v1/completions", data=body) as got:
            assert (DONE in await got.read()) is whole


async def test_a_body_that_breaks_off_is_not_complete(proxy: ProxyUnderTest) -> None:
    """Without HTTP's end nobody knows what else would have come."""
    events = unended(SAID["tool call"], ["set"])

    async def cut(call: Call) -> None:
        await call.start_stream()
        for event in events:
            await call.chunk(event)
        await asyncio.sleep(0.01)
        call.cut()

    await proxy.engine(0, cut)
    got = await chat(proxy, 1, **TOOLS)
    assert b'"error"' in got
    assert DONE not in got


# --- Events before the first that brings output. ---

PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def response_begun(id_: str) -> tuple[bytes, ...]:
    created = response("response.created", id=id_, output=[], usage=None)
    item = {"id": "i" + id_, "type": "message", "content": []}
    return created, PING, named({"type": "response.output_item.added", "item": item})


def message_begun(id_: str) -> tuple[bytes, ...]:
    begun = message("message_start", message={"id": id_, "content": [], "stop_reason": None})
    block = message("content_block_start", index=0, content_block={"type": "text", "text": ""})
    return begun, PING, block


def choice_begun(id_: str) -> tuple[bytes, ...]:
    delta = {"role": "assistant", "content": ""}
    return b": ping\n\n", data({"id": id_, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})


def cohere_begun(id_: str) -> tuple[bytes, ...]:
    return (data({"id": id_, "type": "message-start", "delta": {"message": {"role": "assistant"}}}),)


@dataclass(frozen=True)
class Begun:
    path: str
    begin: Callable[[str], tuple[bytes, ...]]
    rest: tuple[bytes, ...]

    @property
    def told(self) -> Told:
        return Told(self.path, (), ())


BEGUN_STREAMS = (
    Begun("/v1/chat/completions", choice_begun, (choice(), choice(finish_reason="stop"), DONE)),
    Begun(MESSAGES, message_begun, (BLOCK, STOPPED, message("message_stop"))),
    Begun(RESPONSES, response_begun, (DELTA, response("response.completed", id="resp_b"))),
    Begun(COHERE, cohere_begun, (COHERE_TEXT, cohere_end("COMPLETE"), DONE)),
)
begun_streams = pytest.mark.parametrize("of", BEGUN_STREAMS, ids=lambda of: of.path)


@begun_streams
@pytest.mark.parametrize("then", ["dies", "ends", "pings", "fails"])
async def test_until_the_first_output_another_instance_may_answer(build: Build, of: Begun, then: str) -> None:
    """The client reads one answer with one id."""
    proxy = await build(first_token_timeout_s=0.3, first_token_timeout_per_1k_s=0.0)
    go = asyncio.Event()

    async def begins(call: Call) -> None:
        await call.start_stream()
        for event in of.begin("resp_a"):
            await call.chunk(event)
        while then == "pings" and not call.left.is_set():
            await call.chunk(PING)
            await asyncio.sleep(0.02)
        await go.wait()
        if then == "fails":
            await call.chunk(b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n')
        if then == "dies":
            call.cut()
        else:
            await call.end_stream()

    first = await proxy.engine(0, begins)
    asked = asyncio.create_task(ask(proxy, of.told))
    await until(lambda: len(first.calls) == 1)
    await proxy.engine(1, engine_of((*of.begin("resp_b"), *of.rest)))
    go.set()
    got = await asked
    told = [event for event in (*of.begin("resp_b"), *of.rest) if not event.startswith((b":", PING))]
    assert got.replace(PING, b"") == b"".join(told)
    assert proxy.server.readings.stats()["retried"] >= 1
    assert proxy.sums()["completed"] == 1


@begun_streams
async def test_a_first_token_is_the_first_output(proxy: ProxyUnderTest, of: Begun) -> None:
    go = asyncio.Event()

    async def waits(call: Call) -> None:
        await call.start_stream()
        for event in of.begin("resp_b"):
            await call.chunk(event)
        await go.wait()
        await call.chunk(of.rest[0])
        await call.until_left()

    engine = await proxy.engine(0, waits)
    asked = asyncio.create_task(ask(proxy, of.told))
    await until(lambda: bool(engine.calls) and proxy.server.progress(0, 1) > 1)
    await asyncio.sleep(0.02)
    assert proxy.server.readings.first_token() is None
    go.set()
    await until(lambda: proxy.server.readings.first_token() is not None)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize("of", BEGUN_STREAMS[1:3], ids=lambda of: of.path)
async def test_pings_within_an_answer_are_no_progress(build: Build, of: Begun) -> None:
    proxy = await build(idle_timeout_s=0.5)

    async def pings(call: Call) -> None:
        await call.start_stream()
        for event in (*of.begin("resp_b"), of.rest[0], of.rest[0]):
            await call.chunk(event)
        while not call.left.is_set():
            await call.chunk(PING)
            await asyncio.sleep(0.02)

    await proxy.engine(0, pings)
    assert b"no further byte within 0.5 s" in await ask(proxy, of.told)
