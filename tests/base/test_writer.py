"""The writer's thread: what is put is written once and in order, whatever a sink does, and the putter never waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support.daemon_process import eventually
from support.written import written

from launcher.base import writer as module
from launcher.base.errors import LauncherError
from launcher.base.writer import Problem, Sink, Writer

LOG = logging.getLogger("launcher.test")
LONG_S = 3600.0


class Numbers(Sink[int]):
    """Keeps what is written. `fault`: what a turn does before it writes."""

    def __init__(
        self, title: str = "the numbers", *, most: int = 100, every_s: float = 0.01, at_once: int = 3
    ) -> None:
        super().__init__(
            LOG, title, most=most, every_s=every_s, meanwhile="they wait in memory", longest_retry_s=0.04
        )
        self.numbers: list[int] = []
        self.at_once = at_once
        self.fault: Callable[[], Problem | None] = lambda: None
        self.turns: list[float] = []
        self.ends: list[float] = []

    def write(self) -> Problem | None:
        self.turns.append(time.monotonic())
        problem = None
        while taken := self.take(self.at_once):
            problem = self.fault()
            self.numbers += taken
            self.done()
        return problem

    def end(self, until: float) -> Problem | None:
        self.ends.append(until)
        return super().end(until)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)


@contextmanager
def hanging() -> Iterator[tuple[Callable[[], None], threading.Event]]:
    """A fault that does not return before the end of the block, and whether it began."""
    began, goes_on = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        goes_on.wait()

    try:
        yield hang, began
    finally:
        goes_on.set()


def fails(error: Exception) -> Callable[[], Problem | None]:
    def fail() -> Problem | None:
        raise error

    return fail


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOG.name]


def test_what_is_put_is_written_in_order() -> None:
    with written(Numbers()) as sink:
        for number in range(50):
            sink.put(number)
        assert sink.flush(60)
        assert (sink.numbers, sink.waiting, sink.lost) == (list(range(50)), 0, 0)
        sink.put(50)
        eventually(lambda: not sink.waiting)
    assert sink.numbers == list(range(51))


def test_what_waits_is_written_at_the_end() -> None:
    with written(Numbers(every_s=LONG_S)) as sink:
        sink.put(1)
    assert (sink.numbers, len(sink.ends)) == ([1], 1)


def test_beyond_the_bound_entries_are_refused_and_counted() -> None:
    sink = Numbers(most=10, every_s=LONG_S)
    for number in range(13):
        sink.put(number)
    assert (sink.waiting, sink.refused, sink.lost) == (10, 3, 3)
    with written(sink):
        assert sink.flush(60)
        sink.put(99)
    assert sink.numbers == [*range(10), 99]


def test_a_failure_is_said_once_and_what_was_taken_is_written_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with written(Numbers()) as sink:
        sink.fault = fails(OSError(28, "No space left on device"))
        for number in range(5):
            sink.put(number)
        eventually(lambda: len(sink.turns) > 5)
        assert not sink.flush(60)
        assert sink.problem is not None
        assert (sink.problem.why, sink.waiting) == ("no space left on device", 5)
        sink.fault = lambda: None
        eventually(lambda: sink.problem is None)
    assert sink.numbers == list(range(5))
    assert said(caplog) == [
        "cannot write the numbers: no space left on device; they wait in memory",
        "the numbers is written again",
    ]


def test_another_cause_is_said_as_well(caplog: pytest.LogCaptureFixture) -> None:
    with written(Numbers()) as sink:
        sink.put(1)
        for error in (OSError(28, "No space left on device"), LauncherError("cannot x: why", "do y")):
            sink.fault = fails(error)
            eventually(lambda: not sink.flush(60) and sink.problem)
    assert said(caplog)[1] == "cannot x: why; do y; they wait in memory"


def test_the_pause_after_failures_doubles_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    sink = Numbers(every_s=0.001)
    sink.longest_retry_s = 0.4
    with written(sink):
        sink.fault = fails(OSError(5, "Input/output error"))
        sink.put(1)
        eventually(lambda: len([begin for begin in sink.turns if begin >= failed_first(sink)]) > 5)
        sink.fault = lambda: None
    first = sink.turns.index(failed_first(sink))
    pauses = [
        after - before for before, after in zip(sink.turns[first:], sink.turns[first + 1 :], strict=False)
    ]
    assert pauses[0] >= 0.1
    assert pauses[1] >= 0.2
    assert min(pauses[2:5]) >= 0.4


def failed_first(sink: Numbers) -> float:
    """The first turn that a pause followed; the last turn where there is none yet."""
    for before, after in zip(sink.turns, sink.turns[1:], strict=False):
        if after - before >= 0.1:
            return before
    return sink.turns[-1] if sink.turns else 0.0


def test_a_problem_that_is_returned_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with written(Numbers(every_s=LONG_S)) as sink:
        sink.fault = lambda: Problem("odd", "the numbers are odd")
        sink.put(1)
        assert not sink.flush(60)
        assert sink.problem == Problem("odd", "the numbers are odd")
        assert sink.flush(60)
        assert sink.problem is None
    assert said(caplog) == ["the numbers are odd"]


def test_a_problem_that_is_returned_is_no_pause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_S", LONG_S)
    with written(Numbers()) as sink:
        sink.longest_retry_s = LONG_S
        sink.fault = lambda: Problem("odd", "the numbers are odd")
        sink.put(1)
        eventually(lambda: said(caplog))
        eventually(lambda: sink.problem is None)
    assert said(caplog) == ["the numbers are odd"]


class Broken(Numbers):
    def failed(self, error: Exception) -> Problem:
        raise ValueError("a fault of its own") from error


@pytest.mark.parametrize("kind", [Numbers, Broken])
def test_no_error_ends_the_thread(kind: type[Numbers], caplog: pytest.LogCaptureFixture) -> None:
    with written(kind()) as sink:
        sink.fault = fails(ZeroDivisionError("by zero"))
        sink.put(1)
        eventually(lambda: sink.problem)
        assert sink.problem is not None
        assert sink.problem.remedy == "report this with the daemon's log"
        sink.fault = lambda: None
        eventually(lambda: sink.problem is None)
    assert sink.numbers == [1]
    assert len([record for record in caplog.records if record.exc_info]) == 1


def test_a_sink_that_never_returns_is_named_and_memory_is_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once while it hangs, not after."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(module, "DISK_S", 0.05)
    with written(Numbers("the first", most=10)) as sink, hanging() as (hang, began):
        sink.fault = hang  # type: ignore[assignment]
        sink.put(0)
        assert began.wait(60)
        sink.look()
        for number in range(100):
            sink.put(number)
        eventually(lambda: sink.problem)
        for _ in range(2):
            sink.look()
        hung = (
            "the first: a write takes longer than 0.05 s; see whether its disk answers; they wait in memory"
        )
        assert said(caplog) == [hung]
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert sink.problem is not None
        assert sink.problem.text == "the first: a write takes longer than 0.05 s"
        assert not sink.flush(0.05)
        assert (sink.waiting, sink.lost) == (10, 91)
        sink.fault = lambda: None
    assert sink.numbers == [0, *range(9)]
    assert said(caplog) == [hung, "the first is written again"]


def test_the_end_does_not_wait_for_a_sink_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LATE_S", 0.1)
    sink = Numbers()
    writer = Writer("test", sink)
    writer.start()
    with hanging() as (hang, began):
        sink.fault = hang  # type: ignore[assignment]
        sink.put(1)
        assert began.wait(60)
        sink.put(2)
        writer.stop(0.1)
        assert said(caplog) == ["the numbers: the daemon stops, 2 entries are lost"]


def test_a_flush_before_the_start_or_without_a_writer() -> None:
    sink = Numbers()
    assert not sink.flush(60)
    writer = Writer("test", sink)
    assert not sink.flush(0.01)
    writer.stop(60)
    assert not sink.ends


def test_the_last_turn_comes_once_also_for_a_sink_whose_pause_is_long() -> None:
    sink = Numbers()
    sink.longest_retry_s = LONG_S
    writer = Writer("test", sink)
    writer.start()
    sink.fault = fails(OSError(5, "Input/output error"))
    sink.put(1)
    eventually(lambda: sink.problem)
    sink.fault = lambda: None
    writer.stop(60)
    writer.stop(60)
    assert (sink.numbers, len(sink.ends)) == ([1], 1)
