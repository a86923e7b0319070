"""Traces of requests, from the proxy to a receiver of OTLP: they cover a request's time, and continue its client's trace."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest
from support.continuations import speaks
from support.fakes import SOON_S
from support.otlp_receiver import ReceivedSpan, Receiver, receiving, uncovered
from support.overflow import Outside, outside
from support.proxy_under_test import Build, ProxyUnderTest
from support.written import written

from launcher.accounts import exporter as module
from launcher.accounts.exporter import Exporter
from launcher.config.schema import Overflow
from launcher.proxy.ended import Accounting
from launcher.proxy.observability.timelines import RequestTracing

__all__ = ["outside"]  # a fixture

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
PROMPT = "a prompt that nobody else may read"


@dataclass
class Traced:
    proxy: ProxyUnderTest
    receiver: Receiver

    async def ask(self, *, stream: bool = False, sampled: bool = True, **more: str) -> list[ReceivedSpan]:
        """The spans of one chat, the request's own first."""
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": PROMPT}],
            "temperature": 0,
            "stream": stream,
        }
        headers = {
            "traceparent": f"00-{TRACE}-{SPAN}-0{sampled:d}",
            "Authorization": "Bearer sk-secret-0123456789",
            **more,
        }
        async with (
            asyncio.timeout(SOON_S),
            self.proxy.client.post("/v1/chat/completions", data=json.dumps(body), headers=headers) as answer,
        ):
            await answer.read()
        async with asyncio.timeout(SOON_S):
            while sampled and not any(span.parent_id == SPAN for span in self.receiver.spans):
                assert not self.receiver.faults
                await asyncio.sleep(0.01)
        assert not any(PROMPT in text or "sk-secret" in text for text in self.receiver.texts)
        return self.receiver.of(TRACE)


Make = Callable[..., Awaitable[Traced]]


@pytest.fixture
def traced(build: Build, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(module, "EVERY_S", 0.02)
    with receiving() as receiver, written(Exporter(receiver.url, "1", {})) as exporter:

        async def make(**settings: object) -> Traced:
            tracing = RequestTracing(0.0, random.Random(7).getrandbits, exporter.put)  # noqa: S311
            return Traced(await build(accounting=Accounting(tracing=tracing), **settings), receiver)

        yield make


def names(spans: list[ReceivedSpan]) -> list[str]:
    return [span.name for span in spans]


async def test_one_attempt_and_its_instance_continue_the_trace(traced: Make) -> None:
    made = await traced()
    engine = await made.proxy.engine(3, generation=2)
    root, queue, attempt = spans = await made.ask(tracestate="vendor=1")
    assert names(spans) == ["chat m", "queue", "attempt"]
    assert (root.parent_id, queue.parent_id, attempt.parent_id) == (SPAN, root.span_id, root.span_id)
    assert (attempt.attributes["numa_launcher.slot"], attempt.attributes["numa_launcher.generation"]) == (
        3,
        2,
    )
    (call,) = engine.calls
    assert call.header("traceparent") == f"00-{TRACE}-{attempt.span_id}-01"
    assert call.header("tracestate") == root.state == "vendor=1"
    assert uncovered(spans) < 0.01


async def test_a_gateways_request_id_is_in_its_trace(traced: Make) -> None:
    made = await traced(trusted_proxies=("127.0.0.0/8",))
    await made.proxy.engine(0)
    root, *_ = await made.ask(**{"X-Request-Id": "ingress-1/abc"})
    assert root.attributes["numa_launcher.request.id"] == "ingress-1/abc"


async def test_a_continued_stream(traced: Make) -> None:
    made = await traced()
    engines = [await made.proxy.engine(0, speaks(4)), await made.proxy.engine(1, speaks(4))]
    engines.append(await made.proxy.engine(2, speaks(None)))
    spans = await made.ask(stream=True)
    root = spans[0]
    assert root.attributes["numa_launcher.outcome"] == "completed"
    assert {"queue", "attempt", "continuation"} <= set(names(spans))
    cut = [span for span in spans if span.name == "attempt" and span.failed]
    assert cut
    continuation = next(span for span in spans if span.name == "continuation")
    rest = [span for span in spans if span.parent_id == continuation.span_id]
    assert names(rest) == ["queue", "attempt"]
    asked = sorted(call.header("traceparent") or "" for engine in engines for call in engine.calls)
    assert asked == sorted(f"00-{TRACE}-{span.span_id}-01" for span in spans if span.name == "attempt")
    assert uncovered(spans) < 0.01


async def test_an_overflowed_request(traced: Make, outside: Outside) -> None:
    made = await traced(overflow=(Overflow(url=outside.url, name="cloud", models={"m": "big"}),))
    spans = await made.ask(stream=True)
    assert names(spans) == ["chat m", "queue", "overflow"]
    assert spans[2].attributes["numa_launcher.overflow.endpoint"] == "cloud"
    assert spans[2].events == ["first token"]
    assert uncovered(spans) < 0.01


async def test_a_client_that_does_not_sample_is_not_traced(traced: Make) -> None:
    made = await traced()
    engine = await made.proxy.engine(0)
    assert await made.ask(sampled=False) == []
    assert engine.calls[0].header("traceparent") == f"00-{TRACE}-{SPAN}-00"


async def test_an_instance_begins_no_trace_of_its_own(traced: Make) -> None:
    made = await traced()
    engine = await made.proxy.engine(0)
    async with made.proxy.chat() as answer:
        await answer.read()
    assert (engine.calls[0].header("traceparent") or "").endswith("-00")


async def test_without_tracing_a_client_s_context_passes(proxy: ProxyUnderTest) -> None:
    engine = await proxy.engine(0)
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "a=1"}
    body = json.dumps({"model": "m", "messages": []})
    async with proxy.client.post("/v1/chat/completions", data=body, headers=headers) as answer:
        await answer.read()
    assert engine.calls[0].header("traceparent") == headers["traceparent"]
    assert engine.calls[0].header("tracestate") == "a=1"
