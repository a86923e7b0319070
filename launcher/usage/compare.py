"""The same tokens at APIs, and from how many tokens a month this machine is cheaper. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Final, NamedTuple

import msgspec

from launcher.config.usage_schema import Reference
from launcher.money import PICOS, token_prices

MILLION: Final = 10**6


class Tokens(NamedTuple):
    prompt: int  # the cached ones included
    cached: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What the same tokens cost at one API. Amounts are numbers in the currency's unit."""

    name: str
    """Its name."""
    input: float
    """Its price of a million prompt tokens."""
    cached: float | None
    """Its price of a million cached prompt tokens; null: as others."""
    output: float
    """Its price of a million output tokens."""
    date: str | None
    """Day of these prices; null if it is not known."""
    amount: float
    """For the same tokens."""
    per_million: float | None
    """`amount` for a million prompt and output tokens; null without tokens."""
    break_even_tokens: int | None
    """Tokens a month, in the same proportions, from which this machine is cheaper; null: at no number."""


def comparisons(
    references: Iterable[Reference], tokens: Tokens, month_picos: int, most: Fraction | None = None
) -> tuple[Comparison, ...]:
    """`month_picos`: bill of this machine for a month; `most`: tokens that it can serve in one, where that is known."""
    return tuple(_comparison(reference, tokens, month_picos, most) for reference in references)


def _comparison(reference: Reference, tokens: Tokens, month_picos: int, most: Fraction | None) -> Comparison:
    prices = token_prices(reference.input, reference.output, reference.cached)
    amount = prices.amount(tokens.prompt, tokens.cached, tokens.output)
    least = break_even(month_picos, amount, tokens.total)
    return Comparison(
        name=reference.name,
        input=reference.input,
        cached=reference.cached,
        output=reference.output,
        date=reference.date,
        amount=units(amount),
        per_million=per_million(amount, tokens.total),
        # A second machine costs as much again: an API that is cheaper than one full machine is cheaper than several.
        break_even_tokens=None if least is None or (most is not None and least > most) else least,
    )


def break_even(month_picos: int, amount: int, tokens: int) -> int | None:
    """Tokens a month at which an API that asks `amount` for `tokens` costs as much as the machine; rounded up."""
    return -(-month_picos * tokens // amount) if amount and tokens else None


def units(amount: Fraction | int) -> float:
    """Picos as a number to show. No sum is made of it."""
    return float(Fraction(amount) / PICOS)


def per_million(amount: Fraction | int, tokens: int) -> float | None:
    """Picos for so many tokens, in the currency's unit for a million; None without tokens."""
    return float(Fraction(amount) * MILLION / tokens / PICOS) if tokens else None
