"""The proxy: routes, models, drain, generations, limits, sums, stop."""

from __future__ import annotations

import asyncio
import json
import logging
import random

import aiohttp
import pytest
from support.fakes import SOON_S
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import Call, Script, answer_chat, event

from launcher.config.schema import Policy


async def test_a_plain_answer_passes(proxy: ProxyUnderTest) -> None:
    engine = await proxy.engine(0)
    async with proxy.chat() as answer:
        assert answer.status == 200
        assert (await answer.json())["id"] == "x"
        assert answer.headers["X-Request-Id"] == engine.calls[0].header("x-request-id")
    assert proxy.sums()["completed"] == 1


# --- routes and models -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["/sleep", "/v1/%2e%2e/sleep", "/v1/../sleep", "/v1//load_lora_adapter", "/v1/load_lora_adapter", "/V1/models",
     "/collective_rpc", "/v1/chat/completions/", "/v1/models/../../sleep", "//sleep", "/%73leep"],
)  # fmt: skip
async def test_administration_is_404_and_reaches_no_instance(proxy: ProxyUnderTest, target: str) -> None:
    engine = await proxy.engine(0)
    reader, _ = await proxy.raw(
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


async def test_a_wrong_method_is_405_with_allow(proxy: ProxyUnderTest) -> None:
    async with proxy.client.get("/v1/chat/completions") as answer:
        assert answer.status == 405
        assert answer.headers["Allow"] == "POST"


async def test_requests_go_to_their_models_instances(build: Build) -> None:
    proxy = await build("a", "b")
    engines = {name: await proxy.engine(slot, model=name) for slot, name in enumerate("ab")}
    for name in "abba":
        async with proxy.chat(model=name) as answer:
            assert answer.status == 200
    assert [len(engines[name].calls) for name in "ab"] == [2, 2]
    async with proxy.chat(model="c") as answer:
        assert answer.status == 404
        error = (await answer.json())["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    async with proxy.client.post("/v1/completions", data=b"{}") as answer:
        assert answer.status == 400
    assert proxy.sums()["rejected"] == 2
    form = aiohttp.FormData({"model": "b"})
    form.add_field("file", b"\0" * 100_000, filename="x.wav")
    async with proxy.client.post("/v1/audio/transcriptions", data=form) as answer:
        assert answer.status == 200
    assert len(engines["b"].calls) == 3


async def test_one_model_need_not_be_named(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    async with proxy.client.post("/tokenize", data=b'{"prompt":"x"}') as answer:
        assert answer.status == 200


async def test_no_instance_is_503_with_retry_after(proxy: ProxyUnderTest) -> None:
    async with proxy.chat() as answer:
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert (await answer.json())["error"]["code"] == "no_instance_ready"
    async with proxy.client.get("/health") as answer:
        assert answer.status == 503
    await proxy.engine(0)
    async with proxy.client.get("/health") as answer:
        assert answer.status == 200
    async with proxy.client.get("/version") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"model": 3}'])
async def test_a_bad_body_is_400(proxy: ProxyUnderTest, body: bytes) -> None:
    engine = await proxy.engine(0)
    async with proxy.client.post("/v1/completions", data=body) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["type"] == "invalid_request_error"
    assert engine.calls == []


# --- stored responses ------------------------------------------------------------------------------


async def test_stored_responses_are_asked_where_they_are(build: Build) -> None:
    proxy = await build(policy=Policy.ROUND_ROBIN)

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

    engines = [await proxy.engine(slot, keeper(slot)) for slot in range(3)]  # type: ignore[arg-type]
    made = []
    for _ in range(9):
        async with proxy.client.post("/v1/responses", data=b'{"model":"m"}') as answer:
            made.append(await answer.json())
    assert len({one["slot"] for one in made}) > 1
    before = sum(len(engine.calls) for engine in engines)
    for one in reversed(made):
        async with proxy.client.get(f"/v1/responses/{one['id']}") as answer:
            assert (await answer.json())["slot"] == one["slot"]
    assert sum(len(engine.calls) for engine in engines) == before + 9
    proxy.server._instances._stored.clear()  # a proxy that was started anew
    for one in made:
        async with proxy.client.post(f"/v1/responses/{one['id']}/cancel") as answer:
            assert (await answer.json())["slot"] == one["slot"]
    async with proxy.client.get("/v1/responses/resp_nobody") as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["message"] == "not found"
    body = json.dumps({"model": "m", "previous_response_id": made[0]["id"]})
    async with proxy.client.post("/v1/responses", data=body) as answer:
        await answer.read()
    assert proxy.suspects == []
    assert proxy.server.readings.stats()["retried"] == 0


# --- limits ----------------------------------------------------------------------------------------


async def test_an_announced_body_over_the_limit_is_refused_before_it_comes(build: Build) -> None:
    proxy = await build(max_body_bytes=1000)
    reader, _ = await proxy.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\nExpect: 100-continue\r\n\r\n"
    )
    async with asyncio.timeout(SOON_S):
        head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in head.lower()


async def test_100_continue_comes_when_the_body_will_be_read(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    reader, writer = await proxy.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    )
    async with asyncio.timeout(SOON_S):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"{}")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("size", "status"), [(1000, 200), (1001, 413), (200_000, 413)])
@pytest.mark.parametrize("chunked", [False, True])
async def test_the_limit_of_a_body(build: Build, size: int, status: int, chunked: bool) -> None:
    proxy = await build(max_body_bytes=1000)
    engine = await proxy.engine(0)
    body = b'{"model":"m"' + b" " * (size - 13) + b"}"

    async def pieces() -> object:
        for at in range(0, size, 300):
            yield body[at : at + 300]

    async with proxy.client.post("/v1/completions", data=pieces() if chunked else body) as answer:
        assert answer.status == status
        await answer.read()
    assert len(engine.calls) == (status == 200)
    assert proxy.sums()["rejected"] == (status == 413)


async def test_a_silent_body_is_408(build: Build) -> None:
    proxy = await build(body_timeout_s=0.1)
    reader, _ = await proxy.raw(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{")
    async with asyncio.timeout(SOON_S):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 408 ")


async def test_a_client_that_leaves_in_its_body_is_counted(proxy: ProxyUnderTest) -> None:
    _, writer = await proxy.raw(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{")
    await until(lambda: proxy.sums()["accepted"] == 1)
    writer.close()
    await until(lambda: proxy.sums()["client_aborted"] == 1)


async def test_a_client_that_left_before_it_was_refused_is_counted(build: Build) -> None:
    proxy = await build(max_body_bytes=10)
    _, writer = await proxy.raw(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 11\r\n\r\n")
    writer.close()  # before the proxy has read anything: its answer meets a closed socket
    await until(lambda: proxy.sums()["rejected"] == 1)
    assert proxy.balanced()
    assert proxy.sums()["in_flight"] == 0


# --- drain, remove, generations --------------------------------------------------------------------


async def held(call: Call) -> None:
    await call.start_stream()
    await call.chunk(event("one"))
    await call.until_left()


async def test_draining_an_idle_one_is_told_from_the_loop(build: Build) -> None:
    proxy = await build(park_timeout_s=0.05)
    await proxy.engine(0)
    proxy.server.drain_upstream(0, 1)
    assert proxy.idle == []
    await asyncio.sleep(0)
    assert proxy.idle == [(0, 1)]
    async with proxy.chat() as answer:
        assert answer.status == 503
    proxy.server.drain_upstream(5, 1)
    proxy.server.drain_upstream(0, 2)
    await asyncio.sleep(0)
    assert proxy.idle == [(0, 1)]


async def test_draining_a_busy_one_is_told_when_it_is_idle(proxy: ProxyUnderTest) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    engine = await proxy.engine(0, script)
    asked = asyncio.create_task(read(proxy))
    await until(lambda: bool(engine.calls))
    proxy.server.drain_upstream(0, 1)
    await asyncio.sleep(0.01)
    assert proxy.idle == []
    assert proxy.server.in_flight(0, 1) == 1
    go.set()
    assert (await asked)[0] == 200
    assert proxy.idle == [(0, 1)]
    proxy.server.remove_upstream(0, 1, "stopped")
    assert proxy.idle == [(0, 1)]


async def read(proxy: ProxyUnderTest, **more: object) -> tuple[int, bytes]:
    async with proxy.chat(**more) as answer:  # type: ignore[arg-type]
        return answer.status, await answer.read()


async def test_a_draining_one_that_refuses_is_no_suspect(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        proxy.server.drain_upstream(0, 1)
        await call.json({"error": {"message": "shutting down"}}, 500)

    await proxy.engine(0, script)
    await proxy.engine(1)
    for _ in range(4):
        assert (await read(proxy))[0] == 200
    assert proxy.suspects == []


async def test_taking_a_drain_back(proxy: ProxyUnderTest) -> None:
    engine = await proxy.engine(0)
    proxy.server.drain_upstream(0, 1)
    proxy.server.add_upstream(0, 1, "m", engine.address, 8)
    await asyncio.sleep(0)
    assert proxy.idle == []
    assert (await read(proxy))[0] == 200


async def test_two_generations_of_a_slot(proxy: ProxyUnderTest) -> None:
    old = await proxy.engine(0, held, generation=1)
    async with proxy.chat(stream=True) as answer:
        await answer.content.readuntil(b"\n\n")
        proxy.server.drain_upstream(0, 1)
        await proxy.engine(0, generation=2)
        assert (await read(proxy))[0] == 200
        assert (proxy.server.in_flight(0, 1), proxy.server.in_flight(0, 2)) == (1, 0)
        proxy.server.add_upstream(0, 1, "m", old.address, 8)  # stale
        proxy.server.remove_upstream(0, 1, "drain deadline")
        rest = await answer.content.read()
    assert b"drain deadline" in rest
    proxy.server.remove_upstream(0, 1, "again")
    assert (await read(proxy))[0] == 200
    assert proxy.idle == []
    assert proxy.balanced()


async def test_rolling_restarts_under_load_lose_nothing(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await asyncio.sleep(0.005)
        await answer_chat(call)

    for slot in range(2):
        await proxy.engine(slot, script)
    over = asyncio.Event()

    async def client(stream: bool) -> list[int]:
        seen = []
        while not over.is_set():
            status, body = await read(proxy, stream=stream)
            seen.append(status)
            assert not stream or body.endswith(b"data: [DONE]\n\n")
        return seen

    clients = [asyncio.create_task(client(n % 2 == 0)) for n in range(8)]
    for generation in (2, 3):
        for slot in range(2):
            proxy.server.drain_upstream(slot, generation - 1)
            key = (slot, generation - 1)
            await until(lambda key=key: key in proxy.idle)  # type: ignore[misc]
            proxy.server.remove_upstream(slot, generation - 1, "restart")
            await proxy.engine(slot, script, generation=generation)
            await asyncio.sleep(0.05)
    over.set()
    seen = [status for statuses in await asyncio.gather(*clients) for status in statuses]
    assert set(seen) == {200}
    assert proxy.sums()["completed"] == len(seen)
    assert proxy.balanced()


def refuse(status: int) -> Script:
    async def script(call: Call) -> None:
        await call.json({"error": {"message": "no"}}, status)

    return script


# --- sums, log, stop -------------------------------------------------------------------------------


async def test_the_sums_add_up_after_anything(build: Build) -> None:
    proxy = await build(idle_timeout_s=0.2, answer_timeout_s=0.3, max_body_bytes=5000)
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
        await proxy.engine(slot, script)

    async def one(n: int) -> None:
        await asyncio.sleep(n % 10 * 0.01)
        try:
            async with asyncio.timeout(0.15 if n % 5 == 0 else 5):
                await read(proxy, stream=n % 2 == 0, model="m" if n % 7 else "x", pad="x" * (n % 11 * 600))
        except (TimeoutError, aiohttp.ClientError):
            pass

    async with asyncio.TaskGroup() as group:
        for n in range(150):
            group.create_task(one(n))
    await until(lambda: proxy.sums()["in_flight"] == 0)
    sums = proxy.sums()
    assert 120 <= sums["accepted"] <= 150  # a client that gives up while it connects was never here
    assert proxy.balanced()
    assert min(sums[name] for name in ("completed", "client_aborted", "rejected", "failed")) > 0
    assert all(proxy.server.in_flight(slot, 1) == 0 for slot in range(3))


async def test_the_access_log_has_fields_and_no_prompt(
    proxy: ProxyUnderTest, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "launcher.access")
    await proxy.engine(0)
    async with proxy.chat(prompt="secret words") as answer:
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


async def test_the_access_line_says_why(proxy: ProxyUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "launcher.access")
    await proxy.engine(0)
    async with proxy.chat(model="a\nb") as answer:
        assert answer.status == 404
    (record,) = [record for record in caplog.records if record.name == "launcher.access"]
    assert record.getMessage().endswith(record.__dict__["request_id"] + ": The model `a\\nb` does not exist.")


async def test_stop_waits_for_what_is_in_flight(proxy: ProxyUnderTest) -> None:
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    engine = await proxy.engine(0, script)
    asked = asyncio.create_task(read(proxy, stream=True))
    await until(lambda: bool(engine.calls))
    stopping = asyncio.create_task(proxy.server.stop(10 * SOON_S))
    await asyncio.sleep(0.02)
    with pytest.raises(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as other, other.get(proxy.server.endpoint + "/health"):
            pass
    go.set()
    status, body = await asked
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    async with asyncio.timeout(SOON_S):
        await stopping


async def test_stop_serves_the_first_request_of_a_connection_that_was_accepted(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    body = b'{"model":"m","messages":[]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
    used, _ = await proxy.raw(head + body)
    await used.readuntil(b"\r\n\r\n")
    late, writer = await proxy.raw(b"")
    silent, _ = await proxy.raw(b"")
    await until(lambda: len(proxy.server._clients) == 3)
    stopping = asyncio.create_task(proxy.server.stop(10 * SOON_S))
    async with asyncio.timeout(SOON_S):
        await used.read()  # an idle one is closed at once
        writer.write(head + body)
        answer = await late.read()
        assert await silent.read() == b""
        await stopping
    assert answer.startswith(b"HTTP/1.1 200")
    assert proxy.sums()["completed"] == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_ends_the_rest_honestly(proxy: ProxyUnderTest, stream: bool) -> None:
    async def script(call: Call) -> None:
        if stream:
            await held(call)
        else:
            await call.until_left()

    engines = [await proxy.engine(slot, script) for slot in range(2)]
    asked = asyncio.create_task(read(proxy, stream=stream))
    await until(lambda: any(engine.calls for engine in engines))
    await asyncio.sleep(0.02)
    async with asyncio.timeout(SOON_S):
        await proxy.server.stop(0.05)
        status, body = await asked
    assert b"shutting down" in body
    assert status == (200 if stream else 502)
    assert proxy.sums()["failed"] == 1
    assert proxy.suspects == []
