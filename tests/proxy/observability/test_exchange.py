"""Each request ends once, and the sums add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.proxy.observability.exchange import Counters, Exchange, Outcome


@given(st.lists(st.sampled_from(list(Outcome)), max_size=20), st.integers(0, 5))
def test_accepted_equals_the_outcomes_and_in_flight(outcomes: list[Outcome], open_: int) -> None:
    tally = Counters()
    for outcome in outcomes:
        tally.accepted += 1
        tally.end(Exchange("r", "POST", "/", 0.0), outcome)
    tally.accepted += open_
    assert tally.in_flight == open_
    assert tally.accepted == tally.in_flight + sum(tally.outcomes[outcome] for outcome in Outcome)


def test_a_request_ends_once() -> None:
    tally = Counters(accepted=1)
    exchange = Exchange("r", "POST", "/", 0.0)
    tally.end(exchange, Outcome.COMPLETED)
    with pytest.raises(AssertionError):
        tally.end(exchange, Outcome.FAILED)


def test_fields_hold_no_prompt() -> None:
    fields = Exchange("r", "POST", "/v1/completions", 1.0, first_byte=1.5).fields(3.0)
    assert fields["duration_s"] == 2.0
    assert fields["first_byte_s"] == 0.5
    assert not {"body", "prompt", "messages"} & set(fields)
