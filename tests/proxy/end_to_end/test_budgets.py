"""Budgets of API keys, as clients see them."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from support.cloud import cloud_process, make_certificate
from support.keys import new_key
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, event
from support.stored_sums import StoredSums

from launcher.accounts.budgets import Budgets, Past, Rules
from launcher.base.clock import Clock
from launcher.base.money import PICOS, token_prices
from launcher.config.schema import Overflow
from launcher.proxy.ended import Accounting

UTC = ZoneInfo("UTC")


@dataclass
class Client:
    """Uses one key."""

    proxy: ProxyUnderTest
    key: str
    budgets: Budgets
    go: asyncio.Event

    async def ask(self, **more: object) -> tuple[int, dict[str, str], dict[str, Any]]:
        body = json.dumps({"model": "m", "messages": [], "max_tokens": 5, **more})
        head = {"Authorization": f"Bearer {self.key}"}
        async with self.proxy.client.post("/v1/chat/completions", data=body, headers=head) as answer:
            text = await answer.text()
            head = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, head, {} if "stream" in more and answer.status == 200 else json.loads(text)

    @property
    def spent(self) -> int | str | None:
        return self.budgets.states()[0].spent

    @property
    def reserved(self) -> int | str:
        return self.budgets.states()[0].reserved


async def answer(call: Call) -> None:
    """100 tokens of prompt, of which 60 were cached, and 5 of output."""
    usage = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 60}}
    if call.target != "/v1/chat/completions":
        await call.json({}, 404)
    elif b'"stream": true' in call.body:
        await call.start_stream()
        for word in ("one", "two", "three", "four", "five"):
            await call.chunk(event(word))
        await call.chunk(
            b"data: " + json.dumps({"id": "x", "choices": [], "usage": usage}).encode() + b"\n\n"
        )
        await call.chunk(DONE)
        await call.end_stream()
    else:
        await call.json({"id": "x", "choices": [{"message": {"content": "hi"}}], "usage": usage})


@pytest.fixture
async def make(build: Build, tmp_path: Path) -> Any:
    async def made(budget: str, past: Past | None = None, **fields: object) -> Client:
        rules = Rules(price=token_prices(1, 100, 0.5))
        budgets = Budgets(rules, UTC, Clock(), StoredSums().slot)
        key = new_key(tmp_path / "keys", "ann", budget=budget, **fields)
        accounting = Accounting(record=budgets.spend, budgets=budgets, prices=rules.price)
        proxy = await build(api_keys_file=str(tmp_path / "keys"), accounting=accounting)
        budgets.learn(past or Past())
        go = asyncio.Event()
        go.set()

        async def script(call: Call) -> None:
            await go.wait()
            await answer(call)

        await proxy.engine(0, script)
        return Client(proxy, key, budgets, go)

    return made


async def test_a_budget_is_spent_and_told_as_openai_does(make: Any) -> None:
    client: Client = await make("200-tokens/day")
    assert (await client.ask())[0] == 200
    assert client.spent == 105
    assert (await client.ask(stream=True))[0] == 200  # it may go over
    assert (client.spent, client.reserved) == (210, 0)
    status, head, body = await client.ask()
    assert status == 429
    error = body["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "insufficient_quota",
        "insufficient_quota",
        None,
    )
    assert error["message"].startswith(
        "you exceeded your current quota: the budget of this API key is 200-tokens/day, 210 of 200 tokens are spent; "
    )
    assert error["message"].endswith("T00:00:00+00:00")
    assert head["x-should-retry"] == "false"
    assert 0 < int(head["retry-after"]) <= 86400
    assert (await client.ask(stream=True))[0] == 429  # before its head
    assert client.proxy.balanced()
    async with client.proxy.client.get("/metrics") as page:
        text = await page.text()
    assert 'numa_launcher_key_budget_spent_ratio{key="ann"} 1.05' in text
    assert 'numa_launcher_key_requests_refused_total{key="ann",limit="budget"} 2.0' in text


async def test_money_is_counted_at_the_price_of_cached_tokens(make: Any) -> None:
    client: Client = await make("1-usd/day")
    assert (await client.ask())[0] == 200
    assert (
        client.budgets._accounts["ann"].spent == 570 * PICOS // 10**6
    )  # 40 x 1, 60 x 0.5, 5 x 100 per million


async def test_running_requests_hold_each_other(make: Any) -> None:
    client: Client = await make("1000-tokens/day")
    client.go.clear()
    first, second = (asyncio.create_task(client.ask()) for _ in range(2))
    await until(lambda: client.proxy.sums()["in_flight"] == 2)
    reserved = int(client.reserved)
    assert reserved >= 2 * (512 + 5)
    status, head, body = await client.ask()
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert head["retry-after"] == "5"
    assert "x-should-retry" not in head  # a client may try again
    client.go.set()
    assert [(await task)[0] for task in (first, second)] == [200, 200]
    assert (client.spent, client.reserved) == (210, 0)
    assert (await client.ask())[0] == 200


async def test_requests_that_are_not_served_cost_nothing(make: Any) -> None:
    client: Client = await make("10M-tokens/day")
    assert (await client.ask(model="unknown"))[0] == 404
    client.proxy.server.drain_upstream(0, 1)
    client.proxy.server.remove_upstream(0, 1, "gone")

    async def fail(call: Call) -> None:
        await call.json({"error": {"message": "no"}}, 400)

    await client.proxy.engine(1, fail)
    assert (await client.ask())[0] == 400
    client.go.clear()

    async def hang(_call: Call) -> None:
        await client.go.wait()

    await client.proxy.engine(1, hang, generation=2)
    client.proxy.server.remove_upstream(1, 1, "gone")
    asked = asyncio.create_task(client.ask())
    await until(lambda: client.proxy.server.in_flight(1, 2) == 1)
    assert int(client.reserved) > 0
    asked.cancel()
    await until(lambda: not client.proxy.sums()["in_flight"])
    assert client.reserved == 0
    assert int(client.spent or 0) < 100  # its prompt


async def test_nobody_knows_what_was_spent(make: Any) -> None:
    client: Client = await make("1000-tokens/day", Past(lost_at=time.time()))
    status, head, body = await client.ask()
    assert (status, body["error"]["code"]) == (503, "budget_unknown")
    assert head["x-should-retry"] == "false"


async def test_a_large_body_is_refused_before_it_is_received(make: Any) -> None:
    client: Client = await make("100-tokens/day")
    assert (await client.ask())[0] == 200
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n"
        f"Authorization: Bearer {client.key}\r\n\r\n"
    )
    reader, _ = await client.proxy.raw(head.encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")


async def test_what_costs_nothing_is_not_refused(make: Any) -> None:
    client: Client = await make("100-tokens/day")
    await client.ask()
    assert (await client.ask())[0] == 429
    head = {"Authorization": f"Bearer {client.key}"}
    async with client.proxy.client.get("/v1/models", headers=head) as answered:
        assert answered.status == 200
    async with client.proxy.client.post("/tokenize", data='{"model": "m"}', headers=head) as answered:
        assert answered.status == 404  # the engine's own


async def test_openais_client_does_not_try_again(make: Any) -> None:
    import openai  # noqa: PLC0415  seconds, in each process that collects tests

    client: Client = await make("100-tokens/day")
    await client.ask()
    sdk = openai.AsyncOpenAI(base_url=f"{client.proxy.server.endpoint}/v1", api_key=client.key, max_retries=3)
    async with sdk:
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.chat.completions.create(model="m", messages=[])
    assert (caught.value.code, caught.value.type) == ("insufficient_quota", "insufficient_quota")
    assert "the next period begins at" in str(caught.value)
    assert client.proxy.sums()["rejected"] == 1


async def test_overflow_is_reserved_and_charged_at_its_endpoints_prices(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.path))
    budgets = Budgets(Rules(price=token_prices(1, 1)), UTC, Clock(), StoredSums().slot)
    budgets.learn(Past())
    key = new_key(tmp_path / "keys", "ann", budget="1-usd/day")
    accounting = Accounting(record=budgets.spend, budgets=budgets, prices=budgets.rules.price)
    with cloud_process(certificate) as cloud:
        overflow = (Overflow(url=cloud.url, models={"m": "big"}, input=1000.0, output=4000.0),)
        proxy = await build(api_keys_file=str(tmp_path / "keys"), accounting=accounting, overflow=overflow)
        client = Client(proxy, key, budgets, asyncio.Event())
        asked = asyncio.create_task(client.ask(cloud={"wait_s": 0.2, "say": 5}))
        await until(lambda: float(client.reserved) > 0)
        assert 0.5 < float(client.reserved) < 1  # 512 tokens and more, 0.001 each
        status, _, body = await asked
        unlimited = asyncio.create_task(client.ask(cloud={"wait_s": 0.2, "say": 1}, max_tokens=None))
        await until(lambda: float(client.reserved) > 0)
        assert float(client.reserved) > 16384 * 0.004  # max_output_tokens of the endpoint
        cost = int(budgets._accounts["ann"].spent)
        await unlimited
    assert status == 200
    said = body["usage"]
    prices = token_prices(1000, 4000)
    picos = prices.amount(said["prompt_tokens"], 0, said["completion_tokens"])
    assert cost == picos
    assert client.reserved == "0"
