"""What is kept of an instance: whose requests are on it, and what is said of it once, however many they are."""

from __future__ import annotations

import asyncio
import json

import pytest
from fakes import SOON_S
from proxy.front_house import Build, House, until
from proxy.scripted_engine import Call, answer_chat, event


async def read(house: House, **more: object) -> bytes:
    async with house.chat(**more) as answer:  # type: ignore[arg-type]
        return await answer.read()


async def hangs(call: Call) -> None:
    if b'"slow"' not in call.body:
        await answer_chat(call)
        return
    await call.start_stream()
    await call.chunk(event("one"))
    await call.until_left()


async def flows(call: Call) -> None:
    await call.start_stream()
    while not call.left.is_set():
        await call.chunk(event("x"))
        await asyncio.sleep(0.02)


def ejections(house: House, slot: int) -> int:
    return house.door.desk.tally.slots[slot].ejected


async def test_an_instance_that_comes_again_under_its_name_is_another_one(house: House) -> None:
    """Attempts that leave the old one take nothing off the new one."""
    engine = await house.engine(0, hangs)
    async with house.chat(stream=True, user="slow", tools=[{"type": "function"}]) as answer:
        await answer.content.readuntil(b"\n\n")
        assert house.door.in_flight(0, 1) == 1
        house.door.remove_upstream(0, 1, "signal 9")
        house.door.add_upstream(0, 1, "m", engine.address, 8)
        assert house.door.in_flight(0, 1) == house.door.progress(0, 1) == 0
        assert b"signal 9" in await answer.content.read()
    assert house.door.in_flight(0, 1) == house.door.progress(0, 1) == 0
    assert await read(house)
    assert house.door.in_flight(0, 1) == 0
    assert house.door.progress(0, 1) > 0
    assert house.idle == []
    assert house.balanced()


async def test_instances_that_end_after_the_door_was_closed_are_let_go(house: House) -> None:
    """As at the daemon's end: first the front door, then the instances."""
    await house.engine(0)
    assert await read(house)
    await house.door.stop(0.0)
    house.door.remove_upstream(0, 1, "stopped")
    assert house.door.in_flight(0, 1) == 0


async def test_that_an_instance_hangs_is_said_once(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    house = await build(hung_timeout_s=0.8)
    await house.engine(0, hangs)

    def ask() -> asyncio.Task[bytes]:
        return asyncio.create_task(read(house, stream=True, user="slow", tools=[1]))

    asked = [ask() for _ in range(6)]
    await until(lambda: house.door.in_flight(0, 1) == 6)
    await house.engine(1, flows)
    while house.door.in_flight(1, 1) == 0:  # one that flows beside them
        asked.append(ask())
        await asyncio.sleep(0.01)
    await until(lambda: house.door.in_flight(0, 1) == 0)
    await asyncio.sleep(0.2)  # some ticks more
    assert [suspect[:2] for suspect in house.suspects if "it hangs" in suspect[2]] == [(0, 1)]
    assert ejections(house, 0) == 1
    assert len([record for record in caplog.records if "ejected" in record.getMessage()]) == 1
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_an_instance_whose_clients_do_not_read_owes_nothing(house: House) -> None:
    """It has done its work; to stand still with such requests on it is no hang."""

    async def pours(call: Call) -> None:
        await call.start_stream()
        while not call.left.is_set():
            await call.chunk(event("x" * 60_000))

    await house.engine(0, pours)
    body = b'{"model":"m","stream":true}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, _ = await house.raw(head.encode() + body)
    await until(lambda: house.door.in_flight(0, 1) == 1 and house.door.awaited(0, 1) == 0)
    await reader.readuntil(b"\r\n\r\n")
    taken = 0
    async with asyncio.timeout(SOON_S):
        while not house.door.awaited(0, 1):  # until it reads
            taken += len(await reader.read(1 << 20))
    assert taken > 60_000


async def test_that_failures_ejected_an_instance_is_said_once(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    """Eight requests are on it when it breaks: three failures take it out, five more are no news."""
    go = asyncio.Event()

    async def breaks(call: Call) -> None:
        await go.wait()
        call.cut()

    engine = await house.engine(0, breaks)
    asked = [asyncio.create_task(read(house)) for _ in range(8)]
    await until(lambda: len(engine.calls) == 8)
    await house.engine(1)
    go.set()
    async with asyncio.timeout(SOON_S):
        assert all(json.loads(body)["choices"] for body in await asyncio.gather(*asked))
    await until(lambda: bool([r for r in caplog.records if "ejected" in r.getMessage()]))
    assert len([record for record in caplog.records if "ejected" in record.getMessage()]) == 1
    assert ejections(house, 0) == 1
    assert [suspect[:2] for suspect in house.suspects] == [(0, 1)] * 3
    assert house.balanced()
