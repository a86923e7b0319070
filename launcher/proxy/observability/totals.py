"""The counters in one value, for who reads them every few seconds: no labels, no text."""

from __future__ import annotations

from typing import NamedTuple

from launcher.money import PICOS
from launcher.proxy.observability.counters import Counters
from launcher.proxy.request.actions import Outcome
from launcher.proxy.upstream.overflow import Overflow


class Totals(NamedTuple):
    """Since the proxy's start, but for the last two."""

    accepted: int
    failed: int
    prompt_tokens: int  # of ended requests
    output_tokens: int
    overflowed: int  # attempts at overflow endpoints
    overflow_spent: float | None  # in the currency's unit; None without prices
    queue_rejected: int
    in_flight: int
    first_tokens: tuple[float, ...]  # seconds, of streams whose first token came lately


def totals(counters: Counters, overflow: Overflow | None, first_tokens: tuple[float, ...]) -> Totals:
    endpoints = [] if overflow is None else list(overflow)
    priced = [endpoint.cost.spent for endpoint in endpoints if endpoint.cost.prices is not None]
    return Totals(
        accepted=counters.accepted,
        failed=counters.outcomes[Outcome.FAILED],
        prompt_tokens=sum(sums.prompt for sums in counters.tokens.values()),
        output_tokens=sum(sums.output for sums in counters.tokens.values()),
        overflowed=sum(endpoint.sent.total() for endpoint in endpoints),
        overflow_spent=sum(priced) / PICOS if priced else None,
        queue_rejected=counters.queue_rejected.total(),
        in_flight=counters.in_flight,
        first_tokens=first_tokens,
    )
