"""Tasks that must not end by themselves: what fails is said once in a row, and tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from support.fakes import SOON_S, FakeClock, until

from launcher.base import background
from launcher.base.background import (
    MOST_STEP_S,
    Background,
    Failures,
    RunningClock,
    attempt,
    persist,
    time_limit,
)
from launcher.base.errors import LauncherError

log = logging.getLogger("launcher.test")
SHORT = OSError(24, "Too many open files")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(background, "RETRY_S", 0.0)
    caplog.set_level(logging.INFO, "launcher.test")


def failing(*errors: BaseException) -> Callable[[], object]:
    """Raises these one after the other, then returns 7."""
    left = list(errors)

    async def work() -> int:
        await asyncio.sleep(0)
        if left:
            raise left.pop(0)
        return 7

    return work


async def test_a_failure_is_said_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    await attempt(failing(LauncherError("cannot find x", "install x")), Failures(log, "a look"))
    assert caplog.messages == ["a look failed: cannot find x (install x); trying again"]


async def test_a_row_of_failures_is_said_once_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(log, "a look", slot=3)
    async with asyncio.timeout(SOON_S):
        assert (
            await persist(failing(SHORT, LauncherError("cannot x: y", "z"), ValueError("odd")), failures) == 7
        )
        assert await persist(failing(ValueError("odd")), failures) == 7
    assert caplog.messages == [
        "a look failed: [Errno 24] Too many open files; trying again",
        "a look works again, after 3 failures",
        "a look failed: odd; trying again",
        "a look works again, after 1 failures",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [False, False, True, False]
    assert {record.__dict__["slot"] for record in caplog.records} == {3}
    assert (failures.count, failures.last) == (0, "")


async def test_one_attempt_notes_what_it_meets() -> None:
    failures = Failures(log, "a look")
    await attempt(failing(SHORT), failures)
    assert (failures.count, failures.last) == (1, "[Errno 24] Too many open files")
    await attempt(failing(), failures)
    assert failures.count == 0


async def test_what_is_awaited_may_be_cancelled_by_others() -> None:
    failures = Failures(log, "a look")
    async with asyncio.timeout(SOON_S):
        assert await persist(failing(asyncio.CancelledError()), failures) == 7
        waiting = asyncio.create_task(persist(asyncio.Event().wait, failures))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


async def test_a_task_that_somebody_cancels_is_begun_again_while_it_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun, wanted = [], True

    async def work() -> None:
        begun.append(1)
        await asyncio.Event().wait()

    owner = Background(log, "slot 1", slot=1)
    running = owner.start(work, "watch", lambda: wanted)
    await until(lambda: len(begun) == 1)
    assert running.task is not None
    running.task.cancel()
    await until(lambda: len(begun) == 2)
    assert running.alive
    assert caplog.messages == ["slot 1: watch failed: its task was cancelled; trying again"]
    wanted = False
    running.task.cancel()
    await until(lambda: not running.alive)
    await owner.close()
    assert len(begun) == 2


async def test_the_owner_ends_them_all() -> None:
    owner = Background(log, "slot 1")
    stays, fails = owner.start(asyncio.Event().wait, "a"), owner.start(failing(*[SHORT] * 1000), "b")
    done = owner.start(failing(), "c")
    await until(lambda: not done.alive)
    await owner.close()
    assert not stays.alive
    assert not fails.alive


def test_a_gap_is_no_running_time() -> None:
    raw = FakeClock()
    clock = RunningClock(raw)
    began = clock()
    for _ in range(40):
        raw.now += 0.25
        assert clock.skipped() == 0.0
    assert clock() == began + 10
    raw.now += 3600
    assert clock() == began + 10 + MOST_STEP_S
    assert clock.skipped() == 3600 - MOST_STEP_S
    for _ in range(10):
        raw.now += 2 * MOST_STEP_S
        clock()
    assert clock() == began + 10 + 11 * MOST_STEP_S, "a loop that is always late lets time pass"


async def test_a_time_limit_does_not_count_a_gap() -> None:
    raw = FakeClock()
    clock = RunningClock(raw)
    turns = 0

    async def late_by_an_hour() -> None:
        nonlocal turns
        async with asyncio.timeout(SOON_S), time_limit(clock, MOST_STEP_S + 0.05):
            raw.now += 3600
            while True:
                await asyncio.sleep(0.001)
                turns += 1
                raw.now += 0.01 if turns > 50 else 0.0

    with pytest.raises(TimeoutError):
        await late_by_an_hour()
    assert turns > 50
