"""Each request ends once, and the sums add up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.requests import request_of

from launcher.proxy.observability.stats import Counters
from launcher.proxy.request.actions import Outcome


@given(st.lists(st.sampled_from(list(Outcome)), max_size=20), st.integers(0, 5))
def test_accepted_is_the_four_and_in_flight(outcomes: list[Outcome], open_: int) -> None:
    counters = Counters()
    for outcome in outcomes:
        counters.accept()
        counters.end(request_of(), outcome)
    for _ in range(open_):
        counters.accept()
    assert counters.in_flight == open_
    assert counters.accepted == counters.in_flight + sum(counters.outcomes[outcome] for outcome in Outcome)


def test_a_request_ends_once() -> None:
    counters = Counters()
    request = request_of()
    counters.end(request, Outcome.COMPLETED)
    with pytest.raises(AssertionError):
        counters.end(request, Outcome.FAILED)
