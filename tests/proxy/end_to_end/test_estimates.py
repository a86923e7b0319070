"""What the scheduler is told of requests that tell nothing, or less than their bytes seem to."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from support.keys import new_key
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import Call

from launcher.balancing.balancer import Balancer
from launcher.balancing.upstreams import Ticket
from launcher.proxy.openai.body import MAX_CHOICES
from launcher.proxy.request.most_tokens import UNKNOWN_CONTEXT

IMAGE = "data:image/png;base64," + "iVBORw0KGgo" * 50_000
LONG = "word " * 150_000


def scheduler_of(proxy: ProxyUnderTest) -> Balancer:
    return proxy.server.balancer


def learned(made: Balancer) -> tuple[object, ...]:
    line = made.costs.fit("m")
    return (
        line.count,
        line.base,
        line.slope,
        made.output_tokens(None),
        made.output_tokens(1000),
        made.prompt_tokens(400),
    )


def bound(proxy: ProxyUnderTest) -> Ticket:
    (target,) = proxy.server._instances._traffic.values()
    (relay,) = target.attempts.values()
    assert relay.ticket is not None
    return relay.ticket


async def post(
    proxy: ProxyUnderTest, path: str, payload: object, headers: dict[str, str] | None = None
) -> aiohttp.ClientResponse:
    async with proxy.client.post(path, data=json.dumps(payload), headers=headers) as answer:
        await answer.read()
        return answer


def chat(content: object, **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


async def test_a_refused_prompt_teaches_nothing(proxy: ProxyUnderTest) -> None:
    async def refuse(call: Call) -> None:
        await call.json({"error": {"message": "too long"}}, 400)

    await proxy.engine(0, refuse)
    made = scheduler_of(proxy)
    before = learned(made)
    assert (await post(proxy, "/v1/chat/completions", chat(LONG, max_tokens=1000))).status == 400
    assert learned(made) == before
    assert len(next(iter(made.table)).prefixes) == 0


@pytest.mark.parametrize("n", [1, 10**18])
async def test_what_a_client_asks_for_counts_up_to_the_context(proxy: ProxyUnderTest, n: int) -> None:
    go = asyncio.Event()

    async def refuse(call: Call) -> None:
        await go.wait()
        await call.json({"error": {"message": "too much"}}, 400)

    engine = await proxy.engine(0, refuse)
    body = chat("hello", max_tokens=10**18, n=n)
    asked = asyncio.create_task(post(proxy, "/v1/chat/completions", body))
    await until(lambda: len(engine.calls) == 1)
    demand = bound(proxy).demand
    assert demand.max_tokens == UNKNOWN_CONTEXT
    assert demand.output_tokens <= UNKNOWN_CONTEXT * MAX_CHOICES
    go.set()
    assert (await asked).status == 400


async def test_a_prompt_counts_up_to_the_context(proxy: ProxyUnderTest) -> None:
    engine = await proxy.engine(0, Call.until_left)
    asked = asyncio.create_task(post(proxy, "/v1/chat/completions", chat(LONG)))
    await until(lambda: len(engine.calls) == 1)
    assert bound(proxy).demand.prompt_tokens == UNKNOWN_CONTEXT
    asked.cancel()
    await until(proxy.balanced)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_teaches_nothing_and_heals_nothing(
    proxy: ProxyUnderTest, stream: bool
) -> None:
    engine = await proxy.engine(0, Call.until_left)
    made = scheduler_of(proxy)
    before, upstream = learned(made), next(iter(made.table))
    upstream.outliers.eject(0.0)
    upstream.outliers.end_pause(1.0)
    assert upstream.outliers.admits
    asked = asyncio.create_task(
        post(proxy, "/v1/chat/completions", chat(LONG, max_tokens=1000, stream=stream))
    )
    await until(lambda: bool(engine.calls))
    assert upstream.outliers.trial is not None
    asked.cancel()
    await until(proxy.balanced)
    await until(lambda: upstream.in_flight == 0)
    assert learned(made) == before
    assert (upstream.outliers.half_open, upstream.outliers.trial) == (True, None)
    assert len(upstream.prefixes) == 0


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/responses/render",
        "/v1/chat/completions/render",
        "/v1/completions/derender",
    ],
)
async def test_what_computes_no_prompt_is_not_taken_for_fast(build: Build, tmp_path: Path, path: str) -> None:
    key = new_key(tmp_path / "keys", "app", tokens_per_minute=10)
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    go = asyncio.Event()

    async def count(call: Call) -> None:
        await go.wait()
        await call.json({"count": 200_000})

    engine = await proxy.engine(0, count)
    made = scheduler_of(proxy)
    before = learned(made)
    asked = asyncio.create_task(post(proxy, path, chat(LONG), {"Authorization": f"Bearer {key}"}))
    await until(lambda: bool(engine.calls))
    demand = bound(proxy).demand
    assert (demand.prompt_tokens, demand.output_tokens, demand.prefix) == (0, 0, ())
    go.set()
    assert (await asked).status == 200
    assert learned(made) == before


async def test_an_image_is_not_its_bytes(build: Build, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "app", tokens_per_minute=3000)
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    go = asyncio.Semaphore(0)

    async def describe(call: Call) -> None:
        await go.acquire()
        usage = {"prompt_tokens": 1200, "completion_tokens": 20, "total_tokens": 1220}
        await call.json({"choices": [], "usage": usage})

    engine = await proxy.engine(0, describe)
    made = scheduler_of(proxy)
    before = made.prompt_tokens(400), made.costs.block_tokens
    for number in range(2):
        content = [
            {"type": "image_url", "image_url": {"url": IMAGE}},
            {"type": "text", "text": "What is it?"},
        ]
        asked = asyncio.create_task(
            post(proxy, "/v1/chat/completions", chat(content), {"Authorization": f"Bearer {key}"})
        )
        await until(lambda count=number: len(engine.calls) > count)  # type: ignore[misc]
        ticket = bound(proxy)
        assert 1000 < ticket.demand.prompt_tokens < 1100
        assert len(ticket.demand.prefix) == 8
        assert ticket.cached_blocks == (8 if number else 0)  # the same image again
        go.release()
        assert (await asked).status == 200
    assert (made.prompt_tokens(400), made.costs.block_tokens) == before


async def test_sound_is_charged_as_one_medium(build: Build, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "app", tokens_per_minute=2000)
    proxy = await build(api_keys_file=str(tmp_path / "keys"))

    async def write_down(call: Call) -> None:
        await call.json({"text": "hello"})

    await proxy.engine(0, write_down)
    for _ in range(3):
        form = aiohttp.FormData({"model": "m"})
        form.add_field("file", bytes(900_000), filename="a.wav")
        headers = {"Authorization": f"Bearer {key}"}
        async with proxy.client.post("/v1/audio/transcriptions", data=form, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
