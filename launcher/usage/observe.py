"""What the usage ledger says of a window, for its cost."""

from __future__ import annotations

import sqlite3
from typing import Any, Final
from zoneinfo import ZoneInfo

from launcher.errors import LauncherError
from launcher.printable import quoted
from launcher.usage.compare import Tokens
from launcher.usage.cost import Observed, Sums
from launcher.usage.spans import WANTED, hour_begin, parse_time

# In hours of the window. The dimension's name is "" for requests that were served here.
_SUMS: Final = """
SELECT name = '', sum(requests), sum(completed), sum(prompt_tokens), sum(cached_tokens), sum(output_tokens),
    total(prefill_s), total(decode_s) FROM hourly WHERE dimension = 'overflow' AND hour >= ? AND hour < ? GROUP BY 1
"""
_PICOS: Final = "SELECT overflow_picos FROM hourly WHERE dimension = 'all' AND hour >= ? AND hour < ? AND overflow_picos > 0"
# An hour's busy slot-seconds over the slots of that hour: their number changes with `scale`.
_BUSY: Final = """
SELECT max(slots), total(busy / slots) FROM (
    SELECT total(CASE what WHEN 'busy_s' THEN amount END) AS busy, count(DISTINCT name) AS slots
    FROM metered WHERE what IN ('busy_s', 'ready_s') AND hour >= ? AND hour < ? GROUP BY hour)
"""
_METERED: Final = "SELECT count(*), total(amount) FROM metered WHERE what = ? AND hour >= ? AND hour < ?"
_OUTPUT: Final = (
    "SELECT sum(output_tokens) FROM hourly WHERE dimension = 'overflow' AND hour >= ? AND name = ''"
)
_NONE: Final = (0, 0, 0, 0, 0, 0.0, 0.0)

JOULES: Final = "joules"
"""Of metered: energy of each package."""
JOULES_S: Final = "joules_s"
"""Of metered: seconds in which energy was measured; its name is ""."""


def window(began: float, zone: ZoneInfo, since: str, now: float) -> tuple[int, int]:
    """From the begin of `since`'s hour, or from the ledger's, until now; a second at least. Raises LauncherError."""
    try:
        asked = parse_time(since, now, zone)
    except ValueError:
        raise LauncherError(
            f"cannot count since '{quoted(since)}': it is not a time", f"give {WANTED}"
        ) from None
    if asked > now:
        raise LauncherError(f"cannot count since '{quoted(since)}': that time has not come", f"give {WANTED}")
    begin = max(hour_begin(asked, zone), int(began))
    # At least a second: a ledger that has just begun has a bill, too.
    return begin, max(int(now), begin + 1)


def observe(reader: sqlite3.Connection, begin: int, end: int, zone: ZoneInfo) -> Observed:
    """The sums of the hours from that of `begin` until `end`, Unix seconds."""
    span = (hour_begin(begin, zone), end)
    sums = {bool(row[0]): row[1:] for row in reader.execute(_SUMS, span)}
    here, away = sums.get(True, _NONE), sums.get(False, _NONE)
    slots, busy_s = reader.execute(_BUSY, span).fetchone()
    measured, joules = reader.execute(_METERED, (JOULES, *span)).fetchone()
    _, joules_s = reader.execute(_METERED, (JOULES_S, *span)).fetchone()
    return Observed(
        begin=begin,
        end=end,
        local=_sums(here[1], here),
        # Summed here: SQLite's sum fails beyond 2**63 picos, and its total() is a float.
        overflow=_sums(away[0], away, sum(picos for (picos,) in reader.execute(_PICOS, span))),
        slots=slots or 0,
        busy_s=busy_s if slots else None,
        joules=joules if measured else None,
        joules_s=joules_s,
    )


def _sums(requests: int, row: tuple[Any, ...], picos: int = 0) -> Sums:
    tokens = Tokens(row[2], row[3], row[4])
    return Sums(requests=requests, tokens=tokens, prefill_s=row[5], decode_s=row[6], picos=picos)


def output_since(reader: sqlite3.Connection, hour: int) -> int:
    """Output tokens served here in the hours that began at `hour` or later."""
    return reader.execute(_OUTPUT, (hour,)).fetchone()[0] or 0
