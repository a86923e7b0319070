"""The daily caps of overflow endpoints at the daemon's start: what each endpoint has cost today."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

from launcher.config.schema import Overflow
from launcher.errors import LauncherError
from launcher.money import picos
from launcher.usage.budgets import StoredSum
from launcher.usage.daily_cap import DailyCap, Day
from launcher.usage.past import lost_at
from launcher.usage.read import NoLedgerError, open_reader
from launcher.usage.spans import day_begin

_DAY_S: Final = 86400
_SUM: Final = "SELECT sum(picos) FROM hourly WHERE dimension = 'overflow' AND name = ? AND hour >= ?"

_LOG = logging.getLogger(__name__)


def day_in(zone: ZoneInfo) -> Callable[[float], Day]:
    """The day around a Unix time, from midnight to midnight of the zone."""

    def day_of(now: float) -> Day:
        begin = day_begin(now, zone)
        # From noon of the next day: a day may have 25 hours.
        return Day(begin, day_begin(begin + _DAY_S * 3 // 2, zone))

    return day_of


def make_caps(
    endpoints: Iterable[Overflow],
    path: Path,
    zone: ZoneInfo,
    now: float,
    stored: Callable[[str, str, str], StoredSum],
    *,
    currency: str = "USD",
    allow_unknown: bool = False,
) -> dict[str, DailyCap]:
    """The caps by the endpoint's name. `path`: of the usage ledger, before it is opened for writing, which moves a broken
    file aside. `stored`: the slot of a kind, name and unit in the file of sums. `allow_unknown`: requests go there even
    where neither knows what it has cost today."""
    day_of = day_in(zone)
    begin = int(day_of(now).begins)
    caps = {}
    for endpoint in endpoints:
        if endpoint.max_per_day is None:
            continue
        name = endpoint.endpoint
        slot = stored("overflow", name, "day")
        spent, why = _spent(path, name, begin)
        kept = slot.amount(begin)
        if kept is not None:
            spent = max(spent or 0, kept)
        elif spent is None:
            _LOG.error(
                "cannot tell what overflow endpoint %s has cost today: %s; until midnight it gets %s",
                name, why, "requests as if that were nothing" if allow_unknown else "no requests",
                extra={"endpoint": name},
            )  # fmt: skip
            spent = 0 if allow_unknown else None
        caps[name] = DailyCap(
            picos(endpoint.max_per_day), day_of, now, spent=spent, record=slot, currency=currency
        )
    return caps


def read_again(caps: Iterable[str], path: Path, zone: ZoneInfo, now: float) -> dict[str, int]:
    """What these endpoints have cost today, as far as the ledger knows by now. An endpoint of which that was not known got
    no requests since the daemon's start."""
    begin = int(day_in(zone)(now).begins)
    found = {name: _spent(path, name, begin)[0] for name in caps}
    return {name: spent for name, spent in found.items() if spent is not None}


def _spent(path: Path, name: str, begin: int) -> tuple[int | None, str]:
    """What the ledger knows; None, and why, where it does not know all."""
    lost = lost_at(path)
    if lost is not None and lost >= begin:
        return None, "an earlier ledger was unreadable and was moved aside"
    try:
        with contextlib.closing(open_reader(path)) as reader:
            [amount] = reader.execute(_SUM, (name, begin)).fetchone()
    except NoLedgerError:
        return 0, ""
    except (LauncherError, sqlite3.Error, OSError) as error:
        return None, str(error)
    return int(amount or 0), ""
