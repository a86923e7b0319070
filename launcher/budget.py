"""What a budget is in writing, "20M-tokens/month" or "50-usd/week", and when its periods begin and end."""

from __future__ import annotations

import datetime as dt
import re
from enum import StrEnum
from typing import Final, NamedTuple

from launcher.money import picos

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
