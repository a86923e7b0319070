"""Rows as bytes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.history_rows import NOON, row, slot

from launcher.telemetry.history_columns import KEPT, STATES, Row, SlotValues
from launcher.telemetry.history_file import HOST_PLACES, MOST_SLOTS, Format
from launcher.telemetry.quantiles import BUCKETS

FULL = Format(slots=True, streams=True)


def any_row(seed: int) -> Row:
    chance = random.Random(seed)  # noqa: S311

    def tenths(most: int) -> float | None:
        return chance.choice([None, 0.0, chance.randrange(most) / 10])

    def share() -> float | None:
        return chance.choice([None, 0.0, 1.0, chance.randrange(10_000) / 10_000])

    numbers = sorted(chance.sample(range(1000), chance.choice([0, 1, 5, MOST_SLOTS])))
    return Row(
        chance.randrange(1, 2**45),
        chance.randrange(601),
        tuple(chance.choice([None, 0.0, chance.random() * 10 ** chance.randrange(13)]) for _ in KEPT),
        tuple(
            SlotValues(n, chance.choice([None, *STATES]), tenths(2**31), tenths(65_000), share(), share())
            for n in numbers
        ),
        {chance.randrange(BUCKETS): chance.randrange(1, 65_536) for _ in range(chance.randrange(9))},
    )


ROWS = st.integers(0, 2**32).map(any_row)


@given(ROWS)
def test_decode_is_the_inverse_of_encode(written: Row) -> None:
    data = FULL.encode(written)
    assert len(data) <= FULL.size
    assert FULL.decode(data) == written
    assert FULL.decode(data.ljust(FULL.size, b"x")) == written
    without = FULL.decode(data, slots=False)
    assert without is not None
    assert (without.host, without.slots) == (written.host, ())


@given(ROWS, st.data())
def test_a_row_that_was_written_in_part_is_none(written: Row, data: st.DataObject) -> None:
    """Behind its first bytes is what was there before."""
    new, old = FULL.encode(written), FULL.encode(row(NOON, slot(1), queued=3)).ljust(FULL.size, b"\0")
    length = data.draw(st.integers(0, len(new) - 1))
    mixed = new[:length] + old[length:]
    assert FULL.decode(mixed) in (None, FULL.decode(old)) or mixed[: len(new)] == new
    assert FULL.decode(new[:length]) is None


@given(st.binary(max_size=2000))
def test_foreign_bytes_are_none(data: bytes) -> None:
    assert FULL.decode(data) is None


@pytest.mark.parametrize("form", [Format(slots=False, streams=False), Format(slots=True, streams=False)])
def test_a_format_leaves_out_what_it_has_no_place_for(form: Format) -> None:
    found = form.decode(form.encode(row(NOON, slot(2), first_tokens={7: 3}, queued=1)))
    assert found is not None
    assert len(found.slots) == form.slots
    assert not found.first_tokens


def test_more_slots_than_there_is_space_for() -> None:
    found = FULL.decode(FULL.encode(row(NOON, *(slot(number) for number in reversed(range(100))))))
    assert found is not None
    assert [values.slot for values in found.slots] == list(range(MOST_SLOTS))


def test_values_beyond_their_place_are_the_largest_that_fits() -> None:
    huge = slot(1, tokens_per_s=1e12, in_flight=1e9, kv_usage=-0.5, cpu_busy=7)
    found = FULL.decode(FULL.encode(row(NOON, huge)))
    assert found is not None
    assert found.slots == (SlotValues(1, "ready", (2**32 - 2) / 10, 6553.4, 0.0, 6.5534),)
    assert not any(math.isnan(value) for value in found.slots[0][2:] if isinstance(value, float))


def test_a_column_can_be_added_without_a_new_file() -> None:
    assert len(KEPT) < HOST_PLACES
