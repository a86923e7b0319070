"""Requests that wait: in the queue, for an instance to come back, with signs of life, up to a limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re

import aiohttp
import pytest
from support.fakes import SOON_S
from support.plain_engine import CHAT, QUESTION, PlainEngine
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, FakeEngine, Script, answer_chat, event

from launcher.proxy.request import retry_policy


def gated(go: asyncio.Semaphore) -> Script:
    """Answers one request each time it is let."""

    async def script(call: Call) -> None:
        if call.target == "/v1/chat/completions":
            await go.acquire()
        await answer_chat(call)

    return script


async def ask(proxy: ProxyUnderTest, **more: object) -> tuple[int, bytes, str | None]:
    async with proxy.chat(**more) as answer:  # type: ignore[arg-type]
        return answer.status, await answer.read(), answer.headers.get("Retry-After")


async def test_what_an_instance_can_not_start_waits_here(proxy: ProxyUnderTest) -> None:
    go = asyncio.Semaphore(0)
    engine = await proxy.engine(0, gated(go))  # 8 at once
    asked = [asyncio.create_task(ask(proxy)) for _ in range(12)]
    await until(lambda: len(engine.calls) == 8 and proxy.server.readings.stats()["waiting"] == 4)
    await asyncio.sleep(0.05)
    assert len(engine.calls) == 8
    assert proxy.server.readings.stats()["waiting"] == 4
    async with proxy.client.get("/load") as answer:
        load = await answer.json()
    assert (load["running"], load["waiting"], load["concurrency_limit"]) == (8, 4, 8)
    async with proxy.client.get("/metrics?view=host") as answer:
        assert "vllm:num_requests_waiting 4.0" in await answer.text()
    for _ in range(12):
        go.release()
    assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 12
    assert proxy.balanced()


async def test_a_full_queue_is_429_with_a_time(build: Build) -> None:
    proxy = await build(queue_max_requests=2)
    go = asyncio.Semaphore(0)
    engine = await proxy.engine(0, gated(go))
    asked = [asyncio.create_task(ask(proxy)) for _ in range(10)]
    await until(lambda: len(engine.calls) == 8 and proxy.server.readings.stats()["waiting"] == 2)
    status, body, retry = await ask(proxy)
    assert status == 429
    assert json.loads(body)["error"]["code"] == "queue_full"
    assert int(retry or 0) >= 1
    page = await proxy.server.metrics_page()
    assert "numa_launcher_queue_max_requests 2.0" in page
    [oldest] = re.findall(r"^numa_launcher_queue_oldest_seconds{.*} (\S+)", page, flags=re.MULTILINE)
    assert 0 < float(oldest) < 600
    for _ in range(10):
        go.release()
    assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
    assert proxy.sums()["rejected"] == 1
    assert proxy.balanced()
    async with proxy.client.get("/metrics") as answer:
        page = await answer.text()
    assert 'numa_launcher_queue_rejected_total{reason="requests"} 1.0' in page


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_begun_is_not_turned_away_by_a_full_queue(build: Build, stream: bool) -> None:
    """The only instance dies with 8 requests on it while the queue is full: all of them are answered by its next life."""
    proxy = await build(queue_max_requests=2)

    said = PlainEngine(CHAT, ("Hello", " world"))

    async def begins(call: Call) -> None:
        if stream:
            await call.start_stream()
            await call.chunk(b"".join(said.answer(call.body)[:2]))
        await call.until_left()

    async def answers(call: Call) -> None:
        await call.start_stream()
        await call.chunk(b"".join(said.answer(call.body)))
        await call.end_stream()

    engine = await proxy.engine(0, begins)
    messages = [{"role": "user", "content": QUESTION}]
    asked = [
        asyncio.create_task(ask(proxy, stream=stream, messages=messages, temperature=0)) for _ in range(10)
    ]
    await until(lambda: len(engine.calls) == 8 and proxy.server.readings.stats()["waiting"] == 2)
    await asyncio.sleep(0.02)
    await engine.die()
    proxy.server.remove_upstream(0, 1, "killed by signal 9")
    await until(lambda: proxy.server.readings.stats()["waiting"] == 10 or proxy.sums()["in_flight"] < 10)
    await proxy.engine(0, answers if stream else answer_chat, generation=2)
    told = await asyncio.gather(*asked)
    assert [status for status, _, _ in told] == [200] * 10
    assert not stream or all(body.endswith(DONE) and body.count(b"Hello") == 1 for _, body, _ in told)
    assert proxy.sums()["completed"] == 10


async def test_a_wait_that_is_too_long_is_429(build: Build) -> None:
    proxy = await build(queue_timeout_s=0.1)
    go = asyncio.Semaphore(0)
    await proxy.engine(0, gated(go))
    asked = [asyncio.create_task(ask(proxy)) for _ in range(9)]
    done, rest = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=SOON_S)
    (late,) = done
    assert late.result()[0] == 429
    for _ in range(9):
        go.release()
    assert {task.result()[0] for task in (await asyncio.wait(rest))[0]} == {200}


async def test_a_client_that_leaves_the_queue_is_not_sent(proxy: ProxyUnderTest) -> None:
    go = asyncio.Semaphore(0)
    engine = await proxy.engine(0, gated(go))
    asked = [asyncio.create_task(ask(proxy)) for _ in range(9)]
    await until(lambda: proxy.server.readings.stats()["waiting"] == 1)
    waiting = next(task for task in reversed(asked))
    waiting.cancel()
    await until(lambda: proxy.server.readings.stats()["waiting"] == 0 or proxy.sums()["client_aborted"] == 1)
    for _ in range(9):
        go.release()
    await asyncio.wait(asked)
    assert len(engine.calls) <= 9
    assert proxy.balanced()


async def test_while_the_only_instance_restarts_requests_are_parked(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    proxy.server.drain_upstream(0, 1)
    proxy.server.remove_upstream(0, 1, "restart")
    asked = asyncio.create_task(ask(proxy))
    await until(lambda: proxy.server.readings.stats()["waiting"] == 1)
    await proxy.engine(0, generation=2)
    assert (await asked)[0] == 200


async def test_a_crash_of_the_only_instance_is_waited_out(proxy: ProxyUnderTest) -> None:
    """Cut before its first byte, and nobody else is there: the next life of the slot answers."""
    engine = await proxy.engine(0, Call.until_left)
    asked = asyncio.create_task(ask(proxy, stream=True))
    await until(lambda: bool(engine.calls))
    await engine.die()
    await asyncio.sleep(0.02)
    proxy.server.remove_upstream(0, 1, "killed by signal 9")
    await asyncio.sleep(0.05)
    await proxy.engine(0, generation=2)
    status, body, _ = await asked
    assert (status, body.endswith(DONE)) == (200, True)
    assert proxy.sums()["completed"] == 1


async def test_one_that_was_worked_on_for_longer_than_the_queue_may_take(build: Build) -> None:
    """Its time in the queue begins anew: what it has waited on an instance was no waiting."""
    proxy = await build(queue_timeout_s=1.0)
    engine = await proxy.engine(0, Call.until_left)
    asked = asyncio.create_task(ask(proxy))
    await until(lambda: bool(engine.calls))
    await asyncio.sleep(1.2)
    await engine.die()
    proxy.server.remove_upstream(0, 1, "killed by signal 9")
    await until(lambda: proxy.server.readings.stats()["waiting"] == 1)
    await asyncio.sleep(0.1)
    await proxy.engine(0, generation=2)
    assert (await asked)[0] == 200


async def test_an_instance_that_takes_no_connections_any_more(
    proxy: ProxyUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listener closes long before its process is seen to have ended: nobody is turned away meanwhile."""
    monkeypatch.setattr(retry_policy, "ROUND_PAUSE_S", 0.01)
    monkeypatch.setattr(retry_policy, "PARKED_PAUSE_S", 0.02)
    engine = await proxy.engine(0)
    await engine.die()
    asked = [asyncio.create_task(ask(proxy, stream=stream)) for stream in (False, True)]
    await until(lambda: int(str(proxy.server.readings.stats()["retried"])) > 3 * retry_policy.MAX_ATTEMPTS)
    proxy.server.remove_upstream(0, 1, "exit 1")
    await proxy.engine(0, generation=2)
    assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
    assert proxy.balanced()


async def test_nobody_waits_for_ever_for_an_instance_that_takes_no_connections(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry_policy, "ROUND_PAUSE_S", 0.01)
    proxy = await build(park_timeout_s=0.2)
    engine = await proxy.engine(0)
    await engine.die()
    status, body, retry = await ask(proxy)
    assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_error")
    assert int(retry or 0) >= 1
    assert proxy.balanced()


async def test_parking_ends_in_503(build: Build) -> None:
    proxy = await build(park_timeout_s=0.1)
    await proxy.engine(0)
    proxy.server.remove_upstream(0, 1, "stopped")
    async with proxy.chat() as answer:
        assert answer.status == 503
        assert (await answer.json())["error"]["code"] == "no_instance_ready"
        assert int(answer.headers["Retry-After"]) >= 1


async def test_a_stream_that_waits_shows_that_it_lives(build: Build) -> None:
    proxy = await build(keepalive_comment_s=0.05)
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert await answer.content.readuntil(b"\n\n") == b": waiting\n\n"
        go.set()
        rest = await answer.read()
    assert rest.replace(b": waiting\n\n", b"") == b"".join(event(w) for w in ("one", "two", "three")) + DONE
    assert proxy.sums()["completed"] == 1


LAST = {
    "/v1/responses": b'event: response.completed\ndata: {"type":"response.completed","response":{"status":"completed"}}\n\n',
    "/v1/messages": b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}


@pytest.mark.parametrize("path", LAST)
async def test_so_do_streams_that_end_without_done(build: Build, path: str) -> None:
    proxy = await build(keepalive_comment_s=0.05)
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await call.start_stream()
        await call.chunk(LAST[path])
        await call.end_stream()

    await proxy.engine(0, script)
    asked = json.dumps({"model": "m", "input": "x", "messages": [], "stream": True})
    async with asyncio.timeout(SOON_S), proxy.client.post(path, data=asked) as answer:
        assert await answer.content.readuntil(b"\n\n") == b": waiting\n\n"
        go.set()
        rest = await answer.read()
    assert rest.replace(b": waiting\n\n", b"") == LAST[path]
    assert proxy.sums()["completed"] == 1


async def test_a_response_that_is_created_is_not_computed_yet(proxy: ProxyUnderTest) -> None:
    """vLLM says so before it begins: only a token tells that the prompt is done and the next one may come. Until then
    the client gets nothing, so that another instance may answer."""
    pending: list[int] = []

    async def script(call: Call) -> None:
        await call.start_stream()
        for kind in ("created", "in_progress"):
            await call.chunk(b'event: response.%b\ndata: {"type":"response.%b"}\n\n' % (2 * (kind.encode(),)))
        await until(lambda: proxy.server.progress(0, 1) > 1)  # beside the head
        pending.append(len(upstream.load.pending))
        await call.chunk(b'event: response.output_text.delta\ndata: {"delta":"x"}\n\n')
        await call.until_left()

    await proxy.engine(0, script)
    (upstream,) = proxy.server.balancer.table
    asked = json.dumps({"model": "m", "input": "x", "stream": True})
    async with asyncio.timeout(SOON_S), proxy.client.post("/v1/responses", data=asked) as answer:
        assert pending == [1]
        await answer.content.readuntil(b'in_progress"}\n\n')
        await answer.content.readuntil(b'"x"}\n\n')
        assert not upstream.load.pending


async def test_an_error_after_signs_of_life_is_an_event(build: Build) -> None:
    proxy = await build(keepalive_comment_s=0.03)

    async def script(call: Call) -> None:
        await asyncio.sleep(0.1)
        await call.json({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, 400)

    await proxy.engine(0, script)
    async with asyncio.timeout(SOON_S), proxy.chat(stream=True) as answer:
        body = await answer.read()
    assert DONE not in body
    last = body[:-2].split(b"\n\n")[-1]
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "too long"


async def test_three_failures_in_a_row_take_one_out(build: Build) -> None:
    proxy = await build(eject_s=30.0, policy="round-robin")

    async def reset(call: Call) -> None:
        call.cut()

    bad = await proxy.engine(0, reset)
    await proxy.engine(1)
    for _ in range(20):
        assert (await ask(proxy))[0] == 200
    assert len(bad.calls) == 3
    assert proxy.sums()["completed"] == 20


async def test_a_clients_5xx_ejects_nobody(proxy: ProxyUnderTest) -> None:
    """A request that every instance answers with 500 says nothing of the instances."""

    async def poison(call: Call) -> None:
        if b"poison" in call.body:
            await call.json({"error": {"message": "bad", "code": 500}}, 500)
        else:
            await answer_chat(call)

    engines = [await proxy.engine(slot, poison) for slot in range(2)]
    for _ in range(6):
        assert (await ask(proxy, prompt="poison"))[0] == 500
    before = [len(engine.calls) for engine in engines]
    assert before == [6, 6]
    assert (await ask(proxy))[0] == 200


async def test_a_request_that_kills_is_given_up(proxy: ProxyUnderTest) -> None:
    """After three instances that died with it in their hands no fourth one is given to it."""
    engines: list[FakeEngine] = []

    def deadly(slot: int) -> Script:
        async def script(call: Call) -> None:
            call.cut()
            proxy.server.remove_upstream(slot, 1, "killed by signal 11", crashed=True)

        return script

    for slot in range(5):
        engines.append(await proxy.engine(slot, deadly(slot)))  # noqa: PERF401
    status, body, _ = await ask(proxy)
    assert status == 502
    assert b"instances died" in body
    assert sum(len(engine.calls) for engine in engines) == 3


@pytest.mark.parametrize("broken", [False, True], ids=["in flight", "broken before"])
async def test_a_planned_end_of_an_instance_is_no_death(proxy: ProxyUnderTest, broken: bool) -> None:
    """A long request is displaced by each step of a rolling reload."""

    def planned(slot: int) -> Script:
        async def script(call: Call) -> None:
            if broken:
                call.cut()
            proxy.server.remove_upstream(slot, 1, "it is being stopped")
            await call.until_left()

        return script

    engines = [await proxy.engine(slot, planned(slot)) for slot in range(4)]
    asked = asyncio.create_task(ask(proxy))
    await until(lambda: asked.done() or all(engine.calls for engine in engines))
    await proxy.engine(4)
    assert (await asked)[0] == 200


@pytest.mark.virtual_time
async def test_an_instance_that_hangs_loses_its_streams(build: Build) -> None:
    proxy = await build(hung_timeout_s=1.0)

    async def hangs(call: Call) -> None:
        await call.start_stream()
        await call.chunk(event("one"))
        await call.until_left()

    async def flows(call: Call) -> None:
        await call.start_stream()
        for number in range(100):
            await call.chunk(event(str(number)))
            await asyncio.sleep(0.04)
        await call.chunk(DONE)
        await call.end_stream()

    await proxy.engine(0, hangs)
    first = asyncio.create_task(ask(proxy, stream=True, tools=[]))
    await until(lambda: proxy.server.in_flight(0, 1) == 1)
    proxy.server.drain_upstream(0, 1)
    await proxy.engine(1, flows)
    second = asyncio.create_task(ask(proxy, stream=True))
    async with asyncio.timeout(SOON_S):
        _, body, _ = await first
    assert DONE in body or b"it hangs" in body
    assert (await second)[1].endswith(DONE)


@pytest.mark.parametrize("count", [1100])
async def test_idle_connections_cost_little(proxy: ProxyUnderTest, count: int) -> None:
    await proxy.engine(0)
    writers = [(await proxy.raw(b""))[1] for _ in range(count)]
    async with asyncio.timeout(SOON_S):
        assert (await ask(proxy))[0] == 200
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("bound", ["max_connections", "most_clients"])
async def test_too_many_connections_are_closed(build: Build, bound: str) -> None:
    proxy = await build(**{bound: 2})
    await proxy.engine(0)
    one, two = await proxy.raw(b""), await proxy.raw(b"")
    reader, _ = await proxy.raw(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
    async with asyncio.timeout(SOON_S):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    one[1].close()
    two[1].close()
    statuses: list[int] = []
    async with asyncio.timeout(SOON_S):
        while not statuses:  # until the proxy has seen that they left
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with proxy.client.get("/health") as answer:
                    statuses.append(answer.status)
    assert statuses == [200]


async def test_more_than_an_ejected_idle_instance_has_places_for_wait_for_its_return(build: Build) -> None:
    """Nothing runs then: there is no rate to predict their starts from."""
    proxy = await build(eject_s=3.0, policy="round-robin")
    bad = await proxy.engine(0, Call.cut_now)
    await proxy.engine(1)
    while proxy.server.counters.slots[0].ejected == 0:
        assert (await ask(proxy))[0] == 200
    bad.script = answer_chat
    proxy.server.drain_upstream(1, 1)
    asked = [asyncio.create_task(ask(proxy)) for _ in range(20)]
    await until(lambda: proxy.server.readings.stats()["waiting"] == 20 or any(task.done() for task in asked))
    async with proxy.client.get("/load") as answer:
        assert answer.status == 200
        assert (await answer.json())["waiting"] == 20
    async with asyncio.timeout(SOON_S):
        assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}


async def poison(call: Call) -> None:
    """Closes the connection under a request that names it, and answers any other."""
    if b"poison" in call.body:
        call.cut()
    else:
        await answer_chat(call)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_to_which_every_engine_closes_the_connection_ejects_nobody(
    build: Build, stream: bool
) -> None:
    proxy = await build(policy="round-robin")
    engines = [await proxy.engine(slot, poison) for slot in range(4)]
    asked = [
        asyncio.create_task(ask(proxy, stream=stream, prompt="poison" if at % 5 == 0 else "well"))
        for at in range(20)
    ]
    async with asyncio.timeout(SOON_S):
        answers = await asyncio.gather(*asked)
    assert [status for status, _, _ in answers] == [502, 200, 200, 200, 200] * 4
    for _, body, _ in answers[::5]:
        message = json.loads(body)["error"]["message"]
        assert "it closed the connection; the request itself may be the cause: " in message
    calls = sum(b"poison" in call.body for engine in engines for call in engine.calls)
    assert calls <= 4 * retry_policy.MAX_FAILED
    assert [proxy.server.counters.slots[slot].ejected for slot in range(4)] == [0] * 4
    before = [len(engine.calls) for engine in engines]
    assert [(await ask(proxy))[0] for _ in range(4)] == [200] * 4
    assert [len(engine.calls) for engine in engines] == [count + 1 for count in before]


@pytest.mark.virtual_time
@pytest.mark.parametrize("stream", [False, True])
async def test_the_time_of_all_attempts_is_bounded(build: Build, stream: bool) -> None:
    limits = {"answer_timeout_s": 0.3, "first_token_timeout_s": 0.3, "first_token_timeout_per_1k_s": 0.0}
    proxy = await build(**limits)
    engines = [await proxy.engine(slot, Call.until_left) for slot in range(4)]
    async with asyncio.timeout(SOON_S):
        status, body, _ = await ask(proxy, stream=stream)
    assert status == 502
    assert "all attempts together took" in json.loads(body)["error"]["message"]
    assert sum(len(engine.calls) for engine in engines) == retry_policy.MAX_TIMES
    assert [proxy.server.counters.slots[slot].ejected for slot in range(4)] == [0] * 4
    assert proxy.balanced()


@pytest.mark.virtual_time
async def test_an_attempt_gets_what_the_ones_before_it_have_left(build: Build) -> None:
    """Three break at 1.1 s: of the time of three, 4.5 s, the fourth has 1.2 s at most."""
    proxy = await build(answer_timeout_s=1.5)
    engines: list[FakeEngine] = []

    async def breaks(call: Call) -> None:
        if sum(len(engine.calls) for engine in engines) == 4:
            await call.until_left()
            return
        await asyncio.sleep(1.1)
        call.cut()

    engines += [await proxy.engine(slot, breaks) for slot in range(4)]
    async with asyncio.timeout(SOON_S):
        status, body, _ = await ask(proxy)
    message = json.loads(body)["error"]["message"]
    assert status == 502
    waited = re.search(r"no first byte within ([\d.]+) s; all attempts together took", message)
    assert waited is not None, message
    assert float(waited[1]) <= 1.2
    assert sum(len(engine.calls) for engine in engines) == 4


async def test_the_time_of_all_waits_after_the_first_attempt_is_bounded(build: Build) -> None:
    proxy = await build(queue_timeout_s=1.0)
    asked: asyncio.Task[tuple[int, bytes, str | None]] | None = None
    for generation in (1, 2, 3):
        engine = await proxy.engine(
            0, Call.until_left if generation < 3 else answer_chat, generation=generation
        )
        if asked is None:
            asked = asyncio.create_task(ask(proxy))
        if generation < 3:
            await until(lambda engine=engine: bool(engine.calls))
            proxy.server.remove_upstream(0, generation, "it is being stopped")
            await asyncio.sleep(0.95)  # of them 0.25 of a pause before it is queued again
    assert asked is not None
    assert (await asked)[0] == 503
    assert proxy.balanced()


# --- requests that need no place ---------------------------------------------------------------------

BESIDE = [
    ("GET", "/version"),
    ("GET", "/tokenizer_info"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/chat/completions/render"),
    ("GET", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
]


async def call(proxy: ProxyUnderTest, method: str, path: str) -> int:
    body = b'{"model":"m","prompt":"hello"}' if method == "POST" else None
    async with asyncio.timeout(SOON_S), proxy.client.request(method, path, data=body) as answer:
        await answer.read()
        return answer.status


async def test_what_computes_nothing_waits_for_no_place(build: Build) -> None:
    """All places generate, and the queue is full."""
    proxy = await build(queue_max_requests=2)
    go = asyncio.Semaphore(0)
    engine = await proxy.engine(0, gated(go))
    asked = [asyncio.create_task(ask(proxy)) for _ in range(10)]
    await until(lambda: len(engine.calls) == 8 and proxy.server.readings.stats()["waiting"] == 2)
    assert [await call(proxy, *each) for each in BESIDE] == [200] * len(BESIDE)
    assert (await ask(proxy))[0] == 429
    for _ in range(10):
        go.release()
    assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
    assert proxy.balanced()
    upstream = next(iter(proxy.server.balancer.table))
    assert (upstream.in_flight, upstream.beside) == (0, 0)


async def test_what_computes_nothing_waits_for_an_instance_that_comes_back(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0)
    proxy.server.remove_upstream(0, 1, "gone", crashed=False)
    asked = asyncio.create_task(call(proxy, "POST", "/tokenize"))
    await until(lambda: proxy.server.readings.stats()["waiting"] == 1)
    await proxy.engine(0, generation=2)
    assert await asked == 200
    assert proxy.balanced()


async def test_an_instance_that_drains_answers_what_computes_nothing_first(proxy: ProxyUnderTest) -> None:
    go = asyncio.Event()

    async def slowly(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    engine = await proxy.engine(0, slowly)
    asked = asyncio.create_task(call(proxy, "POST", "/tokenize"))
    await until(lambda: len(engine.calls) == 1)
    proxy.server.drain_upstream(0, 1)
    assert await call(proxy, "GET", "/health") == 503
    assert proxy.idle == []
    go.set()
    assert await asked == 200
    await until(lambda: proxy.idle == [(0, 1)])


async def test_what_computes_nothing_does_not_hide_that_an_engine_hangs(build: Build) -> None:
    """The API server of a hung engine goes on answering /version."""
    proxy = await build(hung_timeout_s=0.3, first_token_timeout_s=60.0, idle_timeout_s=60.0)

    async def hangs(call: Call) -> None:
        if call.target == "/v1/chat/completions":
            await call.until_left()
        else:
            await answer_chat(call)

    engine = await proxy.engine(0, hangs)
    asked = asyncio.create_task(ask(proxy, stream=True))
    await until(lambda: len(engine.calls) == 1)
    async with asyncio.timeout(SOON_S):
        while not proxy.suspects:
            assert await call(proxy, "GET", "/version") == 200
            await asyncio.sleep(0.02)
    assert proxy.suspects[0][:2] == (0, 1)
    asked.cancel()
    await until(proxy.balanced)


async def test_a_model_that_is_down_does_not_fill_the_queue_of_another(build: Build) -> None:
    """Its requests leave the full queue, the last ones first, for those of the model that answers."""
    proxy = await build("m", "z", queue_max_requests=2)
    go = asyncio.Semaphore(0)
    engine = await proxy.engine(0, gated(go))
    await (await proxy.engine(1, answer_chat, model="z")).die()
    proxy.server.remove_upstream(1, 1, "killed by signal 9")
    down = [asyncio.create_task(ask(proxy, model="z")) for _ in range(2)]
    await until(lambda: proxy.server.readings.stats()["waiting"] == 2)
    asked = [asyncio.create_task(ask(proxy, model="m")) for _ in range(9)]
    [refused], _ = await asyncio.wait(down, return_when=asyncio.FIRST_COMPLETED, timeout=SOON_S)
    status, body, retry = refused.result()
    assert status == 429
    assert json.loads(body)["error"]["code"] == "queue_full"
    assert int(retry or 0) >= 1
    # Half of the queue each: neither displaces the other any more.
    await until(lambda: len(engine.calls) == 8 and proxy.server.readings.stats()["waiting"] == 2)
    assert [(await ask(proxy, model=name))[0] for name in ("m", "z")] == [429, 429]
    for _ in range(9):
        go.release()
    assert [status for status, _, _ in await asyncio.gather(*asked)] == [200] * 9
    await proxy.engine(1, answer_chat, model="z", generation=2)
    assert sorted([status for status, _, _ in await asyncio.gather(*down)]) == [200, 429]
    assert proxy.balanced()
