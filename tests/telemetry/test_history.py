"""Rows of all spans: thinned, found, and kept through restarts and a clock that is set."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.history_rows import NOON, row, slot, value

from launcher.telemetry.history import HOUR as HOURS
from launcher.telemetry.history import SPANS, History, Key
from launcher.telemetry.history_columns import KEPT, Row, row_of, thin

SECOND, MINUTE, TEN, HOUR = 1000, 60_000, 600_000, 3_600_000


class Store:
    """A file that takes what changes."""

    def __init__(self) -> None:
        self.rows: dict[Key, bytes] = {}

    def keep(self, history: History) -> None:
        for key, text in history.changed().items():
            self.rows.pop(key, None)
            if text is not None:
                self.rows[key] = text

    def opened(self, now: int) -> History:
        """By a new process."""
        history = History()
        history.take(self.rows, now)
        self.keep(history)
        return history


def found(history: History, span: str, now: int, after: int = 0) -> list[Row]:
    return [row_of(text) for text in history.find(span, after, now).rows]


def recorded(history: History, begin: int, end: int) -> int:
    """A row for each 2 s in (begin, end]; its value is its number since NOON."""
    for ms in range(begin + 2000, end + 1, 2000):
        history.add(
            [row(ms, slot(0, tokens_per_s=1), requests_per_s=(ms - NOON) // 2000, queued=ms // 2000 % 7)]
        )
    return end


def test_nothing_yet() -> None:
    history = History()
    for span in ("1h", "1d", "90d"):
        assert found(history, span, NOON) == []
        assert history.find(span, 0, NOON).newest == 0


def test_a_longer_step_is_there_when_its_last_row_is() -> None:
    history = History()
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
    """One history that runs all the time, and one that begins again with what the file has: the same rows."""
    store = Store()
    steady, now = History(), NOON
    for rows, pause in runs:
        restarted = store.opened(now)
        for history in (steady, restarted):
            recorded(history, now, now + rows * 2000)
        store.keep(restarted)
        now += (rows + pause) * 2000
    restarted = store.opened(now)
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
    history = History()
    history.add(rows.values())
    for span, size in (("1d", 30), ("90d", 300)):
        steps_of = {
            end: [each for n, each in rows.items() if end - size < n <= end] for end in range(size, 901, size)
        }
        expected = [thin(mine, NOON + end * 2000) for end, mine in steps_of.items() if mine]
        assert found(history, span, NOON + 900 * 2000) == expected


def test_a_restart_thins_what_a_killed_process_did_not() -> None:
    store, first = Store(), History()
    recorded(first, NOON, NOON + 90 * SECOND)
    store.keep(first)
    history = store.opened(NOON + 20 * HOUR)
    history.add([row(NOON + 20 * HOUR)])
    assert [(each.ms - NOON, each.seconds) for each in found(history, "1d", NOON + 20 * HOUR)] == [
        (MINUTE, 60), (2 * MINUTE, 30), (20 * HOUR, 2),
    ]  # fmt: skip
    assert [(each.ms - NOON, each.seconds) for each in found(history, "90d", NOON + 20 * HOUR)] == [
        (TEN, 90), (20 * HOUR, 2),
    ]  # fmt: skip
    assert [each.ms for each in found(history, "1h", NOON + 20 * HOUR)] == [NOON + 20 * HOUR]


def test_a_clock_that_is_slow_at_the_start_thins_the_step_of_the_process_before_when_it_is_set() -> None:
    store, first = Store(), History()
    recorded(first, NOON, NOON + 5 * MINUTE)
    store.keep(first)
    history = store.opened(NOON - 24 * HOUR)  # no battery
    recorded(history, NOON - 24 * HOUR, NOON - 24 * HOUR + 10 * SECOND)
    now = recorded(history, NOON + HOUR, NOON + HOUR + 2 * SECOND)
    assert (NOON + TEN, 300) in [(each.ms, each.seconds) for each in found(history, "90d", now)]


def test_a_step_whose_first_rows_are_known_later_is_made_of_all() -> None:
    """The file could not be opened until the step had ended."""
    store, first = Store(), History()
    now = recorded(first, NOON, NOON + 5 * MINUTE)
    store.keep(first)
    history = History()
    now = recorded(history, now, NOON + TEN)
    assert [each.seconds for each in found(history, "90d", now)] == [300]
    history.take(store.rows, now)
    now = recorded(history, now + MINUTE, now + MINUTE + 2000)
    assert [each.seconds for each in found(history, "90d", now)] == [600]


def test_a_row_that_is_thinned_late_hides_no_newer_ones() -> None:
    store, first = Store(), History()
    now = recorded(first, NOON, NOON + 30 * MINUTE)
    store.keep(first)
    del store.rows[Key("1d", NOON + 2 * MINUTE)], store.rows[Key("90d", NOON + TEN)]
    history = store.opened(now)
    now = recorded(history, now + MINUTE, now + MINUTE + 2000)
    assert [len(found(history, span, now)) for span in ("1d", "90d")] == [30, 3]


def test_a_minute_of_a_wrong_clock_takes_the_place_of_no_ten_minutes() -> None:
    history = History()
    recorded(history, NOON, NOON + TEN)
    now = recorded(history, NOON + 2 * HOUR, NOON + 4 * HOUR)
    before = found(history, "90d", now)
    recorded(history, NOON + 8 * MINUTE, NOON + 9 * MINUTE)
    now = recorded(history, now + MINUTE, now + MINUTE + 2000)
    assert found(history, "90d", now) == before
    now = recorded(history, now, NOON + 4 * HOUR + TEN)
    assert len(found(history, "90d", now)) == len(before) + 1


def test_a_restart_in_a_step_does_not_thin_it_before_its_end() -> None:
    store, first = Store(), History()
    now = recorded(first, NOON, NOON + 30 * SECOND)
    store.keep(first)
    history = store.opened(now)
    assert found(history, "1d", now) == []
    now = recorded(history, now, NOON + MINUTE)
    assert [each.seconds for each in found(history, "1d", now)] == [60]


def test_rows_that_are_gone_meanwhile_do_not_spoil_a_longer_row() -> None:
    store, history = Store(), History()
    now = recorded(history, NOON, NOON + TEN)
    # An hour later the first rows of that step are gone.
    now = recorded(history, NOON + HOUR, NOON + HOUR + 4 * MINUTE)
    store.keep(history)
    first = found(store.opened(now), "90d", now)[0]
    assert (first.ms, first.seconds) == (NOON + TEN, 600)


def test_after() -> None:
    history = History()
    now = recorded(history, NOON, NOON + MINUTE)
    assert [each.ms - now for each in found(history, "1h", now, now - 4000)] == [-2000, 0]
    assert [each.ms - now for each in found(history, "1h", now, now - 3999)] == [-2000, 0]
    assert found(history, "1h", now, now) == []
    assert history.find("1h", now, now).newest == now


def test_only_the_span_is_found() -> None:
    history = History()
    now = recorded(history, NOON, NOON + HOUR + MINUTE)
    rows = found(history, "1h", now)
    assert (len(rows), rows[0].ms, rows[-1].ms) == (1800, now - HOUR + 2000, now)
    later = now + HOUR // 2
    assert (len(found(history, "1h", later)), found(history, "1h", later)[-1].ms) == (900, now)
    assert found(history, "1h", now + HOUR) == []


def test_a_clock_that_is_set_back() -> None:
    history = History()
    now = recorded(history, NOON, NOON + 10 * MINUTE)
    back = recorded(history, NOON, NOON + MINUTE)
    assert history.find("1h", 0, back).newest == back
    assert len(found(history, "1h", back)) == 30
    # Who knows rows of the future gets all of the present.
    assert found(history, "1h", back, now) == found(history, "1h", back)
    assert len(found(history, "1h", back, back - 2000)) == 1


def test_rows_of_a_future_clock_do_not_count_after_a_restart() -> None:
    store, first = Store(), History()
    recorded(first, NOON, NOON + 20 * SECOND)
    recorded(first, NOON + HOUR, NOON + HOUR + 4000)
    store.keep(first)
    history = store.opened(NOON + 30 * SECOND)
    assert history.find("1h", 0, NOON + 30 * SECOND).newest == NOON + 20 * SECOND
    assert history.find("1h", 0, NOON + 30 * SECOND).slots == [0]


def test_a_wrong_year_takes_as_many_rows_as_it_adds_and_no_more() -> None:
    """Rows go in the order in which they were added, whatever their times say."""
    history = History()
    now = recorded(history, NOON, NOON + HOUR)
    recorded(history, NOON + 365 * 24 * HOUR, NOON + 365 * 24 * HOUR + MINUTE)
    now = recorded(history, now, now + MINUTE)
    assert len(found(history, "1h", now)) == 1800 - 30
    now = recorded(history, now, now + HOUR)  # those of the other year are gone
    assert len(found(history, "1h", now)) == 1800


def test_a_clock_that_is_set_forward_thins_the_step_that_it_left() -> None:
    history = History()
    recorded(history, NOON, NOON + 30 * SECOND)
    now = recorded(history, NOON + 5 * HOUR + 10 * SECOND, NOON + 5 * HOUR + 20 * SECOND)
    assert [(each.ms - NOON, each.seconds) for each in found(history, "1d", now)] == [(MINUTE, 30)]


def test_slots_of_the_rows_that_are_asked_for() -> None:
    history = History()
    history.add([row(NOON + 2000, slot(0), slot(1)), row(NOON + 4000, slot(0)), row(NOON + 6000, slot(3))])
    now = NOON + 6000
    assert history.find("1h", 0, now).slots == [0, 1, 3]
    assert history.find("1h", NOON + 2000, now).slots == [0, 3]
    assert history.find("1h", NOON + 4000, now).slots == [3]
    assert history.find("1h", now, now).slots == []


def test_slots_are_known_after_a_restart() -> None:
    store, first = Store(), History()
    recorded(first, NOON, NOON + MINUTE)
    store.keep(first)
    history = store.opened(NOON + MINUTE)
    assert history.find("1d", 0, NOON + MINUTE).slots == history.find("1h", 0, NOON + MINUTE).slots == [0]
    assert history.find("90d", 0, NOON + MINUTE).slots == []


def test_a_file_that_is_opened_later_and_what_was_recorded_meanwhile() -> None:
    store, first = Store(), History()
    recorded(first, NOON, NOON + MINUTE)
    store.keep(first)
    history = History()
    now = recorded(history, NOON + 2 * MINUTE, NOON + 3 * MINUTE)
    history.take(store.rows, now)
    assert {key.ms > NOON + MINUTE for key in history.changes} == {True}
    store.keep(history)
    for each in (history, store.opened(now)):
        assert len(found(each, "1h", now)) == 60
        assert [minute.ms - NOON for minute in found(each, "1d", now)] == [MINUTE, 3 * MINUTE]
        assert each.find("1h", 0, now).newest == now


def test_a_new_file_gets_all_that_is_known() -> None:
    history, store = History(), Store()
    now = recorded(history, NOON, NOON + TEN)
    store.keep(history)
    history.take({}, now)
    store = Store()
    store.keep(history)
    for span in SPANS:
        assert found(store.opened(now), span.name, now) == found(history, span.name, now)


def test_rows_that_both_have_are_those_of_this_process() -> None:
    history, other = History(), Store()
    history.add([row(NOON + 2000, queued=1)])
    with_other = History()
    with_other.add([row(NOON + 2000, queued=2), row(NOON + 4000, queued=2)])
    other.keep(with_other)
    history.take(other.rows, NOON + 4000)
    assert [value(each, "queued") for each in found(history, "1h", NOON + 4000)] == [1]
    history.add([row(NOON + 6000, queued=1)])
    assert [value(each, "queued") for each in found(history, "1h", NOON + 6000)] == [1, 2, 1]


def test_rows_beyond_the_span_go_in_memory_and_in_the_file() -> None:
    history, store = History(), Store()
    now = recorded(history, NOON, NOON + HOUR + MINUTE)
    store.keep(history)
    assert len([key for key in store.rows if key.span == HOURS.name]) == HOURS.most
    # Also those of a file that has too many.
    extra = {Key("1h", NOON + 2000 * n): b"" for n in range(1, 31)}
    for key in extra:
        extra[key] = store.rows[Key("1h", now)]
    history = History()
    history.take(extra | store.rows, now)
    assert {key for key, text in history.changes.items() if text is None} == set(extra)
    assert len(found(history, "1h", now)) == HOURS.most


def test_a_span_that_nobody_knows_is_not_kept() -> None:
    history = History()
    history.take({Key("5y", NOON): b"[]"}, NOON)
    assert history.changes == {Key("5y", NOON): None}


def test_changes_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.telemetry.history._MOST_CHANGES", 10)
    history = History()
    recorded(history, NOON, NOON + HOUR + TEN)
    assert len(history.changes) == 1800 + 70 + 7
    assert len([text for text in history.changes.values() if text is None]) == 0


def test_rows_of_versions_with_other_columns() -> None:
    """The values of a version with more are left out, and those of one with fewer are unknown."""
    history = History()
    history.take({Key("1h", NOON): b'[%d,2,[1.0,2.0],{},[[3,"ready"]]]' % NOON}, NOON)
    more = ",".join(["7"] * (len(KEPT) + 2))
    history.take(
        {Key("1h", NOON + 2000): b"[%d,2,[%s],{},[[3,null,1,2,3,4,5]],8]" % (NOON + 2000, more.encode())},
        NOON,
    )
    history.add([row(NOON + 4000)])
    few, many, _ = found(history, "1h", NOON + 4000)
    assert (value(few, "requests_per_s"), value(few, "failed_per_s"), value(few, "queued")) == (1, 2, None)
    assert many.host == (7.0,) * len(KEPT)
    assert (few.slots[0].state, many.slots[0].cpu_busy) == ("ready", 4)


def test_a_text_that_is_no_row_is_left_out_and_counted() -> None:
    history = History()
    assert history.take({Key("1h", NOON): b"x", Key("1d", NOON): b"[]"}, NOON) == 2
    assert history.changes == {Key("1h", NOON): None, Key("1d", NOON): None}
