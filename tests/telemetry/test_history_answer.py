"""The reply of ``GET /v1/history``."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.history_rows import NOON, row, slot

from launcher.telemetry.history import History, Reply
from launcher.telemetry.history_columns import HOST, SLOT


def asked(history: History, slots: str = "all", span: str = "1h", after: int = 0) -> Any:
    found = history.find(span, after, NOON + 7_200_000 if span != "1h" else NOON + 120_000)
    return json.loads(b"".join(Reply(found, slots).parts()))


def test_without_rows() -> None:
    reply = asked(History())
    assert reply == {"span": "1h", "step_ms": 2000, "newest": None, "columns": list(HOST), "rows": []}


@pytest.mark.parametrize("count", [1, 18, 19, 60])
def test_each_row_is_its_time_and_the_columns_values(count: int) -> None:
    history = History()
    history.add(row(NOON + 2000 * n, requests_per_s=n, queued=7) for n in range(1, count + 1))
    reply = asked(history)
    assert reply["newest"] == NOON + 2000 * count
    assert [line[0] for line in reply["rows"]] == [NOON + 2000 * n for n in range(1, count + 1)]
    assert [line[1] for line in reply["rows"]] == list(range(1, count + 1))
    assert {len(line) for line in reply["rows"]} == {1 + len(HOST)}
    assert [name for name, value in zip(HOST, reply["rows"][0][1:], strict=True) if value is not None] == [
        "requests_per_s", "queued",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "rate"),
    [
        ({"prefix_queries_per_s": 3, "prefix_hits_per_s": 1}, 0.3333),
        ({"prefix_queries_per_s": 0, "prefix_hits_per_s": 0}, None),
        ({}, None),
    ],
)
def test_the_hit_rate_is_that_of_the_tokens(values: dict[str, float], rate: float | None) -> None:
    history = History()
    history.add([row(NOON + 2000, **values, cpu_busy=0.5)])
    (line,) = asked(history)["rows"]
    assert line[1 + HOST.index("prefix_hit_rate")] == rate
    assert line[1 + HOST.index("cpu_busy")] == 0.5


def three_rows() -> History:
    history = History()
    one = slot(1, "failed", tokens_per_s=1.5)
    history.add(
        [row(NOON + 2000, slot(0), one), row(NOON + 4000, slot(0, in_flight=2)), row(NOON + 6000, slot(12))]
    )
    return history


def test_slots_that_come_and_go_have_columns_of_their_own() -> None:
    reply = asked(three_rows())
    assert reply["columns"][len(HOST) :] == [f"slot.{n}.{name}" for n in (0, 1, 12) for name in SLOT]
    none = [None] * 5
    assert [line[1 + len(HOST) :] for line in reply["rows"]] == [
        [None, None, None, None, "ready", 1.5, None, None, None, "failed", *none],
        [None, 2.0, None, None, "ready", *none, *none],
        [*none, *none, None, None, None, None, "ready"],
    ]


def test_chosen_slots() -> None:
    history = three_rows()
    assert asked(history, "none")["columns"] == asked(history, "7")["columns"] == list(HOST)
    assert asked(history, "1")["columns"][len(HOST) :] == [f"slot.1.{name}" for name in SLOT]
    assert asked(history, "1", after=NOON + 2000)["columns"] == list(HOST)
    assert len(asked(history, "1", after=NOON + 2000)["rows"]) == 2
