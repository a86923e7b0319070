"""Rows between two readings."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.history_rows import NOON, value

from launcher.telemetry.engine_metrics import EngineCounts
from launcher.telemetry.history_columns import SlotValues
from launcher.telemetry.load_rows import Sample, Sampling, SlotSample

IDLE = Sample(at=100.0, totals={}, gauges={}, spent=None, first_tokens=(), busy={}, slots=())


def slot(number: int = 0, **more: Any) -> SlotSample:
    fields: dict[str, Any] = {
        "state": "ready", "in_flight": 0, "kv_usage": None, "kv_tokens": None, "cpus": (), "counts": None,
    }  # fmt: skip
    return SlotSample(number, **(fields | more))


def between(before: Sample, after: Sample, ms: int = 2000) -> Any:
    """The row of the second sample, `ms` after the first."""
    sampling = Sampling()
    assert sampling.rows(before, NOON) == []
    return sampling.rows(replace(after, at=before.at + ms / 1000), NOON + ms)[-1]


def test_rates_are_differences_of_counters() -> None:
    before = replace(IDLE, totals={"requests_per_s": 7, "failed_per_s": 1})
    found = between(before, replace(IDLE, totals={"requests_per_s": 16, "failed_per_s": 1}))
    assert (found.ms, found.seconds) == (NOON + 2000, 2)
    assert (value(found, "requests_per_s"), value(found, "failed_per_s")) == (4.5, 0)
    assert value(found, "overflow_per_s") is None


def test_gauges_are_what_they_are_rounded_to_five_digits() -> None:
    found = between(IDLE, replace(IDLE, gauges={"queued": 3, "memory_free_bytes": 123456789}))
    assert (value(found, "queued"), value(found, "memory_free_bytes")) == (3, 123460000)
    assert value(found, "ready") is None


def test_first_tokens_of_the_step() -> None:
    found = between(IDLE, replace(IDLE, first_tokens=(0.1, 0.3, 0.2)))
    assert (value(found, "first_token_p50_s"), value(found, "first_token_p99_s")) == (0.2, 0.3)
    assert sum(found.first_tokens.values()) == 3
    assert value(between(IDLE, IDLE), "first_token_p50_s") is None


def engine(at: float, tokens: int, queries: int, hits: int) -> EngineCounts:
    return EngineCounts(1, at, tokens, queries, hits)


def test_output_tokens_are_the_engines_as_they_come() -> None:
    before = replace(
        IDLE, totals={"output_tokens_per_s": 0}, slots=(slot(0, counts=engine(99, 0, 0, 0)), slot(1))
    )
    after = replace(
        IDLE, totals={"output_tokens_per_s": 5000}, slots=(slot(0, counts=engine(101, 60, 100, 50)), slot(1))
    )
    found = between(before, after)
    assert value(found, "output_tokens_per_s") == 30
    assert (value(found, "prefix_queries_per_s"), value(found, "prefix_hits_per_s")) == (50, 25)
    assert [each.tokens_per_s for each in found.slots] == [30, None]


def test_without_engine_counters_tokens_are_those_of_ended_requests() -> None:
    before = replace(IDLE, totals={"output_tokens_per_s": 0}, slots=(slot(),))
    found = between(before, replace(IDLE, totals={"output_tokens_per_s": 50}, slots=(slot(),)))
    assert value(found, "output_tokens_per_s") == 25
    assert value(found, "prefix_queries_per_s") is None


@pytest.mark.parametrize(
    ("usages", "host"),
    [
        ([(0.5, 3000), (0.1, 1000)], 0.4),
        ([(0.5, None), (0.1, 1000)], 0.3),
        ([(0.5, 1000), (None, None)], 0.5),
        ([(None, 1000)], None),
        ([], None),
    ],
)
def test_kv_usage_of_the_host(usages: list[tuple[float | None, int | None]], host: float | None) -> None:
    slots = tuple(slot(n, kv_usage=usage, kv_tokens=tokens) for n, (usage, tokens) in enumerate(usages))
    assert value(between(IDLE, replace(IDLE, slots=slots)), "kv_usage") == pytest.approx(host)


def test_cpu_time_of_the_host_and_of_each_slot() -> None:
    slots = (slot(0, cpus=(0, 1), state="failed", in_flight=2), slot(1, cpus=(2, 9)), slot(2, cpus=(8,)))
    found = between(IDLE, replace(IDLE, busy={0: 1.0, 1: 0.5, 2: 0.25, 3: 0.25}, slots=slots))
    assert value(found, "cpu_busy") == 0.5
    assert [each.cpu_busy for each in found.slots] == [0.75, 0.25, None]
    assert found.slots[0] == SlotValues(0, "failed", None, 2, None, 0.75)


@pytest.mark.parametrize(
    ("bill", "spent", "cost"),
    [(0.79, (None, None), 0.79), (0.79, (1.0, 1.5), 900.79), (None, (1.0, 1.5), 900.0), (None, (None, None), None)],
)  # fmt: skip
def test_cost_per_hour_has_the_machines_bill_and_overflow(
    bill: float | None, spent: tuple[float | None, float | None], cost: float | None
) -> None:
    gauges = {"cost_per_hour": bill}
    found = between(
        replace(IDLE, gauges=gauges, spent=spent[0]), replace(IDLE, gauges=gauges, spent=spent[1])
    )
    assert value(found, "cost_per_hour") == cost


def test_a_late_reading_is_the_mean_of_the_steps_that_it_missed() -> None:
    sampling = Sampling()
    sampling.rows(replace(IDLE, totals={"requests_per_s": 0}), NOON)
    late = replace(IDLE, at=106.0, totals={"requests_per_s": 12}, first_tokens=(0.1,))
    rows = sampling.rows(late, NOON + 6000)
    assert [(each.ms - NOON, value(each, "requests_per_s")) for each in rows] == [
        (2000, 2),
        (4000, 2),
        (6000, 2),
    ]
    assert [sum(each.first_tokens.values()) for each in rows] == [0, 0, 1]


def test_a_reading_that_is_later_leaves_a_gap() -> None:
    sampling = Sampling()
    sampling.rows(IDLE, NOON)
    rows = sampling.rows(replace(IDLE, at=130.0), NOON + 30_000)
    assert [each.ms - NOON for each in rows] == [30_000]


@pytest.mark.parametrize("set_by", [8000, 3_600_000, -2000, -3_600_000])
def test_a_clock_that_was_set_fills_no_steps(set_by: int) -> None:
    sampling = Sampling()
    sampling.rows(replace(IDLE, totals={"requests_per_s": 0}), NOON)
    rows = sampling.rows(replace(IDLE, at=102.0, totals={"requests_per_s": 4}), NOON + 2000 + set_by)
    assert [(each.ms - NOON, value(each, "requests_per_s")) for each in rows] == [(2000 + set_by, 2)]


def test_two_readings_at_once_are_one() -> None:
    sampling = Sampling()
    sampling.rows(replace(IDLE, totals={"requests_per_s": 0}), NOON)
    assert sampling.rows(replace(IDLE, at=100.1, totals={"requests_per_s": 50}), NOON) == []
    (found,) = sampling.rows(replace(IDLE, at=102.0, totals={"requests_per_s": 60}), NOON + 2000)
    assert value(found, "requests_per_s") == 30
