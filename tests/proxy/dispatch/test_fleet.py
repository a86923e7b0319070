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


async def lies(call: Call) -> None:
    """Health is another one's; of a completion nothing comes."""
    await call.until_left()


async def test_silence_is_told_once_whatever_the_requests_are(build: Build) -> None:
    """There is no sibling: nothing is ejected, and the requests stay."""
    house = await build(hung_timeout_s=0.1)
    await house.engine(0, lies)
    asked = [asyncio.create_task(read(house, stream=stream)) for stream in (False, True)]
    await until(lambda: bool(house.suspects))
    await asyncio.sleep(0.3)
    assert [suspect[:2] for suspect in house.suspects] == [(0, 1)]
    assert house.suspects[0][2].startswith("nothing has come of its 2 requests for ")
    assert house.door.silent(0, 1)
    assert not house.door.silent(0, 2)
    assert ejections(house, 0) == 0
    assert house.door.in_flight(0, 1) == 2
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await until(lambda: not house.door.silent(0, 1))


async def test_an_instance_that_answers_now_and_then_is_not_silent(build: Build) -> None:
    house = await build(hung_timeout_s=0.5)
    go = asyncio.Event()

    async def long(call: Call) -> None:
        if b'"slow"' in call.body:
            await go.wait()
        await answer_chat(call)

    await house.engine(0, long)
    slow = asyncio.create_task(read(house, user="slow"))
    await until(lambda: house.door.in_flight(0, 1) == 1)
    for _ in range(10):
        await read(house)
        await asyncio.sleep(0.1)
    assert house.suspects == []
    go.set()
    assert await slow


async def test_a_full_silent_instance_gives_one_request_to_a_sibling(build: Build) -> None:
    """So that the supervisor's question waits in no line; the others stay: their answers may only take long."""
    house = await build(hung_timeout_s=0.1, eject_s=60.0)
    await house.engine(0, lies)
    asked = [asyncio.create_task(read(house)) for _ in range(8)]
    await until(lambda: house.door.in_flight(0, 1) == 8)
    await house.engine(1)
    await until(lambda: house.door.in_flight(0, 1) == 7)
    assert house.door.silent(0, 1)
    done, rest = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    assert [bool(json.loads(task.result())["choices"]) for task in done] == [True]
    assert len(rest) == 7
    assert await read(house), "new ones go to the sibling"
    assert ejections(house, 0) == 1
    assert house.door.in_flight(0, 1) == 7
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_a_long_prompt_is_given_time(build: Build) -> None:
    house = await build(hung_timeout_s=0.05, first_token_timeout_per_1k_s=1000.0)
    await house.engine(0, lies)
    asked = asyncio.create_task(read(house, messages=[{"role": "user", "content": "word " * 4000}]))
    await until(lambda: house.door.in_flight(0, 1) == 1)
    await asyncio.sleep(0.3)
    assert house.suspects == []
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
