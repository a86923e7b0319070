"""Amounts of money as integers, so that sums and caps are exact.

An amount is a number of picos: 1e-12 of the currency's unit. A price per million tokens with up to six decimals is then
a whole number of picos per token. 2**63 picos, what a database's integer holds, are 9.2 million units.
"""

from __future__ import annotations

import datetime as dt
import re
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation
from enum import StrEnum
from typing import Final, NamedTuple

PICOS: Final = 10**12
"""Of one unit of the currency."""
_MILLION: Final = 10**6
# More digits than any amount of numbers that a person may give; the default of 28 is not.
_WIDE: Final = Context(prec=100)


def picos(amount: Decimal | float | str) -> int:
    """An amount in the currency's unit, such as 0.79. A float counts as the shortest decimal number that is equal to it.
    Raises ValueError for what is no number, is negative, or is finer than a pico.
    """
    return _whole(amount, PICOS)


def picos_per_token(per_million: Decimal | float | str) -> int:
    """A price per million tokens, as APIs are priced. Raises ValueError as `picos`."""
    return _whole(per_million, PICOS // _MILLION)


def _whole(amount: Decimal | float | str, factor: int) -> int:
    try:
        exact = Decimal(repr(amount) if isinstance(amount, float) else amount) * factor
    except InvalidOperation:
        raise ValueError(f"{amount!r} is no number") from None
    if not exact.is_finite() or exact < 0:
        raise ValueError(f"{amount!r} is no amount")
    if exact != int(exact):
        raise ValueError(f"{amount!r} has too many decimals")
    return int(exact)


def to_decimal(amount: int) -> Decimal:
    """Picos in the currency's unit, exactly."""
    return Decimal(amount) / PICOS


def to_text(amount: int, currency: str, decimals: int = 2) -> str:
    """An amount for people: "25.50 USD". An amount that the decimals would show as zero gets more of them."""
    exact = _WIDE.divide(Decimal(amount), Decimal(PICOS))
    while decimals < 12 and exact and abs(exact) < Decimal(1).scaleb(-decimals):
        decimals += 1
    rounded = exact.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_EVEN, context=_WIDE)
    return f"{rounded:,f} {currency}"


def shown(amount: float, currency: str = "") -> str:
    """As `to_text`, of an amount in the currency's unit that was already divided for people."""
    return to_text(round(_WIDE.multiply(Decimal(repr(amount)), PICOS)), currency).rstrip()


class TokenPrices(NamedTuple):
    """Picos for one token."""

    prompt: int
    cached: int
    output: int

    def amount(self, prompt: int, cached: int, output: int) -> int:
        """Picos for so many tokens; `prompt` includes the cached ones."""
        return (prompt - cached) * self.prompt + cached * self.cached + output * self.output


def token_prices(prompt: float, output: float, cached: float | None = None) -> TokenPrices:
    """From prices per million tokens; `cached`: of cached prompt tokens, None: as others. Raises ValueError as `picos`."""
    return TokenPrices(
        picos_per_token(prompt),
        picos_per_token(prompt if cached is None else cached),
        picos_per_token(output),
    )


# --- What a budget is in writing, "20M-tokens/month" or "50-usd/week", and when its periods begin and end.

_FORM: Final = re.compile(
    r"(?P<number>\d+(?:\.\d+)?)(?P<scale>[kMG]?)-(?P<unit>tokens|[a-z]{3})/(?P<period>day|week|month)"
)
_SCALES: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}
STALE_S: Final = 60.0
"""A fleet reports every few seconds what was spent on other hosts: after so long without a report people are told."""
EXAMPLES: Final = '"20M-tokens/month" or "50-usd/week"'


class Period(StrEnum):
    DAY = "day"
    WEEK = "week"  # from Monday, as ISO 8601 has it
    MONTH = "month"

    def bounds(self, now: dt.datetime) -> tuple[dt.datetime, dt.datetime]:
        """Begin (inclusive) and end (exclusive) of the period around `now`, at midnights of its time zone."""
        today = now.date()
        if self is Period.DAY:
            first, following = today, today + dt.timedelta(days=1)
        elif self is Period.WEEK:
            first = today - dt.timedelta(days=today.weekday())
            following = first + dt.timedelta(weeks=1)
        else:
            first = today.replace(day=1)
            following = (first + dt.timedelta(days=31)).replace(day=1)
        return (
            dt.datetime.combine(first, dt.time.min, now.tzinfo),
            dt.datetime.combine(following, dt.time.min, now.tzinfo),
        )


class Budget(NamedTuple):
    """The most that a key may use in a period."""

    amount: int  # tokens, or picos of the currency
    unit: str  # "tokens", or a currency in lower case
    period: Period

    @property
    def is_money(self) -> bool:
        return self.unit != "tokens"


def parse_budget(text: str) -> Budget:
    """Raises ValueError, whose text is for a person."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no budget such as {EXAMPLES}")
    unit, scale = found["unit"], _SCALES[found["scale"]]
    if unit == "tokens":
        amount = picos(found["number"]) * scale
        if amount % 10**12:
            raise ValueError(f"{text!r} is a part of a token")
        amount //= 10**12
    else:
        amount = picos(found["number"]) * scale
    if not 0 < amount < 2**62:
        raise ValueError(f"{text!r} is not a budget above 0 that can be counted")
    return Budget(amount, unit, Period(found["period"]))
