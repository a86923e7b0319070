"""Which requests are traced, and what their upstreams are told."""

from __future__ import annotations

import random
import re

import pytest
from support.requests import request_of

from launcher.accounts.ended_request import EndedRequest
from launcher.proxy.http1.requests import parse_request
from launcher.proxy.observability.timelines import RequestTracing, parent_of
from launcher.proxy.request.record import Request

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7"
LINE = re.compile(rb"traceparent: 00-([0-9a-f]{32})-([0-9a-f]{16})-0([01])\r\n(tracestate: .*\r\n)?")


def asked(*fields: str) -> Request:
    request = request_of()
    lines = "".join(f"{field}\r\n" for field in fields)
    request.head = parse_request(f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n{lines}\r\n".encode())
    return request


def tracing(share: float, exported: list[EndedRequest] | None = None) -> RequestTracing:
    draw = random.Random(7).getrandbits  # noqa: S311
    return RequestTracing(share, draw, [].append if exported is None else exported.append)


def record(sampler: RequestTracing, request: Request) -> None:
    sampler.decide(request)
    trace = request.trace
    sampler.record(EndedRequest(1.0, "r", trace=trace if trace is not None and trace.sampled else None))


def context(lines: bytes) -> tuple[str, str, bool]:
    found = LINE.fullmatch(lines)
    assert found is not None, lines
    return found[1].decode(), found[2].decode(), found[3] == b"1"


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"cc-{TRACE}-{SPAN}-01-what-later-versions-have", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE[1:]}-{SPAN}-01", False),
        ("", False),
    ],
)
def test_traceparent(value: str, valid: bool) -> None:
    parent = parent_of(asked(f"Traceparent: {value}").head)
    assert (parent is not None) == valid
    if parent is not None:
        assert (parent.trace_id, parent.span_id, parent.sampled) == (TRACE, SPAN, True)


def test_two_of_them_are_none() -> None:
    assert parent_of(asked(*[f"traceparent: 00-{TRACE}-{SPAN}-01"] * 2).head) is None
    assert parent_of(asked().head) is None


def test_tracestate_is_joined_and_bounded() -> None:
    parent = f"traceparent: 00-{TRACE}-{SPAN}-01"
    found = parent_of(asked(parent, "tracestate: a=1", "tracestate: b=2").head)
    assert found is not None
    assert found.state == "a=1,b=2"
    found = parent_of(asked(parent, f"tracestate: a={'x' * 600}").head)
    assert found is not None
    assert not found.state


def test_a_client_that_samples_is_traced_whatever_the_share() -> None:
    exported: list[EndedRequest] = []
    sampler, request = tracing(0.0, exported), asked(f"traceparent: 00-{TRACE}-{SPAN}-01", "tracestate: a=1")
    first, second = context(sampler.lines(request)), context(sampler.lines(request))
    assert (first[0], second[0]) == (TRACE, TRACE)
    assert int(second[1], 16) == int(first[1], 16) + 1
    assert sampler.lines(request).endswith(b"tracestate: a=1\r\n")
    record(sampler, request)
    (ended,) = exported
    assert ended.trace is not None
    assert (ended.trace.parent_id, ended.trace.span_id) == (SPAN, int(first[1], 16) - 1)


def test_a_client_that_does_not_is_not_and_its_context_passes() -> None:
    exported: list[EndedRequest] = []
    sampler, request = tracing(1.0, exported), asked(f"traceparent: 00-{TRACE}-{SPAN}-00")
    assert (
        sampler.lines(request)
        == sampler.lines_outside(request)
        == f"traceparent: 00-{TRACE}-{SPAN}-00\r\n".encode()
    )
    record(sampler, request)
    assert exported == []


def test_without_a_client_s_word_the_share_decides() -> None:
    exported: list[EndedRequest] = []
    sampler = tracing(0.1, exported)
    traced = []
    for _ in range(5000):
        request = asked()
        trace_id, _, sampled = context(sampler.lines(request))
        traced += [trace_id] * sampled
        assert (sampler.lines_outside(request) == b"") is not sampled
        record(sampler, request)
    assert 400 < len(traced) < 600
    assert len(set(traced)) == len(traced)
    assert [ended.trace.trace_id for ended in exported if ended.trace is not None] == traced


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (1.0, 50)])
def test_none_and_all(share: float, count: int) -> None:
    exported: list[EndedRequest] = []
    sampler = tracing(share, exported)
    for _ in range(50):
        record(sampler, asked())
    assert len(exported) == count
