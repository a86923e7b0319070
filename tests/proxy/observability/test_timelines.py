"""Which requests are kept, and for how long."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
from support.requests import request_of

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.timeline import What
from launcher.proxy.observability.timelines import LATE, LATE_S, RECENT, UNUSUAL, Timelines
from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.record import MAX_STEPS, Request


def keep(
    timelines: Timelines, name: str, *, waited_s: float = 0.0, failed: bool = False, now: float = 1.0
) -> None:
    outcome = Outcome.FAILED if failed else Outcome.COMPLETED
    ended = EndedRequest(ended_at=now, request_id=name, outcome=outcome, queued_s=waited_s, streamed=False)
    timelines.keep(ended, now)


def names(timelines: Timelines, *asked: str) -> list[str]:
    return [name for name in asked if timelines.find(name)]


def test_recent_ones_are_kept_and_failed_and_late_ones_longer() -> None:
    timelines = Timelines()
    for number in range(LATE):
        keep(timelines, f"first {number}", waited_s=0.1)
    keep(timelines, "failed", failed=True)
    keep(timelines, "late", waited_s=9.0)
    keep(timelines, "usual", waited_s=0.05)
    assert timelines.complete_since is None
    for number in range(RECENT):
        keep(timelines, f"more {number}", waited_s=0.05, now=2.0)
    assert names(timelines, "failed", "late", "usual", "more 0") == ["failed", "late", "more 0"]
    assert timelines.complete_since == 2.0
    for number in range(UNUSUAL):
        keep(timelines, f"failed {number}", failed=True, now=3.0)
    for number in range(RECENT):
        keep(timelines, f"again {number}", waited_s=0.05, now=4.0)
    assert names(timelines, "failed", "failed 0", "late") == ["failed 0", "late"]


def test_late_ones_are_kept_for_two_half_hours() -> None:
    timelines = Timelines()

    def flood(now: float) -> None:
        for number in range(RECENT):
            keep(timelines, f"{now} {number}", now=now)

    keep(timelines, "late", waited_s=9.0)
    flood(2.0)
    keep(timelines, "later", waited_s=1.0, now=LATE_S + 2)
    flood(LATE_S + 3)
    assert names(timelines, "late", "later") == ["late", "later"]
    keep(timelines, "latest", waited_s=1.0, now=2 * LATE_S + 3)
    flood(2 * LATE_S + 4)
    assert names(timelines, "late", "later", "latest") == ["later", "latest"]
    keep(timelines, "after a pause", waited_s=1.0, now=9 * LATE_S)
    flood(9 * LATE_S + 1)
    assert names(timelines, "later", "latest", "after a pause") == ["after a pause"]


def test_of_one_id_the_latest_comes_first() -> None:
    timelines = Timelines()
    for at in (1.0, 3.0, 2.0):
        keep(timelines, "same", now=at, failed=True)
    assert [ended.ended_at for ended in timelines.find("same")] == [3.0, 2.0, 1.0]


def noted(request: Request) -> Request:
    request.bound = request.started
    for number in range(4):
        request.note(What.FAILED, request.started + number, why="Connection reset by peer")
    return request


@pytest.mark.budget
def test_memory_is_bounded() -> None:
    def full() -> Timelines:
        timelines = Timelines()
        for number in range(RECENT + UNUSUAL):
            request = noted(request_of()) if number < UNUSUAL else request_of()
            name = f"0123456789abcdef0123{number:x}"
            ended = EndedRequest(
                number * 1.1, name, "team", "m", "", request.path, 200, "completed", 1, number * 1.2, number * 1.3,
                number * 1.4, 1000 + number, 500, 300 + number, bytes_in=1000 + number, bytes_out=2000 + number,
                generation=300, admitted_s=number * 1.5, steps=request.steps,
            )  # fmt: skip
            timelines.keep(ended, 1.0)
        return timelines

    gc.collect()
    tracemalloc.start()
    timelines = full()
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(timelines) == RECENT
    assert size < 6 << 20, size


def test_steps_of_one_request_are_bounded() -> None:
    request = request_of()
    for number in range(3 * MAX_STEPS):
        request.note(What.FAILED, request.started + number)
    assert request.steps is not None
    assert len(request.steps) == MAX_STEPS
    assert (request.steps[0].at_s, request.steps[-1].at_s) == (0.0, 3.0 * MAX_STEPS - 1)
