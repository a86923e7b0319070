"""Rows at places that follow from their time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.history_rows import NOON, row, value

from launcher.telemetry.history_file import (
    DAY,
    FILE_BYTES,
    HEADER_BYTES,
    HOUR,
    QUARTER,
    Format,
    MemoryStore,
    Ring,
    Span,
    rings,
)

SMALL = Span("small", 2000, 12, Format(slots=False, streams=False))


def ring() -> Ring:
    return Ring(MemoryStore(), SMALL, HEADER_BYTES)


def test_the_file_is_within_its_bound() -> None:
    assert FILE_BYTES <= 8_000_000
    assert [span.length_ms // 3_600_000 for span in (HOUR, DAY, QUARTER)] == [1, 24, 90 * 24]
    assert [each.span for each in rings(MemoryStore()).values()] == [HOUR, DAY, QUARTER]


def test_the_end_of_a_step_belongs_to_it() -> None:
    assert [DAY.end_of(ms) - NOON for ms in (NOON - 1, NOON, NOON + 1, NOON + 60_000)] == [
        0,
        0,
        60_000,
        60_000,
    ]


# Steps of the clock between two rows, in rows: mostly one, gaps, and a clock that is set.
STEPS = st.lists(st.sampled_from([1, 1, 1, 1, 2, 5, 13, 1000, -3, -500]), max_size=60)


@given(STEPS, st.integers(0, 20), st.integers(1, 14))
def test_what_is_read_are_the_rows_of_that_time_and_gaps_elsewhere(
    steps: list[int], back: int, count: int
) -> None:
    """The model: the last row that was written to each place."""
    found, places, ms = ring(), {}, NOON
    for number, step in enumerate(steps):
        ms += step * 2000
        found.put(row(ms, queued=number))
        places[ms // 2000 % 12] = (ms, number)
    until = ms - back * 2000
    after = until - count * 2000
    read = [(each.ms, value(each, "queued")) for each in found.rows(found.read(after, until), until)]
    assert read == sorted(
        place for place in places.values() if max(after, until - 24_000) < place[0] <= until
    )
    assert sorted((each.ms, value(each, "queued")) for each in found.every()) == sorted(places.values())


def test_one_row() -> None:
    rows = ring()
    rows.put(row(NOON, queued=1))
    assert rows.get(NOON) == rows.at(NOON) == rows.at(NOON + 24_000) == row(NOON, queued=1)
    assert rows.get(NOON + 24_000) is None
    assert rows.get(NOON + 2000) is None


def test_a_file_that_was_cut_off_has_gaps_and_the_other_rows_stay() -> None:
    class Short(MemoryStore):
        def read(self, offset: int, size: int) -> bytes:
            return super().read(offset, size)[: max(0, HEADER_BYTES + 5 * SMALL.format.size + 3 - offset)]

    store = Short()
    rows = Ring(store, SMALL, HEADER_BYTES)
    begin = NOON // 24_000 * 24_000
    for place in range(12):
        rows.put(row(begin + place * 2000, queued=place))
    until = begin + 22_000
    assert [value(each, "queued") for each in rows.rows(rows.read(begin - 2000, until), until)] == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_no_steps_are_no_bytes() -> None:
    assert ring().read(NOON, NOON) == ring().read(NOON + 2000, NOON) == b""
