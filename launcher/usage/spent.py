"""The cost report of a usage ledger: what `numa-launcher cost` prints, for the daemon and for a file."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from launcher.config.usage_schema import Cost
from launcher.errors import LauncherError
from launcher.usage.bill import is_priced
from launcher.usage.cost import CostReport, cost_report
from launcher.usage.observe import observe, window
from launcher.usage.references import references
from launcher.usage.report import reading


def spent(path: Path, cost: Cost, since: str, now: float) -> CostReport:
    """Of the ledger at `path`, since a time as launcher.usage.spans reads it. Raises LauncherError."""
    if not is_priced(cost):
        raise LauncherError(
            "cannot say what a token costs: [cost] does not say what the machine costs",
            "set hourly = 0.79 (rent for an hour), or purchase and years, under [cost] in the configuration",
        )
    with reading(path) as (reader, zone, began):
        begin, end = window(began, zone, since, now)
        today = dt.datetime.fromtimestamp(now, zone).date()
        return cost_report(cost, observe(reader, begin, end, zone), references(cost, today), zone.key)
