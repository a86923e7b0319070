"""APIs to compare with: those of [[cost.reference]], or the dated table beside this file."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from launcher.base.money import PICOS, token_prices
from launcher.config.usage_schema import Cost, Reference

FILE: Final = Path(__file__).with_name("references.toml")


class Shipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table of the launcher's."""

    currency: str
    date: str
    source: str
    url: str
    reference: tuple[Reference, ...]


class References(msgspec.Struct, frozen=True):
    """What to compare with, and what a reader must know of it."""

    rows: tuple[Reference, ...]
    note: str


@cache
def shipped() -> Shipped:
    return msgspec.toml.decode(FILE.read_bytes(), type=Shipped)


def references(cost: Cost, today: dt.date) -> References:
    """Of `cost`, or the shipped ones where it has none. No rows where the shipped prices are in another currency."""
    if cost.reference:
        return References(cost.reference, _age_of(cost.reference, today))
    table = shipped()
    if table.currency != cost.currency:
        return References(
            (),
            f"no comparison: the launcher's table of API prices is in {table.currency}; "
            f"add [[cost.reference]] with prices in {cost.currency}",
        )
    return References(
        tuple(msgspec.structs.replace(row, date=table.date) for row in table.reference),
        f"API prices of {table.date}, {_ago(table.date, today)} ({table.source}); "
        "put today's prices into [[cost.reference]]",
    )


def _age_of(rows: tuple[Reference, ...], today: dt.date) -> str:
    dates = sorted(row.date for row in rows if row.date is not None)
    undated = len(rows) - len(dates)
    if not dates:
        return "API prices of [[cost.reference]], without a date: set `date` in each"
    oldest = f"API prices of [[cost.reference]], the oldest of {dates[0]}, {_ago(dates[0], today)}"
    return f"{oldest}; {undated} without a date" if undated else oldest


def _ago(date: str, today: dt.date) -> str:
    days = (today - dt.date.fromisoformat(date)).days
    return "today" if days == 0 else f"{days} days ago" if days > 0 else "in the future"


# --- The same tokens at APIs, and from how many tokens a month this machine is cheaper. ---

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
