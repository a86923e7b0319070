"""The front door: routes, models, drain, generations, limits, sums, stop."""

from __future__ import annotations

import asyncio
import json
import logging
import random

import aiohttp
import pytest
from fakes import SOON_S
from proxy.front_house import Build, House, until
from proxy.scripted_engine import Call, Script, answer_chat, event

from launcher.config.schema import Policy


async def test_a_plain_answer_passes(house: House) -> None:
    engine = await house.engine(0)
    async with house.chat() as answer:
        assert answer.status == 200
        assert (await answer.json())["id"] == "x"
        assert answer.headers["X-Request-Id"] == engine.calls[0].header("x-request-id")
    assert house.sums()["completed"] == 1


# --- routes and models -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["/sleep", "/v1/%2e%2e/sleep", "/v1/../sleep", "/v1//load_lora_adapter", "/v1/load_lora_adapter", "/V1/models",
     "/collective_rpc", "/v1/chat/completions/", "/v1/models/../../sleep", "//sleep", "/%73leep"],
)  # fmt: skip
async def test_administration_is_404_and_reaches_no_instance(house: House, target: str) -> None:
    engine = await house.engine(0)
    reader, _ = await house.raw(
        f"POST {target} HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
    )
    async with asyncio.timeout(SOON_S):
        answer = await reader.read()
    assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 405"))
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] in {
        "NotFoundError",
        "invalid_request_error",
    }
    assert engine.calls == []


async def test_a_wrong_method_is_405_with_allow(house: House) -> None:
    async with house.client.get("/v1/chat/completions") as answer:
        assert answer.status == 405
        assert answer.headers["Allow"] == "POST"


async def test_requests_go_to_their_models_instances(build: Build) -> None:
    house = await build("a", "b")
    engines = {name: await house.engine(slot, model=name) for slot, name in enumerate("ab")}
    for name in "abba":
        async with house.chat(model=name) as answer:
            assert answer.status == 200
    assert [len(engines[name].calls) for name in "ab"] == [2, 2]
    async with house.chat(model="c") as answer:
        assert answer.status == 404
        error = (await answer.json())["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    async with house.client.post("/v1/completions", data=b"{}") as answer:
        assert answer.status == 400
    assert house.sums()["rejected"] == 2
    form = aiohttp.FormData({"model": "b"})
    form.add_field("file", b"\0" * 100_000, filename="x.wav")
    async with house.client.post("/v1/audio/transcriptions", data=form) as answer:
        assert answer.status == 200
    assert len(engines["b"].calls) == 3


async def test_one_model_need_not_be_named(house: House) -> None:
    await house.engine(0)
    async with house.client.post("/tokenize", data=b'{"prompt":"x"}') as answer:
        assert answer.status == 200


async def test_no_instance_is_503_with_retry_after(house: House) -> None:
    async with house.chat() as answer:
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert (await answer.json())["error"]["code"] == "no_instance_ready"
    async with house.client.get("/health") as answer:
        assert answer.status == 503
    await house.engine(0)
    async with house.client.get("/health") as answer:
        assert answer.status == 200
    async with house.client.get("/version") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": 3}'])
async def test_a_bad_body_is_400(house: House, body: bytes) -> None:
    engine = await house.engine(0)
    async with house.client.post("/v1/completions", data=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "invalid_request_error"
    assert engine.calls == []


# --- stored responses ------------------------------------------------------------------------------


async def test_stored_responses_are_asked_where_they_are(build: Build) -> None:
    house = await build(policy=Policy.ROUND_ROBIN)

    def keeper(slot: int) -> object:
        kept: set[str] = set()

        async def script(call: Call) -> None:
            if call.target == "/v1/responses":
                kept.add(f"resp_{slot}_{len(kept)}")
                await call.json({"id": max(kept), "object": "response", "slot": slot})
            elif call.target.split("/")[3] in kept:
                await call.json({"id": call.target.split("/")[3], "slot": slot})
            else:
                await call.json({"error": {"message": "not found", "code": 404}}, 404)

        return script

    engines = [await house.engine(slot, keeper(slot)) for slot in range(3)]  # type: ignore[arg-type]
    made = []
    for _ in range(9):
        async with house.client.post("/v1/responses", data=b'{"model":"m"}') as answer:
            made.append(await answer.json())
    assert len({one["slot"] for one in made}) > 1
    before = sum(len(engine.calls) for engine in engines)
    for one in reversed(made):
        async with house.client.get(f"/v1/responses/{one['id']}") as answer:
            assert (await answer.json())["slot"] == one["slot"]
    assert sum(len(engine.calls) for engine in engines) == before + 9
    house.door.desk.fleet._stored.clear()  # a front door that was started anew
    for one in made:
        async with house.client.post(f"/v1/responses/{one['id']}/cancel") as answer:
            assert (await answer.json())["slot"] == one["slot"]
    async with house.client.get("/v1/responses/resp_nobody") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["message"] == "not found"
    body = json.dumps({"model": "m", "previous_response_id": made[0]["id"]})
    async with house.client.post("/v1/responses", data=body) as answer:
        await answer.read()
    assert house.suspects == []
    assert house.door.stats()["retried"] == 0


# --- limits ----------------------------------------------------------------------------------------


async def test_an_announced_body_over_the_limit_is_refused_before_it_comes(build: Build) -> None:
    house = await build(max_body_bytes=1000)
    reader, _ = await house.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n"
    )
    async with asyncio.timeout(SOON_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in head.lower()


async def test_100_continue_comes_when_the_body_will_be_read(house: House) -> None:
    await house.engine(0)
    reader, writer = await house.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
    async with asyncio.timeout(SOON_S):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 413), (200_000, 413)])
@pytest.mark.parametrize("chunked", [False, True])
async def test_the_limit_of_a_body(build: Build, size: int, status: int, chunked: bool) -> None:
    house = await build(max_body_bytes=1000)
    engine = await house.engine(0)
    body = b'{"model":"m"' + b" " * (size - 13) + b"}"

    async def pieces() -> object:
        for at in range(0, size, 300):
            yield body[at : at + 300]

    async with house.client.post("/v1/completions", data=pieces() if chunked else body) as answer:
        assert answer.status == status
        await answer.read()
    assert len(engine.calls) == (status == 200)
    assert house.sums()["rejected"] == (status == 413)


async def test_a_silent_body_is_408(build: Build) -> None:
    house = await build(body_timeout_s=0.1)
    reader, _ = await house.raw(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{")
    async with asyncio.timeout(SOON_S):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_leaves_in_its_body_is_counted(house: House) -> None:
    _, writer = await house.raw(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{")
    await until(lambda: house.sums()["accepted"] == 1)
    writer.close()
    await until(lambda: house.sums()["client_aborted"] == 1)


async def test_a_client_that_left_before_it_was_refused_is_counted(build: Build) -> None:
    house = await build(max_body_bytes=10)
    _, writer = await house.raw(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\n\r\n")
    writer.close()  # before the front door has read anything: its answer meets a closed socket
    await until(lambda: house.sums()["rejected"] == 1)
    assert house.balanced()
    assert house.sums()["in_flight"] == 0


# --- drain, remove, generations --------------------------------------------------------------------


async def held(call: Call) -> None:
    await call.start_stream()
    await call.chunk(event("one"))
    await call.until_left()


async def test_draining_an_idle_one_is_told_from_the_loop(build: Build) -> None:
    house = await build(park_timeout_s=0.05)
    await house.engine(0)
    house.door.drain_upstream(0, 1)
    assert house.idle == []
    await asyncio.sleep(0)
    assert house.idle == [(0, 1)]
    async with house.chat() as answer:
        assert answer.status == 503
    house.door.drain_upstream(5, 1)
    house.door.drain_upstream(0, 2)
    await asyncio.sleep(0)
    assert house.idle == [(0, 1)]


async def test_draining_a_busy_one_is_told_when_it_is_idle(house: House) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    engine = await house.engine(0, script)
    asked = asyncio.create_task(read(house))
    await until(lambda: bool(engine.calls))
    house.door.drain_upstream(0, 1)
    await asyncio.sleep(0.01)
    assert house.idle == []
    assert house.door.in_flight(0, 1) == 1
    go.set()
    assert (await asked)[0] == 200
    assert house.idle == [(0, 1)]
    house.door.remove_upstream(0, 1, "stopped")
    assert house.idle == [(0, 1)]


async def read(house: House, **more: object) -> tuple[int, bytes]:
    async with house.chat(**more) as answer:  # type: ignore[arg-type]
        return answer.status, await answer.read()


async def test_a_draining_one_that_refuses_is_no_suspect(house: House) -> None:
    async def script(call: Call) -> None:
        house.door.drain_upstream(0, 1)
        await call.json({"error": {"message": "shutting down"}}, 500)

    await house.engine(0, script)
    await house.engine(1)
    for _ in range(4):
        assert (await read(house))[0] == 200
    assert house.suspects == []


async def test_taking_a_drain_back(house: House) -> None:
    engine = await house.engine(0)
    house.door.drain_upstream(0, 1)
    house.door.add_upstream(0, 1, "m", engine.address, 8)
    await asyncio.sleep(0)
    assert house.idle == []
    assert (await read(house))[0] == 200


async def test_two_generations_of_a_slot(house: House) -> None:
    old = await house.engine(0, held, generation=1)
    async with house.chat(stream=True) as answer:
        await answer.content.readuntil(b"\n\n")
        house.door.drain_upstream(0, 1)
        await house.engine(0, generation=2)
        assert (await read(house))[0] == 200
        assert (house.door.in_flight(0, 1), house.door.in_flight(0, 2)) == (1, 0)
        house.door.add_upstream(0, 1, "m", old.address, 8)  # stale
        house.door.remove_upstream(0, 1, "drain deadline")
        rest = await answer.content.read()
    assert b"drain deadline" in rest
    house.door.remove_upstream(0, 1, "again")
    assert (await read(house))[0] == 200
    assert house.idle == []
    assert house.balanced()


async def test_rolling_restarts_under_load_lose_nothing(house: House) -> None:
    async def script(call: Call) -> None:
        await asyncio.sleep(0.005)
        await answer_chat(call)

    for slot in range(2):
        await house.engine(slot, script)
    over = asyncio.Event()

    async def client(stream: bool) -> list[int]:
        seen = []
        while not over.is_set():
            status, body = await read(house, stream=stream)
            seen.append(status)
            assert not stream or body.endswith(b"data: [DONE]\n\n")
        return seen

    clients = [asyncio.create_task(client(n % 2 == 0)) for n in range(8)]
    for generation in (2, 3):
        for slot in range(2):
            house.door.drain_upstream(slot, generation - 1)
            key = (slot, generation - 1)
            await until(lambda key=key: key in house.idle)  # type: ignore[misc]
            house.door.remove_upstream(slot, generation - 1, "restart")
            await house.engine(slot, script, generation=generation)
            await asyncio.sleep(0.05)
    over.set()
    seen = [status for statuses in await asyncio.gather(*clients) for status in statuses]
    assert set(seen) == {200}
    assert house.sums()["completed"] == len(seen)
    assert house.balanced()


def refuse(status: int) -> Script:
    async def script(call: Call) -> None:
        await call.json({"error": {"message": "no"}}, status)

    return script


# --- sums, log, stop -------------------------------------------------------------------------------


async def test_the_sums_add_up_after_anything(build: Build) -> None:
    house = await build(idle_timeout_s=0.2, answer_timeout_s=0.3, max_body_bytes=5000)
    chance = random.Random(11)  # noqa: S311

    async def cut_stream(call: Call) -> None:
        await call.start_stream()
        await call.chunk(event("one"))
        await asyncio.sleep(0.01)
        call.cut()

    async def mute(call: Call) -> None:
        await call.left.wait()  # until its client has had enough, whenever that is

    ways = [Call.cut_now, cut_stream, mute, refuse(500), refuse(400), *[answer_chat] * 3]

    async def script(call: Call) -> None:
        await chance.choice(ways)(call)

    for slot in range(3):
        await house.engine(slot, script)

    async def one(n: int) -> None:
        await asyncio.sleep(n % 10 * 0.01)
        try:
            async with asyncio.timeout(0.15 if n % 5 == 0 else 5):
                await read(house, stream=n % 2 == 0, model="m" if n % 7 else "x", pad="x" * (n % 11 * 600))
        except (TimeoutError, aiohttp.ClientError):
            pass

    async with asyncio.TaskGroup() as group:
        for n in range(150):
            group.create_task(one(n))
    await until(lambda: house.sums()["in_flight"] == 0)
    sums = house.sums()
    assert 120 <= sums["accepted"] <= 150  # a client that gives up while it connects was never here
    assert house.balanced()
    assert min(sums[name] for name in ("completed", "client_aborted", "rejected", "failed")) > 0
    assert all(house.door.in_flight(slot, 1) == 0 for slot in range(3))


async def test_the_access_log_has_fields_and_no_prompt(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.access")
    await house.engine(0)
    async with house.chat(prompt="secret words") as answer:
        await answer.read()
    (record,) = [record for record in caplog.records if record.name == "launcher.access"]
    assert record.levelno == logging.INFO
    wanted = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "slot": 0,
        "outcome": "completed",
    }
    assert {name: getattr(record, name) for name in wanted} == wanted
    assert record.__dict__["bytes_out"] > 0
    assert record.__dict__["request_id"]
    assert "secret" not in str(record.__dict__)
    assert "POST /v1/chat/completions 200 slot=0" in record.getMessage()
    assert record.getMessage().endswith(" ms completed " + record.__dict__["request_id"])


async def test_the_access_line_says_why(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "launcher.access")
    await house.engine(0)
    async with house.chat(model="a\nb") as answer:
        assert answer.status == 404
    (record,) = [record for record in caplog.records if record.name == "launcher.access"]
    assert record.getMessage().endswith(record.__dict__["request_id"] + ": The model `a\\nb` does not exist.")


async def test_stop_waits_for_what_is_in_flight(house: House) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    engine = await house.engine(0, script)
    asked = asyncio.create_task(read(house, stream=True))
    await until(lambda: bool(engine.calls))
    stopping = asyncio.create_task(house.door.stop(10 * SOON_S))
    await asyncio.sleep(0.02)
    with pytest.raises(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as other, other.get(house.door.endpoint + "/health"):
            pass
    go.set()
    status, body = await asked
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    async with asyncio.timeout(SOON_S):
        await stopping


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_ends_the_rest_honestly(house: House, stream: bool) -> None:
    async def script(call: Call) -> None:
        if stream:
            await held(call)
        else:
            await call.until_left()

    engines = [await house.engine(slot, script) for slot in range(2)]
    asked = asyncio.create_task(read(house, stream=stream))
    await until(lambda: any(engine.calls for engine in engines))
    await asyncio.sleep(0.02)
    async with asyncio.timeout(SOON_S):
        await house.door.stop(0.05)
        status, body = await asked
    assert b"shutting down" in body
    assert status == (200 if stream else 502)
    assert house.sums()["failed"] == 1
    assert house.suspects == []
