"""APIs to compare with: those of [[cost.reference]], or the dated table beside this file."""

from __future__ import annotations

import datetime as dt
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

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
