"""Rules on `[cost]` that types cannot express: amounts that can be counted exactly, energy that has a price, dates."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Final

from launcher.config.usage_schema import Cost
from launcher.errors import LauncherError
from launcher.money import picos, picos_per_token

MAX: Final = 10**12
"""Of an amount, in the currency's unit."""
Origin = Callable[[str], str]


def check_cost(cost: Cost, origin_of: Origin) -> None:
    """Raises LauncherError. `origin_of` says where a key was set."""
    for key, value, read in (*_amounts(cost), *_prices(cost)):
        try:
            if read(value) > picos(MAX):
                raise ValueError(f"{value:g} is too much")
        except ValueError as error:
            raise LauncherError(
                f"cannot use {origin_of(key)}: {key}: {error}", "write an amount such as 0.79"
            ) from None
    if cost.watts is not None and cost.price_per_kwh is None:
        raise _unpaired(origin_of, "watts", "price_per_kwh", "0.30")
    if cost.price_per_kwh is not None and cost.watts is None:
        raise _unpaired(origin_of, "price_per_kwh", "watts", '800, or "measured"')
    for number, reference in enumerate(cost.reference):
        if reference.date is not None:
            _check_date(reference.date, f"cost.reference.{number}.date", origin_of)


Amount = tuple[str, float, Callable[[float], int]]


def _amounts(cost: Cost) -> Iterator[Amount]:
    for key in ("hourly", "purchase", "price_per_kwh"):
        value = getattr(cost, key)
        if value is not None:
            yield f"cost.{key}", value, picos


def _prices(cost: Cost) -> Iterator[Amount]:
    tables = {f"cost.reference.{number}": each for number, each in enumerate(cost.reference)}
    for table, prices in (*tables.items(), *([] if cost.price is None else [("cost.price", cost.price)])):
        for key in ("input", "cached", "output"):
            value = getattr(prices, key)
            if value is not None:
                yield f"{table}.{key}", value, picos_per_token


def _unpaired(origin_of: Origin, given: str, missing: str, example: str) -> LauncherError:
    return LauncherError(
        f"cannot use {origin_of(f'cost.{given}')}: cost.{given} without cost.{missing}",
        f"set {missing} = {example}, or remove {given}",
    )


def _check_date(text: str, key: str, origin_of: Origin) -> None:
    try:
        dt.date.fromisoformat(text)
    except ValueError as error:
        raise LauncherError(
            f"cannot use {origin_of(key)}: {key} = '{text}': {error}", "write a day such as 2026-01-31"
        ) from None
