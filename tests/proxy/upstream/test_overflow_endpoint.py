"""What a request may cost at most, what it did cost, and what is said of a cap."""

from __future__ import annotations

import logging

import pytest
from support.hand_clock import at

from launcher.base.money import PICOS
from launcher.base.money_limits import DailyCap, Day
from launcher.config import schema
from launcher.proxy.openai.prompts import MAX_TOKENS, SaidUsage, TokenBounds
from launcher.proxy.upstream.overflow_endpoint import OverflowCost, has_output

CHAT, EMBEDDINGS = "/v1/chat/completions", "/v1/embeddings"
MICRO = PICOS // 10**6
NAMED = TokenBounds(100, 2, 50)
UNNAMED = TokenBounds(100, 1, None)


def settings(**more: object) -> schema.Overflow:
    prices = {"input": 1.0, "output": 4.0, "cached": 0.5, "max_output_tokens": 1000}
    return schema.Overflow(url="http://x/v1", models={"m": "big"}, **{**prices, **more})  # type: ignore[arg-type]


def cost(cap: int | None = None, *, spent: int | None = 0, **more: object) -> OverflowCost:
    made = None
    if cap is not None:
        made = DailyCap(cap, lambda now: Day(now // 100 * 100, now // 100 * 100 + 100), at(0.0), spent=spent)
        more["max_per_day"] = cap / PICOS
    return OverflowCost(settings(**more), made)


def test_the_bound_is_of_the_dearest_tokens() -> None:
    assert cost().bound(CHAT, NAMED) == (100 * 1 + 2 * 50 * 4) * MICRO
    assert cost().bound(CHAT, UNNAMED) == (100 * 1 + 1000 * 4) * MICRO
    assert cost().bound(EMBEDDINGS, UNNAMED) == 100 * MICRO
    assert cost().bound(CHAT, TokenBounds(1, 10**9, 10**9)) == (1 + MAX_TOKENS * 4) * MICRO
    assert cost(cached=3.0).bound(CHAT, NAMED) == (100 * 3 + 2 * 50 * 4) * MICRO
    assert cost(input=None, output=None).bound(CHAT, NAMED) == 0
    assert [has_output(CHAT), has_output(EMBEDDINGS)] == [True, False]


def test_an_answer_costs_what_its_usage_says() -> None:
    known = cost()
    reserved = known.bound(CHAT, NAMED)
    assert known.of(CHAT, NAMED, reserved, SaidUsage(20, 30, 10)) == (10 * 2 + 10 + 30 * 8) * MICRO // 2
    assert known.of(CHAT, NAMED, reserved, SaidUsage(100, 100, 0)) == reserved
    for odd in (None, SaidUsage(101, 1, 0), SaidUsage(1, 101, 0)):
        assert known.of(CHAT, NAMED, reserved, odd) is None
    assert known.exceeded == 0


def test_more_output_than_the_setting_is_paid(caplog: pytest.LogCaptureFixture) -> None:
    known = cost()
    reserved = known.bound(CHAT, UNNAMED)
    assert [known.of(CHAT, UNNAMED, reserved, SaidUsage(10, 2000, 0)) for _ in range(2)] == [8010 * MICRO] * 2
    assert known.exceeded == 2
    (said,) = caplog.records
    assert "raise its max_output_tokens, which is 1000" in said.message


def test_a_cap_is_said_once_a_day(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    known = cost(1000 * MICRO, spent=400 * MICRO)
    assert known.admits(600 * MICRO)
    known.reserve(600 * MICRO)
    assert [known.admits(MICRO) for _ in range(3)] == [False] * 3
    assert known.refused == 3
    known.tick(at(99.0))
    known.tick(at(100.0))
    known.tick(at(101.0))
    known.settle(600 * MICRO, 250 * MICRO)
    assert known.admits(750 * MICRO)
    known.tick(at(200.0))  # nothing was refused: nothing to say
    reached, again = [record.message for record in caplog.records]
    assert (
        "(0.0004 USD spent, 0.0006 USD reserved, of 0.001 USD); its requests stay here until 1970-01-01T00:01:40Z"
        in reached
    )
    assert "available again, a new day began" in again


def test_an_unknown_amount_keeps_requests_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    known = cost(PICOS, spent=None)
    assert not known.admits(0)
    assert "the usage ledger cannot be read" in caplog.messages[0]
    known.tick(at(100.0))
    assert known.admits(PICOS)
    assert "available again" in caplog.messages[1]


def test_no_cap_where_one_is_set_sends_nothing() -> None:
    assert not OverflowCost(settings(max_per_day=5.0), None).admits(0)
    assert OverflowCost(settings(), None).admits(10**30)


def test_odd_usage_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    known = cost()
    known.note_odd()
    known.note_odd()
    assert (known.odd, len(caplog.records)) == (2, 1)


def test_what_requests_cost_adds_up_without_a_cap() -> None:
    found = cost()
    for amount in (3, 0, 5):
        found.reserve(10)
        found.settle(10, amount)
    assert found.spent == 8
