"""Ready and busy seconds of slots."""

from __future__ import annotations

import asyncio

import pytest
from support.proxy_under_test import ProxyUnderTest, until
from support.scripted_engine import Call, answer_chat, event

from launcher.proxy.dispatch.traffic import Occupancy, Occupied


def test_seconds_are_summed_over_the_instances_of_a_slot() -> None:
    of = Occupancy()
    of.added((0, 1), 10.0)
    of.busy((0, 1), 11.0)
    assert of.read(13.0) == {0: Occupied(3.0, 2.0)}
    of.idle((0, 1), 14.0)
    assert of.read(15.0) == {0: Occupied(5.0, 3.0)}
    of.busy((0, 1), 16.0)
    of.removed((0, 1), 18.0)  # with a request on it
    of.idle((0, 1), 19.0)
    assert of.read(100.0) == {0: Occupied(8.0, 5.0)}
    of.added((0, 2), 100.0)
    of.added((1, 1), 100.0)
    of.added((0, 2), 101.0)  # a drain that was taken back
    assert of.read(102.0) == {0: Occupied(10.0, 5.0), 1: Occupied(2.0, 0.0)}


def test_a_request_that_leaves_after_its_instance_went_counts_for_nobody() -> None:
    of = Occupancy()
    of.idle((0, 1), 1.0)
    of.removed((0, 1), 1.0)
    assert of.read(2.0) == {}


async def test_a_slot_is_busy_while_a_request_is_on_it(proxy: ProxyUnderTest) -> None:
    go_on = asyncio.Event()

    async def waits(call: Call) -> None:
        if b'"waits"' not in call.body:
            await answer_chat(call)
            return
        await call.start_stream()
        await call.chunk(event("one"))
        await go_on.wait()
        call.cut()

    def busy_s(slot: int) -> float:
        return proxy.server.readings.occupancy()[slot].busy_s

    await proxy.engine(0, waits)
    assert busy_s(0) == 0.0
    async with proxy.chat(stream=True, user="waits", tools=[{"type": "function"}]) as answer:
        await answer.content.readuntil(b"\n\n")
        before = busy_s(0)
        await asyncio.sleep(0.05)
        assert busy_s(0) >= before + 0.04  # uvloop's clock counts milliseconds
        go_on.set()
        await answer.read()
    await until(lambda: not proxy.sums()["in_flight"])
    after = busy_s(0)
    await asyncio.sleep(0.02)
    assert busy_s(0) == after
    ready_s, last = proxy.server.readings.occupancy()[0]
    assert last == after < ready_s
    proxy.server.remove_upstream(0, 1, "signal 9")
    await proxy.engine(0, waits, generation=2)
    assert proxy.server.readings.occupancy()[0].ready_s == pytest.approx(ready_s, abs=0.5)
    assert proxy.server.readings.occupancy()[0].busy_s == after
