"""Spending of budgets and daily caps before, as the ledger tells it at the daemon's start and after the clock was set.

For the ledger's thread: a disk may hang.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

from launcher.accounts.budgets import Past, StoredSum
from launcher.accounts.ledger_file import open_sums
from launcher.accounts.report_values import day_begin, days
from launcher.accounts.spending import DAY_S, KEPT_S
from launcher.base.clock import Moment
from launcher.base.database import NoDataError, is_damage
from launcher.base.database_repair import lost_at
from launcher.base.errors import reason
from launcher.base.money import picos
from launcher.base.money_limits import DailyCap, Day
from launcher.config.schema import Overflow

_LOG = logging.getLogger(__name__)


class DayCost(NamedTuple):
    """The cost of an overflow endpoint on a day."""

    picos: int | None
    """None: the ledger does not know all of it."""
    why: str = ""


class Before(NamedTuple):
    keys: Past
    endpoints: Mapping[str, DayCost]
    """By name."""

    @classmethod
    def unknown(cls, now: float, endpoints: Iterable[str], why: str) -> Before:
        """Nothing could be read."""
        return cls(
            Past(lost_at=now, why=why, unreadable=True), {name: DayCost(None, why) for name in endpoints}
        )


class Lookup(NamedTuple):
    """A question to the ledger."""

    now: Moment
    day_at: float
    """A time of the day that the endpoints' costs are asked of, Unix seconds."""
    endpoints: tuple[str, ...]


def read_before(path: Path, zone: ZoneInfo, lookup: Lookup) -> Before:
    """Never raises: what cannot be read is unknown, whatever the reason."""
    now, day = lookup.now, day_in(zone)(lookup.day_at)
    costs = _costs(path, day, now.wall, lookup.endpoints) if lookup.endpoints else {}
    return Before(read_past(path, zone, now.wall, now.steady), costs)


# --- daily caps --------------------------------------------------------------------------------------

_COSTS: Final = """
SELECT name, sum(picos) FROM hourly WHERE dimension = 'overflow' AND hour >= ? AND hour < ? GROUP BY name
"""


def day_in(zone: ZoneInfo) -> Callable[[float], Day]:
    """The day around a Unix time, from midnight to midnight of the zone."""

    def day_of(now: float) -> Day:
        begin = day_begin(now, zone)
        # From noon of the next day: a day may have 25 hours.
        return Day(begin, day_begin(begin + DAY_S * 3 // 2, zone))

    return day_of


Slots = Callable[[str, str, str], StoredSum]


def make_caps(
    endpoints: Iterable[Overflow], zone: ZoneInfo, now: Moment, stored: Slots, currency: str
) -> dict[str, DailyCap]:
    """The caps by the endpoint's name, on the day that the clock was set from, if it was. Nobody knows what they have spent
    before `begin_caps`. `stored`: the slot of a kind, name and unit."""
    day_of = day_in(zone)
    return {
        endpoint.endpoint: DailyCap(
            picos(endpoint.max_per_day), day_of, now, spent=None, currency=currency,
            record=stored("overflow", endpoint.endpoint, "day"),
        )
        for endpoint in endpoints
        if endpoint.max_per_day is not None
    }  # fmt: skip


def begin_caps(caps: Mapping[str, DailyCap], before: Before, stored: Slots, *, allow_unknown: bool) -> None:
    """At the daemon's start. `allow_unknown`: requests go there even where nobody knows what it has cost today."""
    for name, cap in caps.items():
        cost = before.endpoints[name]
        spent = spent_on(name, cost, stored, cap.begins)
        if spent is None:
            _LOG.error(
                "cannot tell what overflow endpoint %s has cost today: %s; until midnight it gets %s",
                name, cost.why, "requests as if that were nothing" if allow_unknown else "no requests",
                extra={"endpoint": name},
            )  # fmt: skip
            if allow_unknown:
                cap.start(0, guessed=True)
        else:
            cap.start(spent)


def spent_on(name: str, cost: DayCost, stored: Slots, begins: int) -> int | None:
    """The cost of an endpoint on the day that began then, with its stored sum; None: nobody knows."""
    kept = stored("overflow", name, "day").amount(begins)
    return cost.picos if kept is None else max(cost.picos or 0, kept)


def _costs(path: Path, day: Day, now: float, names: Iterable[str]) -> dict[str, DayCost]:
    try:
        lost = lost_at(path, now)
        if lost is not None and lost >= day.begins:
            why = "an earlier ledger was unreadable and was moved aside"
            return dict.fromkeys(names, DayCost(None, why))
        with contextlib.closing(open_sums(path)) as reader:
            found = {name: int(amount) for name, amount in reader.execute(_COSTS, day)}
            return {name: DayCost(found.get(name, 0)) for name in names}
    except NoDataError:
        return dict.fromkeys(names, DayCost(0))
    except Exception as error:
        return dict.fromkeys(names, DayCost(None, str(error)))


# --- What the usage ledger says of the keys' spending before the daemon's start. ---

_SUMS: Final = """
SELECT name, sum(prompt_tokens + output_tokens), sum(picos) FROM hourly
WHERE dimension = 'key' AND hour >= ? AND hour < ? AND name != '' GROUP BY name
"""


def read_past(path: Path, zone: ZoneInfo, now: float, also: float | None = None) -> Past:
    """The sums of each key and day around `now` and `also`, Unix times. Never raises: what cannot be read is unknown."""
    try:
        with contextlib.closing(open_sums(path)) as reader:
            return Past(_rows(reader, zone, {now, also or now}), lost_at(path, now))
    except NoDataError:
        return _nothing(path, now)
    except Exception as error:
        return Past(lost_at=now, why=str(error), unreadable=True, damaged=is_damage(error))


def _nothing(path: Path, now: float) -> Past:
    """There is no ledger yet, or no longer."""
    try:
        return Past(lost_at=lost_at(path, now))
    except OSError as error:
        return Past(lost_at=now, why=reason(error), unreadable=True)


def _rows(
    reader: sqlite3.Connection, zone: ZoneInfo, times: Iterable[float]
) -> list[tuple[str, float, int, int]]:
    # One statement for each day.
    ends: dict[int, int] = {}
    for now in times:
        ends |= pairwise(days(int(now - KEPT_S), int(now) + 2 * DAY_S, zone))
    return [
        (name, float(begin), int(tokens), int(picos))
        for begin, following in sorted(ends.items())
        for name, tokens, picos in reader.execute(_SUMS, (begin, following))
    ]
