"""Rows of all spans: thinned, found, and kept through restarts and a clock that is set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.history_rows import NOON, row, slot, value

from launcher.telemetry.history import History
from launcher.telemetry.history_columns import Row, thin
from launcher.telemetry.history_file import DAY as MINUTES
from launcher.telemetry.history_file import FILE_BYTES, MemoryStore
from launcher.telemetry.history_file import HOUR as HOURS

SECOND, MINUTE, TEN, HOUR = 1000, 60_000, 600_000, 3_600_000


def found(history: History, span: str, now: int, after: int = 0) -> list[Row]:
    it = history.find(span, after, now)
    return list(it.ring.rows(it.ring.read(it.after, it.until), it.until))


def recorded(history: History, begin: int, end: int) -> int:
    """A row for each 2 s in (begin, end]; its value is its number since NOON."""
    for ms in range(begin + 2000, end + 1, 2000):
        history.add(
            [row(ms, slot(0, tokens_per_s=1), requests_per_s=(ms - NOON) // 2000, queued=ms // 2000 % 7)]
        )
    return end


def test_nothing_yet() -> None:
    history = History(MemoryStore(), NOON)
    for span in ("1h", "1d", "90d"):
        assert found(history, span, NOON) == []
        assert history.find(span, 0, NOON).until == 0


def test_a_longer_step_is_there_when_its_last_row_is() -> None:
    history = History(MemoryStore(), NOON)
    recorded(history, NOON, NOON + TEN - 2000)
    assert [each.ms - NOON for each in found(history, "1d", NOON + TEN)] == [n * MINUTE for n in range(1, 10)]
    assert found(history, "90d", NOON + TEN) == []
    recorded(history, NOON + TEN - 2000, NOON + TEN)
    (ten,) = found(history, "90d", NOON + TEN)
    assert (ten.ms, ten.seconds, value(ten, "requests_per_s"), value(ten, "queued")) == (
        NOON + TEN,
        600,
        150.5,
        6,
    )
    minute = found(history, "1d", NOON + TEN)[-1]
    assert (minute.seconds, value(minute, "requests_per_s")) == (60, 285.5)
    assert minute.slots[0].tokens_per_s == 1


# Of one run: how many rows it adds, and how many steps the next one begins later.
RUNS = st.lists(st.tuples(st.integers(0, 400), st.sampled_from([0, 1, 7, 40, 350])), min_size=1, max_size=5)


@settings(max_examples=5)
@given(RUNS)
def test_restarts_change_no_row(runs: Sequence[tuple[int, int]]) -> None:
    """One history that runs all the time, and one that begins again with what the store has: the same rows."""
    store = MemoryStore()
    steady, now = History(MemoryStore(), NOON), NOON
    for rows, pause in runs:
        restarted = History(store, now)
        for history in (steady, restarted):
            recorded(history, now, now + rows * 2000)
        now += (rows + pause) * 2000
    restarted = History(store, now)
    # The next row thins the step that the last one was in.
    for history in (steady, restarted):
        history.add([row(now + TEN)])
    for span in ("1h", "1d", "90d"):
        assert found(steady, span, now + TEN) == found(restarted, span, now + TEN)


@settings(max_examples=10)
@given(st.sets(st.integers(1, 700), min_size=1))
def test_a_longer_row_is_made_of_its_rows_and_a_step_without_rows_is_a_gap(steps: set[int]) -> None:
    """`steps`: which rows of 2 s there are."""
    rows = {n: row(NOON + n * 2000, requests_per_s=n) for n in sorted([*steps, 900])}
    history = History(MemoryStore(), NOON)
    history.add(rows.values())
    for span, size in (("1d", 30), ("90d", 300)):
        steps_of = {
            end: [each for n, each in rows.items() if end - size < n <= end] for end in range(size, 901, size)
        }
        expected = [thin(mine, NOON + end * 2000) for end, mine in steps_of.items() if mine]
        assert found(history, span, NOON + 900 * 2000) == expected


def test_a_restart_thins_what_a_killed_process_did_not() -> None:
    store = MemoryStore()
    recorded(History(store, NOON), NOON, NOON + 90 * SECOND)
    history = History(store, NOON + 20 * HOUR)
    assert [(each.ms - NOON, each.seconds) for each in found(history, "1d", NOON + 20 * HOUR)] == [
        (MINUTE, 60), (2 * MINUTE, 30),
    ]  # fmt: skip
    assert [(each.ms - NOON, each.seconds) for each in found(history, "90d", NOON + 20 * HOUR)] == [(TEN, 90)]
    assert found(history, "1h", NOON + 20 * HOUR) == []


def test_rows_that_were_overwritten_meanwhile_do_not_spoil_a_longer_row() -> None:
    store = MemoryStore()
    now = recorded(History(store, NOON), NOON, NOON + TEN)
    # An hour later the places of the first rows of that step are taken.
    now = recorded(History(store, now), NOON + HOUR, NOON + HOUR + 4 * MINUTE)
    first = found(History(store, now), "90d", now)[0]
    assert (first.ms, first.seconds) == (NOON + TEN, 600)


def test_a_step_whose_rows_stand_around_those_of_an_earlier_turn() -> None:
    """The daemon was killed twice within a minute, an hour after the ring was filled."""
    store = MemoryStore()
    recorded(History(store, NOON), NOON, NOON + MINUTE)
    later = NOON + HOUR
    for begin in (0, 10, 40, 50):
        recorded(
            History(store, later + begin * SECOND), later + begin * SECOND, later + begin * SECOND + 6000
        )
    history = History(store, later + MINUTE)
    (minute,) = [each for each in found(history, "1d", later + MINUTE) if each.ms == later + MINUTE]
    assert (minute.seconds, value(minute, "requests_per_s")) == (24, HOUR // 2000 + (2 + 7 + 22 + 27) / 4)


def test_after() -> None:
    history = History(MemoryStore(), NOON)
    now = recorded(history, NOON, NOON + MINUTE)
    assert [each.ms - now for each in found(history, "1h", now, now - 4000)] == [-2000, 0]
    assert [each.ms - now for each in found(history, "1h", now, now - 3999)] == [-2000, 0]
    assert found(history, "1h", now, now) == []
    assert history.find("1h", now, now).until == now


def test_only_the_span_is_found() -> None:
    history = History(MemoryStore(), NOON)
    now = recorded(history, NOON, NOON + HOUR + MINUTE)
    rows = found(history, "1h", now)
    assert (len(rows), rows[0].ms, rows[-1].ms) == (1800, now - HOUR + 2000, now)
    later = now + HOUR // 2
    assert (len(found(history, "1h", later)), found(history, "1h", later)[-1].ms) == (900, now)
    assert found(history, "1h", now + HOUR) == []


def test_a_clock_that_is_set_back() -> None:
    history = History(MemoryStore(), NOON)
    now = recorded(history, NOON, NOON + 10 * MINUTE)
    back = recorded(history, NOON, NOON + MINUTE)
    assert history.find("1h", 0, back).until == back
    assert len(found(history, "1h", back)) == 30
    # Who knows rows of the future gets all of the present.
    assert found(history, "1h", back, now) == found(history, "1h", back)
    assert len(found(history, "1h", back, back - 2000)) == 1


def test_rows_of_a_future_clock_do_not_count_after_a_restart() -> None:
    store = MemoryStore()
    recorded(History(store, NOON), NOON, NOON + 20 * SECOND)
    recorded(History(store, NOON), NOON + HOUR, NOON + HOUR + 4000)
    history = History(store, NOON + 30 * SECOND)
    assert history.find("1h", 0, NOON + 30 * SECOND).until == NOON + 20 * SECOND


def test_a_clock_that_is_set_forward_thins_the_step_that_it_left() -> None:
    history = History(MemoryStore(), NOON)
    recorded(history, NOON, NOON + 30 * SECOND)
    now = recorded(history, NOON + 5 * HOUR + 10 * SECOND, NOON + 5 * HOUR + 20 * SECOND)
    assert [(each.ms - NOON, each.seconds) for each in found(history, "1d", now)] == [(MINUTE, 30)]


def test_slots_of_the_rows_that_are_asked_for() -> None:
    history = History(MemoryStore(), NOON)
    history.add([row(NOON + 2000, slot(0), slot(1)), row(NOON + 4000, slot(0)), row(NOON + 6000, slot(3))])
    now = NOON + 6000
    assert history.find("1h", 0, now).slots == (0, 1, 3)
    assert history.find("1h", NOON + 2000, now).slots == (0, 3)
    assert history.find("1h", NOON + 4000, now).slots == (3,)
    assert history.find("1h", now, now).slots == ()


def test_slots_are_known_after_a_restart() -> None:
    store = MemoryStore()
    recorded(History(store, NOON), NOON, NOON + MINUTE)
    history = History(store, NOON + MINUTE)
    assert history.find("1d", 0, NOON + MINUTE).slots == history.find("1h", 0, NOON + MINUTE).slots == (0,)
    assert history.find("90d", 0, NOON + MINUTE).slots == ()


def test_taking_the_rows_of_another_history() -> None:
    """The other was in memory while the file could not be used."""
    store = MemoryStore()
    recorded(History(store, NOON), NOON, NOON + MINUTE)
    other = History(MemoryStore(), NOON)
    now = recorded(other, NOON + 2 * MINUTE, NOON + 3 * MINUTE)
    history = History(store, now)
    history.take(other)
    assert len(found(history, "1h", now)) == 60
    assert [each.ms - NOON for each in found(history, "1d", now)] == [MINUTE, 3 * MINUTE]
    assert history.find("1h", 0, now).until == now


def test_a_step_whose_rows_are_unreadable_is_a_gap() -> None:
    store = MemoryStore()
    history = History(store, NOON)
    recorded(history, NOON, NOON + 30 * SECOND)
    store.write(0, bytes(FILE_BYTES))
    now = recorded(history, NOON + MINUTE + 2000, NOON + MINUTE + 6000)
    assert found(history, "1d", now) == []
    assert len(found(history, "1h", now)) == 2


def test_rows_that_both_have_stay_as_they_are() -> None:
    history, other = History(MemoryStore(), NOON), History(MemoryStore(), NOON)
    history.add([row(NOON + 2000, queued=1)])
    other.add([row(NOON + 2000, queued=2), row(NOON + 4000, queued=2)])
    history.take(other)
    assert [value(each, "queued") for each in found(history, "1h", NOON + 4000)] == [1, 2]


class Killed(MemoryStore):
    """Only the first bytes of its last write arrive."""

    left = 10**9

    def write(self, offset: int, data: bytes) -> None:
        super().write(offset, data[: self.left])
        self.left -= min(self.left, len(data))


@settings(max_examples=8)
@given(st.integers(0, 40_000))
def test_a_process_that_is_killed_in_the_middle_of_a_write_loses_that_row_only(left: int) -> None:
    store = Killed()
    recorded(History(store, NOON), NOON, NOON + MINUTE)
    store.left = left
    recorded(History(store, NOON + MINUTE), NOON + MINUTE, NOON + 3 * MINUTE)
    store.left = 10**9
    now = NOON + 4 * MINUTE
    rows = found(History(store, now), "1h", now)
    assert [each.ms - NOON for each in rows] == [2000 * n for n in range(1, len(rows) + 1)]
    size = len(HOURS.format.encode(row(NOON, slot(0))))
    minute = len(MINUTES.format.encode(row(NOON, slot(0))))
    assert len(rows) >= 30 + min(60, (left - 2 * minute) // size)
    minutes = found(History(store, now), "1d", now)
    assert [each.seconds for each in minutes] == [60] * (len(rows) // 30) + (
        [len(rows) % 30 * 2] if len(rows) % 30 else []
    )


class Broken(MemoryStore):
    broken = False

    def write(self, offset: int, data: bytes) -> None:
        if self.broken:
            raise OSError("no space left on device")
        super().write(offset, data)


def test_a_row_that_cannot_be_written_is_a_gap() -> None:
    store = Broken()
    history = History(store, NOON)
    recorded(history, NOON, NOON + 4000)
    store.broken = True
    with pytest.raises(OSError, match="no space"):
        recorded(history, NOON + 4000, NOON + 6000)
    store.broken = False
    now = recorded(history, NOON + 6000, NOON + 8000)
    assert [each.ms - NOON for each in found(history, "1h", now)] == [2000, 4000, 8000]
