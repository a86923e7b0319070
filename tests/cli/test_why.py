"""What `why REQUEST` prints."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from launcher.accounts.ended_request import EndedRequest, Step, What
from launcher.accounts.timeline import timeline_of
from launcher.cli.why import request_to_text

STEPS = [
    Step(0.4, What.SENT, 2, 3),
    Step(1.0, What.FIRST_TOKEN, 2, 3),
    Step(2.0, What.FAILED, 2, 3, None, "Connection reset by peer"),
    Step(2.001, What.SENT, 1, 1),
    Step(2.1, What.CONTINUED, 1, 1),
]
ENTRY = EndedRequest(
    ended_at=1004.0, request_id="r1", key="team", model="m", path="/v1/chat/completions", status=200, outcome="completed",
    slot=1, duration_s=4.0, queued_s=0.4, first_byte_s=1.0, prompt_tokens=1200, cached_tokens=800, output_tokens=40,
    attempts=2, continued=1, predicted_s=0.25,
)  # fmt: skip


def text(*, steps: list[Step] | None = None, reason: str | None = None, **more: Any) -> str:
    ended = msgspec.structs.replace(
        ENTRY, reason=reason or "", generation=3, admitted_s=0.0, steps=steps, **more
    )
    timeline = timeline_of(ended)
    return request_to_text(msgspec.to_builtins(timeline), now=1005.0)


def test_a_continued_stream() -> None:
    lines = text(steps=STEPS).splitlines()
    assert lines[0] == "request r1: /v1/chat/completions, model m, key team, stream"
    assert lines[1].endswith(", took 4.00 s")
    assert lines[2:] == [
        "  outcome: completed, status 200",
        "  tokens:  1,200 of the prompt (800 cached), 40 generated",
        "  first token: after 1.00 s, predicted after 250.0 ms",
        "  steps:",
        "         0.000 s  received",
        "         0.000 s  queued",
        "         0.400 s  sent to slot 2 (generation 3)",
        "         1.000 s  first token from slot 2 (generation 3)",
        "         2.000 s  slot 2 (generation 3) failed: Connection reset by peer",
        "         2.001 s  sent to slot 1 (generation 1)",
        "         2.100 s  continued by slot 1 (generation 1)",
        "         4.000 s  ended",
        "  time:    waiting 401.0 ms (10%), slot 2 (generation 3) 1.60 s (40%), slot 1 (generation 1) 2.00 s (50%)",
    ]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"outcome": "failed", "status": 502, "reason": "no way"}, "outcome: failed, status 502: no way"),
        ({"outcome": "client_aborted", "status": 0}, "outcome: its client left before the end\n"),
        ({"outcome": ""}, "so far 5.00 s"),
        ({"exact": False}, "about 1,200 of the prompt"),
        ({"streamed": False}, "first token: predicted after 250.0 ms"),
        ({"steps": [Step(0.1, What.OVERFLOWED, endpoint="cloud", why="full")]}, "to overflow endpoint cloud: the queue"),
        ({"steps": [Step(0.1, What.QUEUED, why="every instance was tried")]}, "queued: every instance was tried"),
        ({"steps": [Step(0.1, "of a later version")]}, "0.100 s  of a later version"),
    ],
)  # fmt: skip
def test_words(more: dict[str, Any], said: str) -> None:
    assert said in text(**more)


def test_what_the_ledger_and_the_id_leave_open_is_noted() -> None:
    timeline = timeline_of(ENTRY, source="usage ledger", same_id=2)
    said = request_to_text(msgspec.to_builtins(timeline), now=1005.0)
    assert "note: 2 more requests in memory have this id" in said
    assert "note: from the usage ledger" in said
