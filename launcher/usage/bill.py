"""What the machine costs for a span of time, by `[cost]`: rent, its share of the purchase, and energy. Pure."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

from launcher.config.usage_schema import Cost
from launcher.money import picos

HOUR_S: Final = 3600
MONTH_HOURS: Final = 730
"""A twelfth of the 8,760 hours of a year, as clouds bill."""
MONTH_S: Final = MONTH_HOURS * HOUR_S
YEAR_S: Final = 12 * MONTH_S
JOULES_PER_KWH: Final = 3_600_000


class Bill(NamedTuple):
    """Picos of the currency."""

    rent: int
    purchase: int
    energy: int

    @property
    def total(self) -> int:
        return self.rent + self.purchase + self.energy


def is_priced(cost: Cost) -> bool:
    """Whether `[cost]` says what the machine costs. 0 is a price: that of a machine that is free."""
    return cost.hourly is not None or cost.purchase is not None or has_energy_price(cost)


def has_energy_price(cost: Cost) -> bool:
    return cost.watts is not None and cost.price_per_kwh is not None


def bill(cost: Cost, seconds: int, joules: float | None = None) -> Bill:
    """Of so many seconds. `joules`: what was measured in them, for `watts = "measured"`; None: nothing."""
    return Bill(
        rent=_share(0 if cost.hourly is None else picos(cost.hourly), Fraction(seconds, HOUR_S)),
        purchase=0
        if cost.purchase is None
        else _share(picos(cost.purchase), Fraction(seconds, YEAR_S) / exact(cost.years)),
        energy=_share(
            picos(cost.price_per_kwh), Fraction(energy_joules(cost, seconds, joules)) / JOULES_PER_KWH
        )
        if cost.price_per_kwh is not None
        else 0,
    )


def energy_joules(cost: Cost, seconds: int, joules: float | None) -> Fraction:
    """By `watts`: measured, or power times time."""
    if cost.watts is None:
        return Fraction(0)
    if cost.watts == "measured":
        return Fraction(joules or 0)
    return exact(cost.watts) * seconds


def exact(number: float) -> Fraction:
    """A number of the configuration as it was written: 0.79 and not the nearest binary fraction."""
    return Fraction(Decimal(repr(number)))


def _share(amount: int, of: Fraction) -> int:
    """Rounded to a pico, once."""
    return round(amount * of)
