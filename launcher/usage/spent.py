"""The cost report of a usage ledger: what `numa-launcher cost` prints, for the daemon and for a file."""

from __future__ import annotations

import datetime as dt
import sqlite3

from launcher.config.usage_schema import Cost
from launcher.errors import LauncherError
from launcher.usage.bill import is_priced
from launcher.usage.cost import CostReport, cost_report
from launcher.usage.observe import Meta, observe, window
from launcher.usage.references import references


def spent(reader: sqlite3.Connection, cost: Cost, since: str, now: float) -> CostReport:
    """Since a time as launcher.usage.spans reads it. Raises LauncherError, ValueError for what is no time."""
    if not is_priced(cost):
        raise LauncherError(
            "cannot say what a token costs: [cost] does not say what the machine costs",
            "set hourly = 0.79 (rent for an hour), or purchase and years, under [cost] in the configuration",
        )
    meta = Meta(reader)
    begin, end = window(meta, since, now)
    today = dt.datetime.fromtimestamp(now, meta.zone).date()
    return cost_report(cost, observe(reader, begin, end, meta.zone), references(cost, today), meta.zone.key)
