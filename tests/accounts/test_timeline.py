"""What is told of a request, from what is kept of it."""

from __future__ import annotations

from typing import Any

from launcher.accounts.ended_request import EndedRequest, Step, What
from launcher.accounts.timeline import timeline_of


def ended(**more: Any) -> EndedRequest:
    fields: dict[str, Any] = {
        "ended_at": 1010.0, "request_id": "r1", "model": "m", "path": "/v1/chat/completions", "status": 200,
        "outcome": "completed", "slot": 2, "duration_s": 10.0, "queued_s": 3.0, "first_byte_s": 4.0, "attempts": 1,
        "prompt_tokens": 7, "output_tokens": 5, "generation": 4, "admitted_s": 0.5,
    }  # fmt: skip
    return EndedRequest(**(fields | more))


def told(of: EndedRequest) -> list[tuple[float, str]]:
    return [(step.at_s, step.what) for step in timeline_of(of).steps]


def test_one_attempt() -> None:
    timeline = timeline_of(ended())
    assert (timeline.began, timeline.ended, timeline.outcome, timeline.status) == (
        1000.0,
        1010.0,
        "completed",
        200,
    )
    assert timeline.steps == (
        Step(0.0, "received"),
        Step(0.5, "queued"),
        Step(3.0, "sent", 2, 4),
        Step(4.0, "first token", 2),
        Step(10.0, "ended"),
    )
    assert timeline.tokens is not None
    assert (timeline.tokens.prompt, timeline.tokens.output, timeline.tokens.estimated) == (7, 5, False)


def test_a_request_that_is_sent_at_once_was_not_queued() -> None:
    assert told(ended(queued_s=0.5004))[1] == (0.5004, "sent")


def test_a_whole_response_has_no_first_token() -> None:
    assert "first token" not in [what for _, what in told(ended(streamed=False))]


def test_an_error_in_the_place_of_a_stream_is_no_first_token() -> None:
    """Of the request, such as a 4xx in the only event."""
    assert "first token" not in [what for _, what in told(ended(outcome="refused"))]


def test_one_that_was_never_sent() -> None:
    refused = ended(
        queued_s=None,
        slot=None,
        attempts=0,
        outcome="rejected",
        status=429,
        reason="it is full",
        streamed=False,
    )
    assert told(refused) == [(0.0, "received"), (0.5, "queued"), (10.0, "ended")]
    timeline = timeline_of(refused)
    assert timeline.reason == timeline.steps[-1].why == "it is full"
    early = ended(queued_s=None, attempts=0, admitted_s=None, duration_s=0.1, streamed=False)
    assert told(early) == [(0.0, "received"), (0.1, "ended")]


def test_steps_that_were_noted_are_told_as_they_are() -> None:
    steps = [
        Step(3.0, What.SENT, 2, 4),
        Step(5.0, What.FAILED, 2, 4, None, "reset"),
        Step(6.0, What.SENT, 1, 1),
    ]
    assert told(ended(steps=steps)) == [
        (0.0, "received"), (0.5, "queued"), (3.0, "sent"), (5.0, "attempt failed"), (6.0, "sent"), (10.0, "ended"),
    ]  # fmt: skip


def test_one_in_flight_has_no_end() -> None:
    timeline = timeline_of(ended(outcome="", status=0, first_byte_s=None))
    assert (timeline.ended, timeline.outcome, timeline.status, timeline.tokens) == (None, None, None, None)
    assert [step.what for step in timeline.steps] == ["received", "queued", "sent"]


def test_an_entry_of_the_ledger_says_what_it_knows() -> None:
    """Of several attempts it has the time of the first and the slot of the last."""
    of_ledger = ended(attempts=3, generation=None, admitted_s=None, overflow="cloud", overflow_reason="full")
    steps = timeline_of(of_ledger, source="usage ledger").steps
    assert [step.what for step in steps] == [
        "received",
        "queued",
        "sent",
        "overflowed",
        "first token",
        "ended",
    ]
    assert (steps[2].slot, steps[2].why) == (None, "attempt 1 of 3, the last one on slot 2")
    assert (steps[3].endpoint, steps[3].why) == ("cloud", "full")
