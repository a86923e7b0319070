"""Requests whose first token is predicted to come too late leave for an overflow endpoint before they are queued."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.keys import new_key
from support.overflow import DONE, Outside
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import Call, answer_chat

from launcher.config.schema import Overflow

LATE_S = 5.0  # what first tokens take here, as far as the balancer knows


def teach(proxy: ProxyUnderTest, took_s: float = LATE_S) -> None:
    """As if first tokens had been that slow."""
    fit = proxy.server.balancer.costs.fit("m")
    for tokens in range(1, 60):
        fit.add(tokens, took_s)


async def ask(proxy: ProxyUnderTest, key: str | None = None) -> tuple[bytes, str | None]:
    head = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = json.dumps({"model": "m", "messages": [], "stream": True})
    async with proxy.client.post("/v1/chat/completions", data=body, headers=head) as answer:
        assert answer.status == 200
        return await answer.read(), answer.headers.get("X-Served-By")


async def test_a_late_stream_goes_there_without_a_comment(build: Build, outside: Outside) -> None:
    proxy = await build(
        overflow=(Overflow(url=outside.url, models={"m": "theirs"}, when="predicted_ttft > 4s"),),
        keepalive_comment_s=0.01,
    )
    await proxy.engine(0)
    body, _ = await ask(proxy)
    assert b"outside" not in body
    assert outside.asked == []
    teach(proxy)
    body, by = await ask(proxy)
    assert body.startswith(b'data: {"id":"outside"')
    assert by is not None
    assert by.startswith("overflow")
    await until(lambda: len(proxy.entries) == 2)
    first, second = proxy.entries
    assert (first.overflow, first.predicted_s) == ("", None)
    assert (second.overflow, second.overflow_reason) == ("127.0.0.1", "predicted")
    assert second.predicted_s == pytest.approx(LATE_S, rel=0.2)
    assert proxy.balanced()


async def test_it_is_served_here_when_the_endpoint_fails(build: Build, outside: Outside) -> None:
    proxy = await build(
        overflow=(Overflow(url=outside.url, models={"m": "theirs"}, when="predicted_ttft > 4s"),)
    )
    await proxy.engine(0)
    teach(proxy)
    outside.status = 503
    body, by = await ask(proxy)
    assert len(outside.asked) == 1
    assert b"outside" not in body
    assert body.endswith(DONE)
    assert by is None
    (entry,) = proxy.entries
    assert (entry.overflow, entry.overflow_reason, entry.attempts) == ("", "", 1)
    assert proxy.balanced()


@pytest.mark.parametrize(
    ("when", "rule", "goes"),
    [
        ("full", None, False),
        ("full", "predicted", True),
        ("predicted_ttft > 4s", "full", False),
        ("predicted_ttft > 4s", "never", False),
        ("predicted_ttft > 4s", "predicted", True),
        ("predicted_ttft > 60s", None, False),
    ],
)
async def test_the_key_s_rule(
    build: Build, tmp_path: Path, outside: Outside, when: str, rule: str | None, *, goes: bool
) -> None:
    keys = tmp_path / "keys"
    key = new_key(keys, "app", **({} if rule is None else {"overflow": rule}))
    proxy = await build(
        overflow=(Overflow(url=outside.url, models={"m": "theirs"}, when=when),), api_keys_file=str(keys)
    )
    await proxy.engine(0)
    teach(proxy)
    await ask(proxy, key)
    assert len(outside.asked) == goes
    (entry,) = proxy.entries
    assert entry.predicted_s == pytest.approx(LATE_S, rel=0.2)


async def test_predictions_of_streams_are_compared_with_what_they_took(build: Build) -> None:
    proxy = await build()

    async def slowly(call: Call) -> None:
        await asyncio.sleep(0.05)
        await answer_chat(call)

    await proxy.engine(0, slowly)
    for _ in range(8):
        await ask(proxy)
    async with proxy.client.get("/metrics") as answer:
        page = await answer.text()
    count = page.partition("numa_launcher_ttft_prediction_error_seconds_count ")[2].partition("\n")[0]
    predicted = [entry for entry in proxy.entries if entry.predicted_s is not None]
    assert float(count) == len(predicted) >= 3
    assert all(0.05 < (entry.predicted_s or 0.0) < 2.0 for entry in predicted)
