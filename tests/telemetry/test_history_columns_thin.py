"""Rows of 2 s become a row of a longer step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.history_rows import NOON, row, slot, value

from launcher.telemetry.history_columns import KEPT, Row, Thin, rounded, thin
from launcher.telemetry.quantiles import counted, quantile


def any_rows(seed: int) -> list[Row]:
    chance = random.Random(seed)  # noqa: S311
    return [
        Row(
            NOON,
            chance.randrange(1, 5),
            tuple(chance.choice([None, 0.0, chance.random() * 1e6]) for _ in KEPT),
            counted(chance.uniform(0.01, 10) for _ in range(chance.randrange(5))),
        )
        for _ in range(chance.choice([1, 2, 30]))
    ]


ROWS = st.integers(0, 2**32).map(any_rows)


@given(ROWS)
def test_each_column_by_its_rule(rows: list[Row]) -> None:
    found = thin(rows, NOON)
    assert found.seconds == sum(each.seconds for each in rows)
    for position, (name, how) in enumerate(KEPT.items()):
        known = [(each.host[position], each.seconds) for each in rows if each.host[position] is not None]
        got = found.host[position]
        match how:
            case Thin.QUANTILE:
                tokens = [b for each in rows for b, count in each.first_tokens.items() for _ in range(count)]
                assert (got is None) == (not tokens)
            case _ if not known:
                assert got is None
            case Thin.MEAN:
                seconds = [v for v, weight in known for _ in range(weight) if v is not None]
                assert got == pytest.approx(sum(seconds) / len(seconds), rel=1e-4), name
            case Thin.MAXIMUM:
                assert got == rounded(max(v for v, _ in known if v is not None))
            case Thin.MINIMUM:
                assert got == rounded(min(v for v, _ in known if v is not None))


@given(ROWS)
def test_rates_times_seconds_are_what_was_counted(rows: list[Row]) -> None:
    """If every row's rate is known."""
    rows = [row(each.ms, seconds=each.seconds, requests_per_s=each.host[0] or 0.0) for each in rows]
    counts = sum((each.host[0] or 0.0) * each.seconds for each in rows)
    found = thin(rows, NOON)
    assert (found.host[0] or 0.0) * found.seconds == pytest.approx(counts, rel=1e-4)


@given(ROWS)
def test_the_order_of_rows_does_not_matter(rows: list[Row]) -> None:
    found, other = thin(rows, NOON), thin(rows[::-1], NOON)
    for one, two in zip(found.host, other.host, strict=True):
        assert one == two or one == pytest.approx(two, rel=1e-4)


def test_first_tokens_are_those_of_all_streams_and_no_mean_of_quantiles() -> None:
    """99 quick streams in one row, one slow stream in another: the median is quick."""
    rows = [row(NOON, first_tokens=counted([0.1] * 99)), row(NOON, first_tokens=counted([10.0]))]
    found = thin(rows, NOON)
    assert value(found, "first_token_p50_s") == pytest.approx(0.1, rel=0.05)
    assert value(found, "first_token_p99_s") == pytest.approx(0.1, rel=0.05)
    slower = thin([*rows, row(NOON, first_tokens=counted([10.0]))], NOON)
    assert value(slower, "first_token_p99_s") == rounded(quantile(counted([10.0]), 99))


def test_what_a_mean_would_hide_is_kept() -> None:
    rows = [row(NOON, queued=0, ready=4, kv_usage=0.1, memory_free_bytes=9) for _ in range(29)]
    found = thin([*rows, row(NOON, queued=64, ready=3, kv_usage=0.99, memory_free_bytes=1)], NOON)
    assert [value(found, name) for name in ("queued", "ready", "kv_usage", "memory_free_bytes")] == [
        64,
        3,
        0.99,
        1,
    ]


def test_slots_that_come_and_go_are_each_of_their_own_rows() -> None:
    rows = [
        row(NOON, slot(0, tokens_per_s=10, in_flight=2), slot(1, tokens_per_s=4)),
        row(NOON, slot(0, "failed", in_flight=4), slot(7, tokens_per_s=8, kv_usage=0.5)),
        row(NOON, slot(0, "starting", in_flight=0), slot(7, None, tokens_per_s=4, kv_usage=0.2)),
    ]
    zero, one, seven = thin(rows, NOON).slots
    assert (zero.slot, zero.state, zero.tokens_per_s, zero.in_flight) == (0, "failed", 10, 2)
    assert (one.slot, one.state, one.tokens_per_s) == (1, "ready", 4)
    assert (seven.slot, seven.state, seven.tokens_per_s, seven.kv_usage) == (7, "ready", 6, 0.5)
