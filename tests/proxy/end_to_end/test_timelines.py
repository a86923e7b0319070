"""What the proxy tells of requests that it has served, and of those that it serves."""

from __future__ import annotations

import asyncio
import json

from support.continuations import speaks
from support.fakes import SOON_S
from support.overflow import Outside, outside
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import Call

from launcher.accounts.timeline import Timeline
from launcher.config.schema import Overflow

__all__ = ["outside"]  # a fixture


async def ask(proxy: ProxyUnderTest, name: str, *, stream: bool = False) -> Timeline:
    """A chat with this id; what is told of it."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "stream": stream}
    headers = {"X-Request-Id": name}
    async with (
        asyncio.timeout(SOON_S),
        proxy.client.post("/v1/chat/completions", data=json.dumps(body), headers=headers) as answer,
    ):
        await answer.read()
    found = proxy.server.requests.timeline(name)
    assert found is not None
    ats = [step.at_s for step in found.steps]
    assert ats == sorted(ats)
    assert (found.steps[0].what, found.steps[0].at_s, found.steps[-1].what) == ("received", 0.0, "ended")
    return found


def what(found: Timeline) -> list[tuple[str, int | None, int | None]]:
    return [(step.what, step.slot, step.generation) for step in found.steps[1:-1]]


async def test_one_attempt(proxy: ProxyUnderTest) -> None:
    await proxy.engine(3, generation=2)
    found = await ask(proxy, "whole")
    assert what(found) == [("sent", 3, 2)]
    assert (found.outcome, found.status, found.route, found.model) == (
        "completed",
        200,
        "/v1/chat/completions",
        "m",
    )
    assert what(await ask(proxy, "stream", stream=True)) == [("sent", 3, 2), ("first token", 3, None)]


async def breaks(call: Call) -> None:
    call.cut()


async def test_a_failed_attempt_says_why(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0, breaks)
    await proxy.engine(1, breaks)
    await proxy.engine(2)
    found = await ask(proxy, "r")
    steps = what(found)
    assert steps[-1] == ("sent", 2, 1)
    assert [step[0] for step in steps] == ["sent", "attempt failed"] * (len(steps) // 2) + ["sent"]
    assert all(step.why for step in found.steps if step.what == "attempt failed")


async def test_a_continued_stream(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0, speaks(4))
    await proxy.engine(1, speaks(4))
    await proxy.engine(2, speaks(None))
    found = await ask(proxy, "r", stream=True)
    names = [step.what for step in found.steps]
    assert names[:4] == ["received", "sent", "first token", "attempt failed"]
    assert names[-3:] == ["sent", "continued", "ended"]
    cut = next(step for step in found.steps if step.what == "attempt failed")
    assert cut.why
    assert cut.slot in {0, 1}
    assert found.steps[-2].slot == 2


async def test_a_request_that_failed_ends_with_its_reason(proxy: ProxyUnderTest) -> None:
    await proxy.engine(0, breaks)
    found = await ask(proxy, "r")
    assert found.outcome == "failed"
    assert found.reason
    assert found.steps[-1].why == found.reason
    assert found.steps[-2].what == "attempt failed"


async def test_waiting_in_the_queue(build: Build) -> None:
    proxy = await build(park_timeout_s=30.0)
    first = await proxy.engine(0)
    proxy.server.remove_upstream(0, 1, "it ended")
    await first.__aexit__()
    asked = asyncio.create_task(ask(proxy, "r"))
    await until(lambda: proxy.server.requests.timeline("r") is not None)
    running = proxy.server.requests.timeline("r")
    assert running is not None
    assert (running.outcome, running.ended, running.tokens) == (None, None, None)
    await asyncio.sleep(0.01)
    await proxy.engine(1)
    assert what(await asked) == [("queued", None, None), ("sent", 1, 1)]


async def test_one_that_overflowed(build: Build, outside: Outside) -> None:
    proxy = await build(overflow=(Overflow(url=outside.url, name="cloud", models={"m": "big"}),))
    sent, first = (await ask(proxy, "r", stream=True)).steps[1:-1]
    assert (sent.what, sent.endpoint, sent.why) == ("overflowed", "cloud", "full")
    assert (first.what, first.endpoint, first.slot) == ("first token", "cloud", None)
    outside.status = 500
    sent, failed = (await ask(proxy, "refused")).steps[1:-1]
    assert (failed.what, failed.endpoint, failed.why) == ("attempt failed", "cloud", "it answered 500")


async def test_unknown(proxy: ProxyUnderTest) -> None:
    assert proxy.server.requests.timeline("never") is None
    await proxy.engine(0)
    await ask(proxy, "same")
    assert (await ask(proxy, "same")).same_id == 1
    async with proxy.client.get("/health", headers={"X-Request-Id": "page"}) as answer:
        assert answer.status == 200
    assert proxy.server.requests.timeline("page") is None
