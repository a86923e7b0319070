"""Sums on /metrics."""

from __future__ import annotations

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from support.hand_clock import at
from support.keys import make, put

from launcher.base.money import PICOS
from launcher.base.money_limits import DailyCap, Day
from launcher.config import schema
from launcher.keys.api_keys import ApiKeys
from launcher.keys.rate_limits import Limit
from launcher.proxy.observability import stats
from launcher.proxy.request.actions import Outcome
from launcher.proxy.upstream.overflow import Overflow
from launcher.telemetry import metrics
from launcher.telemetry.machine_metrics import Values
from launcher.telemetry.metrics import render
from launcher.telemetry.timings import Timings


def rows(found: Values) -> dict[str, dict[tuple[str, ...], float]]:
    """What a scraper reads: metric -> label values in the table's order -> value."""
    order = {spec.name: spec.labels for spec in metrics.TABLE}
    return {
        family.name: {
            tuple(sample.labels[label] for label in order[family.name]): sample.value
            for sample in family.samples
        }
        for family in text_string_to_metric_families(render(found, Timings()))
        if family.name in order and family.samples
    }


def test_keys(tmp_path: Path) -> None:
    put(tmp_path / "keys", make("ann")[1], make("bob")[1])
    keys = ApiKeys(str(tmp_path / "keys"))
    ann = keys.sums["ann"]
    ann.accepted, ann.prompt_tokens, ann.output_tokens = 5, 50, 20
    ann.ended["completed"] = 3
    ann.refused[Limit.TOKENS] = 1
    keys.unauthorized = 2
    assert rows(stats.of_keys(keys, ["completed", "failed"])) == {
        metrics.UNAUTHORIZED: {(): 2},
        metrics.KEY_ACCEPTED: {("ann",): 5, ("bob",): 0},
        metrics.KEY_ENDED: {
            ("ann", "completed"): 3, ("ann", "failed"): 0, ("bob", "completed"): 0, ("bob", "failed"): 0,
        },
        metrics.KEY_REFUSED: {("ann", "tokens_per_minute"): 1},
        metrics.KEY_IN_FLIGHT: {("ann",): 2, ("bob",): 0},
        metrics.KEY_TOKENS: {("ann",): 70, ("bob",): 0},
        metrics.KEY_PROMPT_TOKENS: {("ann",): 50, ("bob",): 0},
        metrics.KEY_OUTPUT_TOKENS: {("ann",): 20, ("bob",): 0},
    }  # fmt: skip


async def test_overflow() -> None:
    settings = schema.Overflow(
        url="http://x/v1", models={"m": "big"}, input=1.0, output=2.0, max_per_day=20.0
    )
    cap = DailyCap(20 * PICOS, lambda now: Day(now, now + 86400), at(0.0), spent=5 * PICOS)
    overflow = Overflow([settings], 1.0, {"x": cap})
    endpoint = overflow.endpoint("x")
    endpoint.sent["m"], endpoint.in_flight = 4, 1
    endpoint.ended["m", Outcome.COMPLETED] = 3
    cap.reserve(PICOS // 2)
    endpoint.cost.settle(0, 2 * PICOS)
    found = rows(stats.of_overflow(overflow))
    assert found[metrics.OVERFLOW_SENT] == {("x", "m"): 4}
    assert found[metrics.OVERFLOW_IN_FLIGHT] == {("x",): 1}
    assert found[metrics.OVERFLOW_ENDED] == {
        ("x", "m", outcome): 3 if outcome is Outcome.COMPLETED else 0 for outcome in Outcome
    }
    money = (metrics.OVERFLOW_SPENT, metrics.OVERFLOW_RESERVED, metrics.OVERFLOW_MAX_PER_DAY)
    assert [found[name] for name in money] == [{("x",): 7.0}, {("x",): 0.5}, {("x",): 20.0}]
    assert found[metrics.OVERFLOW_COST] == {("x",): 2.0}
    assert stats.of_overflow(None) == {}
