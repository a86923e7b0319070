"""The wall clock against elapsed time: what a step is, when a period may begin, what may be deleted."""

from __future__ import annotations

import pytest
from support.hand_clock import DAY_S, HOUR_S, STEPS_S, HandClock
from support.source_tree import ROOT

from launcher.base.clock import BELIEVED_S, SETTLED_S, Clock, Period

MIDNIGHT = 20_000 * int(DAY_S)
NOON = MIDNIGHT + 12 * HOUR_S


def day(now: float) -> tuple[int, int]:
    begin = int(now // DAY_S * DAY_S)
    return begin, begin + int(DAY_S)


def test_the_machines_clocks_agree() -> None:
    clock = Clock()
    before, after = clock.now(), clock.now()
    assert before.wall <= after.wall
    assert before.steady <= after.steady
    assert (after.steps, abs(after.wall - after.steady) < 1) == (0, True)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_step_is_counted_and_moves_no_steady_time(step_s: float, caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock(NOON)
    clock.wait(60)
    assert clock.set_by(step_s) == (NOON + 60 + step_s, NOON + 60, 1)
    clock.wait(60)
    assert clock.now() == (NOON + 120 + step_s, NOON + 120, 1)
    assert f"set {'forward' if step_s > 0 else 'back'} by {abs(step_s):.0f} s" in caplog.text


def test_slewing_is_no_step() -> None:
    """chrony makes 8 % more or fewer seconds of a second; a leap second is one."""
    clock = HandClock(NOON)
    for _ in range(1000):
        clock.wait(60)
        clock.set_by(60 * 0.083)
    clock.set_by(-1)
    now = clock.now()
    assert now.steps == 0
    assert now.steady == pytest.approx(now.wall)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_nothing_is_deleted_by_a_time_that_the_clock_was_only_set_to(step_s: float) -> None:
    clock = HandClock(NOON)
    assert clock.delete_before(DAY_S) is None
    clock.settle()
    assert clock.delete_before(DAY_S) == NOON + SETTLED_S - DAY_S
    clock.set_by(step_s)
    assert clock.delete_before(DAY_S) is None
    clock.settle()
    assert clock.delete_before(DAY_S) == NOON + 2 * SETTLED_S + min(0.0, step_s) - DAY_S


@pytest.mark.parametrize("step_s", STEPS_S)
def test_the_next_process_of_the_same_start_goes_on(step_s: float) -> None:
    clock = HandClock(NOON)
    clock.settle()
    clock.at += step_s
    clock = clock.restarted()
    assert clock.now() == (NOON + SETTLED_S + step_s, NOON + SETTLED_S, 1)
    assert clock.now().was_set
    clock = clock.restarted()
    assert not clock.now().was_set  # since the process before
    assert clock.delete_before(DAY_S) is None
    clock.settle()
    found = clock.delete_before(0)
    assert found is not None
    assert found <= NOON + 2 * SETTLED_S
    clock.wait(BELIEVED_S)
    assert clock.delete_before(0) == clock.at
    clock.at += step_s
    assert clock.restarted().now().was_set


def test_a_reading_of_an_earlier_start_says_nothing() -> None:
    clock = HandClock(NOON)
    clock.set_by(DAY_S)
    assert not HandClock(NOON, 5.0, clock.reading).now().was_set


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_period_after_a_restart_is_the_one_that_the_clock_was_set_from(step_s: float) -> None:
    clock = HandClock(NOON)
    clock.at += step_s
    clock = clock.restarted()
    period = Period(day, clock.now())
    assert period.begin == MIDNIGHT
    assert not period.is_due(clock.now())
    assert not period.move(clock.now())
    assert (period.begin, period.end) == day(clock.now().wall)


def test_without_a_step_a_period_follows_the_other() -> None:
    clock = HandClock(NOON)
    period = Period(day, clock.now())
    for number in range(1, 4):
        clock.wait(DAY_S - 1 if number > 1 else DAY_S / 2 - 1)
        assert not period.is_due(clock.now())
        clock.wait(1)
        assert period.is_due(clock.now())
        assert period.move(clock.now())
        assert (period.begin, period.carries) == (MIDNIGHT + number * DAY_S, False)


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_step_waits_for_the_sums_and_carries_what_was_counted(step_s: float) -> None:
    clock = HandClock(NOON)
    period = Period(day, clock.now())
    now = clock.set_by(step_s)
    assert not period.is_due(now)
    assert not period.move(now)
    assert (period.begin, period.end) == day(now.wall)
    assert period.carries == (period.begin != MIDNIGHT)
    clock.wait(12 * HOUR_S)  # the day before has elapsed
    if period.is_due(clock.now()):
        assert period.move(clock.now())
    assert not period.carries
    assert (period.begin, period.end) == day(
        clock.now().wall if abs(step_s) > 3 * HOUR_S or step_s > 0 else NOON
    )


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_wrong_minute_leaves_nothing_behind(step_s: float) -> None:
    clock = HandClock(NOON)
    period = Period(day, clock.now())
    period.move(clock.set_by(step_s))
    clock.wait(60)
    assert not period.move(clock.set_by(-step_s))
    assert period.begin == MIDNIGHT
    clock.wait(12 * HOUR_S)
    assert period.is_due(clock.now())
    assert period.move(clock.now())
    assert (period.begin, period.carries) == (MIDNIGHT + DAY_S, False)


@pytest.mark.parametrize("unit", ["numa-launcher", "numa-launcher-ingress", "numa-launcher-ray"])
def test_units_wait_for_the_right_time(unit: str) -> None:
    lines = (ROOT / "systemd" / f"{unit}.service").read_text(encoding="utf-8").splitlines()
    for setting in ("After=", "Wants="):
        [targets] = [line for line in lines if line.startswith(setting)]
        assert "time-sync.target" in targets.split("=")[1].split()
