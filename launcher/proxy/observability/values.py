"""Sums of the API keys and of the overflow as values of telemetry.metrics.TABLE."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.proxy.auth.api_keys import ApiKeys
from launcher.proxy.upstream.overflow import Ending, Overflow
from launcher.telemetry import metrics


def of_keys(keys: ApiKeys, outcomes: Iterable[str]) -> metrics.Values:
    """Per name of a key; nothing where no keys are needed. `outcomes` are shown also while they are 0."""
    if not keys.required:
        return {}
    shown, sums = tuple(outcomes), sorted(keys.sums.items())
    return {
        metrics.UNAUTHORIZED: {(): keys.unauthorized},
        metrics.KEY_ACCEPTED: {(name,): of.accepted for name, of in sums},
        metrics.KEY_ENDED: {(name, outcome): of.ended[outcome] for name, of in sums for outcome in shown},
        metrics.KEY_REFUSED: {
            (name, limit): count for name, of in sums for limit, count in of.refused.items()
        },
        metrics.KEY_IN_FLIGHT: {(name,): of.in_flight for name, of in sums},
        metrics.KEY_TOKENS: {(name,): of.tokens for name, of in sums},
    }


def of_overflow(overflow: Overflow | None) -> metrics.Values:
    """Per model that may go there; nothing where there is no overflow."""
    if overflow is None:
        return {}
    return {
        metrics.OVERFLOW_SENT: {(model,): overflow.sent[model] for model in overflow.models},
        metrics.OVERFLOW_ENDED: {
            (model, ending): overflow.ended[model, ending] for model in overflow.models for ending in Ending
        },
        metrics.OVERFLOW_IN_FLIGHT: {(): overflow.in_flight},
    }
