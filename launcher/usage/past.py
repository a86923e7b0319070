"""What the usage ledger says of the keys' spending before the daemon's start."""

from __future__ import annotations

import contextlib
import sqlite3
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

from launcher.errors import LauncherError
from launcher.usage.budgets import Past
from launcher.usage.read import NoLedgerError, entries, open_reader
from launcher.usage.schema import BROKEN
from launcher.usage.spans import days
from launcher.usage.spending import DAY_S, KEPT_S

_SUMS: Final = """
SELECT name, sum(prompt_tokens + output_tokens), sum(picos) FROM hourly
WHERE dimension = 'key' AND hour >= ? AND hour < ? AND name != '' GROUP BY name
"""


def read_past(path: Path, zone: ZoneInfo, now: float, until: float = inf) -> Past:
    """The sums of each key and day. To be read before the ledger is opened for writing, which moves a broken file aside.
    `until`: without the requests that ended later, Unix time, where the ledger is read again by a daemon that has entered
    requests since. Never raises: what cannot be read is lost."""
    try:
        with contextlib.closing(open_reader(path)) as reader:
            # One transaction: what is entered meanwhile is in both or in none.
            reader.execute("BEGIN")
            rows = _rows(reader, zone, now)
            if until < inf:
                rows += _taken_out(reader, until)
            return Past(rows, lost_at(path))
    except NoLedgerError:
        return Past(lost_at=lost_at(path))
    except (LauncherError, sqlite3.Error, OSError) as error:
        return Past(lost_at=now, why=str(error), unreadable=True)


def _rows(reader: sqlite3.Connection, zone: ZoneInfo, now: float) -> list[tuple[str, float, int, int]]:
    end = int(now) + DAY_S
    midnights = [*days(int(now - KEPT_S), end, zone), end + DAY_S]
    return [
        (name, float(begin), int(tokens), int(picos))
        for begin, following in pairwise(midnights)
        for name, tokens, picos in reader.execute(_SUMS, (begin, following))
    ]


def _taken_out(reader: sqlite3.Connection, since: float) -> list[tuple[str, float, int, int]]:
    """The requests that ended from then on, negative: the hourly sums have them."""
    return [
        (entry.key, entry.ended_at, -entry.prompt_tokens - entry.output_tokens, -entry.picos)
        for entry in entries(reader, since, inf)
        if entry.key
    ]


def lost_at(path: Path) -> float | None:
    """When the last ledger that was moved aside was written last."""
    times = []
    for broken in path.parent.glob(f"{path.name}{BROKEN}*"):
        with contextlib.suppress(OSError):
            times.append(broken.stat().st_mtime)
    return max(times, default=None)
