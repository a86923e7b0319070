"""An engine that says that it cannot do what a request asks for: the request is at fault, no instance is."""

from __future__ import annotations

import json

import pytest
from support.proxy_under_test import ProxyUnderTest
from support.scripted_engine import DONE, Call, Script

ERROR = {"error": {"message": "no audio output", "type": "NotImplementedError", "param": None, "code": 501}}


def answers(status: int) -> Script:
    async def answer(call: Call) -> None:
        await call.json(ERROR, status)

    return answer


async def streams(call: Call) -> None:
    await call.start_stream()
    await call.chunk(b"data: " + json.dumps(ERROR).encode() + b"\n\n")
    await call.chunk(DONE)
    await call.end_stream()


def untouched(proxy: ProxyUnderTest) -> bool:
    slots = proxy.server.counters.slots
    return proxy.suspects == [] and not any(slots[slot].ejected or slots[slot].broken for slot in (0, 1))


@pytest.mark.parametrize("status", [501, 505])
async def test_it_is_answered_as_the_engine_says_and_nobody_is_blamed(
    proxy: ProxyUnderTest, status: int
) -> None:
    engines = [await proxy.engine(slot, answers(status)) for slot in range(2)]
    for _ in range(8):
        async with proxy.chat() as got:
            assert got.status == status
            assert got.headers["x-should-retry"] == "false"
            assert (await got.json())["error"]["message"] == "no audio output"
    assert sum(len(engine.calls) for engine in engines) == 8
    assert untouched(proxy)
    for engine in engines:  # others go on there
        engine.script = answers(200)
    async with proxy.chat() as got:
        assert got.status == 200
    sums = proxy.sums()
    assert (sums["refused"], sums["completed"]) == (8, 1)


async def test_it_may_say_so_in_a_stream(proxy: ProxyUnderTest) -> None:
    engines = [await proxy.engine(slot, streams) for slot in range(2)]
    for _ in range(8):
        async with proxy.chat(stream=True) as got:
            assert json.loads((await got.read()).removeprefix(b"data: ")) == ERROR
    assert sum(len(engine.calls) for engine in engines) == 8
    assert untouched(proxy)


async def test_a_500_is_still_a_failure(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0, answers(500))
    await proxy.engine(1)
    for _ in range(8):
        async with proxy.chat() as got:
            assert got.status == 200
    assert proxy.suspects != []
