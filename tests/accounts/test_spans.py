"""The spans of a request: what is below what, what they say, and what they never say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from launcher.accounts.ended_request import EndedRequest, Step, Trace, What
from launcher.accounts.otlp import Span
from launcher.accounts.spans import spans_of

ENTRY = EndedRequest(
    ended_at=1010.0, request_id="r1", key="team", model="m", path="/v1/chat/completions", status=200, outcome="completed",
    slot=2, duration_s=10.0, queued_s=3.0, first_byte_s=4.0, prompt_tokens=7, cached_tokens=3, output_tokens=5, attempts=1,
    predicted_s=0.5,
)  # fmt: skip
CONTINUED = [
    Step(3.0, What.SENT, 2, 4),
    Step(4.0, What.FIRST_TOKEN, 2, 4),
    Step(5.0, What.FAILED, 2, 4, None, "Connection reset by peer"),
    Step(5.0, What.QUEUED),
    Step(6.0, What.SENT, 1, 1),
    Step(6.5, What.CONTINUED, 1, 1),
    Step(7.0, What.FAILED, 1, 1, None, "it hangs"),
    Step(7.5, What.SENT, 0, 1),
    Step(8.0, What.CONTINUED, 0, 1),
]


def ended(steps: list[Step] | None = None, reason: str | None = None, **more: Any) -> EndedRequest:
    trace = Trace("0af7651916cd43dd8448eb211c80319c", 0x1000, "00f067aa0ba902b7", "vendor=1")
    return msgspec.structs.replace(
        ENTRY, reason=reason or "", generation=4, admitted_s=0.5, steps=steps, trace=trace, **more
    )


def tree(spans: list[Span]) -> list[tuple[int, str, float, float]]:
    """Depth, name, begin and end of each span."""
    parents = {span.span_id: span.parent_span_id for span in spans}

    def depth(span_id: str) -> int:
        return 0 if span_id not in parents else 1 + depth(parents[span_id])

    return [
        (
            depth(s.span_id) - 1,
            s.name,
            int(s.start_time_unix_nano) / 1e9 - 1000,
            int(s.end_time_unix_nano) / 1e9 - 1000,
        )
        for s in spans
    ]


def attributes(span: Span) -> dict[str, object]:
    return {
        each.key: next(value for value in msgspec.structs.astuple(each.value) if value is not None)
        for each in span.attributes
    }


def test_one_attempt() -> None:
    spans = spans_of(ended())
    assert tree(spans) == [(0, "chat m", 0, 10), (1, "queue", 0, 3), (1, "attempt", 3, 10)]
    root, queue, attempt = spans
    assert {span.trace_id for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert (root.parent_span_id, root.trace_state) == ("00f067aa0ba902b7", "vendor=1")
    assert (root.span_id, attempt.span_id) == ("0000000000001000", "0000000000001001")
    assert ([event.name for event in queue.events], [event.name for event in attempt.events]) == (
        ["queued"],
        ["first token"],
    )
    assert attributes(attempt) == {
        "numa_launcher.attempt": "1",
        "numa_launcher.slot": "2",
        "numa_launcher.generation": "4",
    }
    assert attributes(root) == {
        "gen_ai.provider.name": "numa_launcher",
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.request.stream": True,
        "gen_ai.response.time_to_first_chunk": 4.0,
        "gen_ai.usage.input_tokens": "7",
        "gen_ai.usage.output_tokens": "5",
        "gen_ai.usage.cache_read.input_tokens": "3",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": "200",
        "numa_launcher.request.id": "r1",
        "numa_launcher.key": "team",
        "numa_launcher.outcome": "completed",
        "numa_launcher.attempts": "1",
        "numa_launcher.usage.estimated": False,
        "numa_launcher.predicted_time_to_first_token": 0.5,
    }


def test_names_are_those_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes  # noqa: PLC0415

    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    ours = {name for name in attributes(spans_of(ended())[0]) if name.startswith("gen_ai.")}
    assert ours <= known


def test_a_continuation_has_its_own_queue_and_attempt() -> None:
    spans = spans_of(ended(CONTINUED, attempts=3, continued=2))
    assert tree(spans) == [
        (0, "chat m", 0, 10),
        (1, "queue", 0, 3),
        (1, "attempt", 3, 5),
        (1, "continuation", 5, 7),
        (2, "queue", 5, 6),
        (2, "attempt", 6, 7),
        (1, "continuation", 7, 10),
        (2, "queue", 7, 7.5),
        (2, "attempt", 7.5, 10),
    ]
    assert [span.name for span in spans if span.status is not None] == ["attempt", "attempt"]
    assert [span.span_id for span in spans if span.name == "attempt"] == [
        f"{0x1000 + n:016x}" for n in (1, 2, 3)
    ]


def test_attempts_before_the_first_byte_are_siblings() -> None:
    steps = [
        Step(3.0, What.SENT, 2, 4),
        Step(5.0, What.FAILED, 2, 4, None, "reset"),
        Step(6.0, What.SENT, 1, 1),
    ]
    assert tree(spans_of(ended(steps))) == [
        (0, "chat m", 0, 10), (1, "queue", 0, 3), (1, "attempt", 3, 5), (1, "queue", 5, 6), (1, "attempt", 6, 10),
    ]  # fmt: skip


def test_a_stream_that_is_cut_for_good() -> None:
    steps = [
        Step(3.0, What.SENT, 2, 4),
        Step(4.0, What.FIRST_TOKEN, 2, 4),
        Step(10.0, What.FAILED, 2, 4, None, "reset"),
    ]
    spans = spans_of(ended(steps, "reset; not continued: tools", outcome="failed"))
    assert [name for _, name, _, _ in tree(spans)] == ["chat m", "queue", "attempt"]
    assert [span.status is not None for span in spans] == [True, False, True]
    assert attributes(spans[0])["error.type"] == "broken_off"


def test_overflow() -> None:
    steps = [
        Step(2.0, What.OVERFLOWED, endpoint="cloud", why="full"),
        Step(3.0, What.FIRST_TOKEN, endpoint="cloud"),
    ]
    spans = spans_of(ended(steps, attempts=0, slot=None, queued_s=None))
    assert tree(spans) == [(0, "chat m", 0, 10), (1, "queue", 0, 2), (1, "overflow", 2, 10)]
    assert attributes(spans[2])["numa_launcher.overflow.endpoint"] == "cloud"


def test_a_refused_request_has_its_queue_only() -> None:
    more = {
        "queued_s": None,
        "slot": None,
        "attempts": 0,
        "streamed": False,
        "outcome": "rejected",
        "status": 429,
    }
    spans = spans_of(ended(reason="the queue is full", **more))
    assert tree(spans) == [(0, "chat m", 0, 10), (1, "queue", 0, 10)]
    assert spans[0].status is None  # of a server's span only its own errors are errors
    assert attributes(spans[0])["numa_launcher.reason"] == "the queue is full"


@pytest.mark.parametrize(("path", "name"), [("/v1/embeddings", "embeddings m"), ("/v1/rerank", "/v1/rerank")])
def test_names(path: str, name: str) -> None:
    assert spans_of(ended(path=path))[0].name == name


def test_secrets_in_reasons_are_masked() -> None:
    steps = [
        Step(3.0, What.SENT, 2, 4),
        Step(5.0, What.FAILED, 2, 4, None, "it said api_key=sk-0123456789abcdef"),
    ]
    said = msgspec.json.encode(
        spans_of(ended(steps, "Authorization: Bearer sk-0123456789abcdef", outcome="failed"))
    )
    assert b"sk-0123456789abcdef" not in said
    assert said.count(b"<redacted>") >= 2


def test_a_request_that_is_not_traced_has_none() -> None:
    assert spans_of(ENTRY) == []
