"""A stream that is cut goes on elsewhere, whatever the instances asked for the rest do."""

from __future__ import annotations

import json

import pytest
from support.continuations import ENGINE, SAID, Way, streams
from support.plain_engine import CHAT, QUESTION, PlainEngine
from support.proxy_under_test import ProxyUnderTest
from support.scripted_engine import ENGINE_ERROR, Call

OTHER = PlainEngine(CHAT, (*SAID[:4], " no", " more"), "other")


def refuses(status: int) -> Way:
    async def refuse(call: Call) -> None:
        await call.json({"error": {"message": "no", "type": "x", "code": status}}, status)

    return refuse


async def fails(call: Call) -> None:
    await call.start_stream()
    await call.chunk(ENGINE_ERROR)
    await call.end_stream()


async def outcome(proxy: ProxyUnderTest, *ways: Way, **more: object) -> tuple[str, bytes, list[bytes]]:
    """Text and whole payload of one streamed chat, while the instances do this, in this order; their requests."""
    left = list(ways)
    bodies: list[bytes] = []

    async def script(call: Call) -> None:
        bodies.append(call.body)
        await left.pop(0)(call)

    for slot in range(4):
        await proxy.engine(slot, script)
    asked = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0} | more
    async with proxy.chat(stream=True, **asked) as answer:
        whole = await answer.read()
    chunks = [json.loads(event[6:]) for event in whole.split(b"\n\n") if event.startswith(b"data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk.get("choices", ())]
    assert not left
    assert proxy.balanced()
    return "".join(delta.get("content") or "" for delta in deltas), whole, bodies


@pytest.mark.parametrize("between", [refuses(500), refuses(503), Call.cut_now, fails, streams(ENGINE, 4)])
async def test_it_goes_on_after_more_failures(proxy: ProxyUnderTest, between: Way) -> None:
    text, whole, bodies = await outcome(proxy, streams(ENGINE, 11), between, streams(ENGINE))
    assert text == "".join(SAID)
    assert whole.endswith(b"data: [DONE]\n\n")
    assert b'"error"' not in whole
    assert b'"continue_final_message":true' in bodies[-1]
    assert proxy.sums()["completed"] == 1


@pytest.mark.parametrize("between", [refuses(400), streams(OTHER)])
async def test_it_begins_again_where_the_rest_can_not_be_had(proxy: ProxyUnderTest, between: Way) -> None:
    text, whole, bodies = await outcome(proxy, streams(ENGINE, 11), between, streams(ENGINE))
    assert text == "".join(SAID)
    assert whole.endswith(b"data: [DONE]\n\n")
    assert json.loads(bodies[-1]) == json.loads(bodies[0])


async def all_but_done(call: Call) -> None:
    await call.start_stream()
    for event in ENGINE.answer(call.body)[:-1]:
        await call.chunk(event)
    call.cut()


async def test_a_stream_that_is_cut_twice_is_counted_once(proxy: ProxyUnderTest) -> None:
    text, whole, _ = await outcome(proxy, streams(ENGINE, 11), all_but_done)
    assert (text, whole.endswith(b"data: [DONE]\n\n")) == ("".join(SAID), True)
    assert proxy.server.counters.cut.total() == 1


async def test_it_ends_honestly_when_the_answer_is_not_repeated(proxy: ProxyUnderTest) -> None:
    text, whole, _ = await outcome(proxy, streams(ENGINE, 5), streams(PlainEngine(CHAT, ("Another", "."))))
    assert text == "Hello world and"
    assert b"[DONE]" not in whole
    assert whole.count(b'"error"') == 1
    assert proxy.sums()["failed"] == 1


async def test_it_ends_honestly_when_it_can_not_be_exact(
    proxy: ProxyUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "launcher.access")
    text, whole, bodies = await outcome(proxy, streams(ENGINE, 11), logit_bias={}, logprobs=True)
    assert text == "Hello world and all the rest of it!"
    assert b"[DONE]" not in whole
    assert whole.count(b'"error"') == 1
    assert len(bodies) == 1
    (record,) = [record for record in caplog.records if record.name == "launcher.access"]
    assert "not continued: " in record.__dict__["reason"]
