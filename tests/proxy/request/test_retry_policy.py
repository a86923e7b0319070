"""When a request is tried again, and when it is given up."""

from __future__ import annotations

import pytest
from support.balancing import up

from launcher.proxy.request.retry_policy import (
    MAX_ATTEMPTS,
    MAX_FAILED,
    MAX_ROUNDS,
    MAX_TIMES,
    PARKED_PAUSE_S,
    ROUND_PAUSE_S,
    FailedAttempts,
    RetryPolicy,
)

NOW = 100.0


def after(
    failures: FailedAttempts,
    *,
    attempts: int = 1,
    now: float = NOW,
    timeout_s: float = 0.0,
    possible: bool = True,
) -> float | None:
    return RetryPolicy(30.0).next(failures, attempts, 2, now, timeout_s=timeout_s, possible=possible)


def test_an_instance_that_is_left_is_tried_at_once() -> None:
    assert after(FailedAttempts()) == 0.0


def test_rounds_without_a_response_are_repeated_a_few_times() -> None:
    failures = FailedAttempts()
    pauses = []
    for _ in range(MAX_ROUNDS + 1):
        failures.reached = True
        pauses.append(after(failures, possible=False))
    assert pauses == [ROUND_PAUSE_S] * MAX_ROUNDS + [None]


def test_while_nothing_is_reached_it_waits_for_the_parking_time() -> None:
    failures = FailedAttempts()
    assert after(failures, possible=False) == ROUND_PAUSE_S
    failures.unreached = 2 * MAX_ROUNDS
    assert after(failures, now=NOW + 29.0, possible=False) == PARKED_PAUSE_S
    assert after(failures, now=NOW + 30.0, possible=False) is None


def test_connects_that_fail_are_no_attempts() -> None:
    failures = FailedAttempts()
    failures.unreached = MAX_ATTEMPTS
    assert after(failures, attempts=2 * MAX_ATTEMPTS - 1) == 0.0
    assert after(failures, attempts=2 * MAX_ATTEMPTS) is None


@pytest.mark.parametrize("gone", [False, True])
def test_a_request_that_living_instances_fail_at_is_given_up(gone: bool) -> None:
    failures = FailedAttempts()
    failures.blamed = [up(number) for number in range(MAX_FAILED)]
    if gone:  # an instance that was stopped broke the connection for that
        failures.blamed[0].gone = "it was stopped"
    assert (after(failures) is None) is not gone
    why = failures.why_given_up(0.0, "it closed the connection")
    assert ("the request itself may be the cause: 5 attempts on 5 instances failed" in why) is not gone


def test_all_attempts_together_have_a_few_time_outs_of_one() -> None:
    failures = FailedAttempts()
    assert failures.left_s(4.0) == 4.0
    failures.waited_s = 4.0 * MAX_TIMES - 1.0
    assert failures.left_s(4.0) == 1.0
    assert after(failures, timeout_s=4.0) == 0.0
    failures.waited_s += 1.0
    assert after(failures, timeout_s=4.0) is None
    assert after(failures, timeout_s=0.0) == 0.0, "no time-out, no bound"
    assert failures.why_given_up(4.0, "no first byte") == "no first byte; all attempts together took 12 s"


def test_no_wait_counts_the_time_of_a_freeze() -> None:
    failures = FailedAttempts()
    failures.excuse(100.0)
    failures.queued_since = NOW
    assert after(failures, possible=False) == ROUND_PAUSE_S, "parked for 30 s"
    failures.excuse(100.0)
    assert after(failures, now=NOW + 129.0, possible=False) is not None
    assert after(failures, now=NOW + 130.0, possible=False) is None
    failures.note_bound(NOW + 101.0)
    assert failures.queued_s == 1.0
