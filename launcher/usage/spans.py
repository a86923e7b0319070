"""Spans of time of a report: "30d", "today", a date, and the days and hours in them, in one time zone. Pure.

All instants are Unix seconds. A day begins at its zone's midnight and has 23 or 25 hours where the clocks change.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from launcher.errors import LauncherError
from launcher.printable import quoted

HOUR_S: Final = 3600
WANTED: Final = (
    'a time such as "12h", "30d", "4w", "today", "yesterday", a day such as 2026-11-01, or 2026-11-01T14:00'
)
_AGO: Final = re.compile(r"(\d{1,5})([mhdw])", re.ASCII)
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d)?", re.ASCII)
_SECONDS: Final = {"m": 60, "h": HOUR_S}
_DAYS: Final = {"d": 1, "w": 7}
_NAMED: Final = {"today": 0, "yesterday": 1}


def zone_of(name: str) -> ZoneInfo:
    """Raises LauncherError for a zone that this machine does not know."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise LauncherError(
            f"cannot use time zone '{quoted(name)}': this machine does not know it",
            'set usage.zone to a name such as "Europe/Berlin" or "UTC", or install the package tzdata',
        ) from None


def parse_time(text: str, now: float, zone: ZoneInfo) -> float:
    """The instant that a text names. Minutes and hours count back from `now`; days and weeks from today's midnight.

    Raises ValueError for what is no time."""
    if (ago := _AGO.fullmatch(text)) is not None:
        count, unit = int(ago[1]), ago[2]
        if unit in _SECONDS:
            return now - count * _SECONDS[unit]
        return _midnight(_today(now, zone) - dt.timedelta(days=count * _DAYS[unit]), zone)
    if text == "now":
        return now
    if text in _NAMED:
        return _midnight(_today(now, zone) - dt.timedelta(days=_NAMED[text]), zone)
    if _DAY.fullmatch(text) is None:
        raise ValueError(text)
    return dt.datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def hour_begin(instant: float, zone: ZoneInfo) -> int:
    """Begin of the hour around an instant: its minute is 0 on the zone's clock, also where that is half an hour off UTC."""
    offset = dt.datetime.fromtimestamp(instant, zone).utcoffset()
    assert offset is not None  # noqa: S101  an aware datetime has one
    whole = int(instant // 1)
    return whole - (whole + int(offset.total_seconds())) % HOUR_S


def hour_end(instant: float, zone: ZoneInfo) -> int:
    """The instant itself where an hour begins at it, else the end of the hour around it."""
    begin = hour_begin(instant, zone)
    return begin if begin == instant else begin + HOUR_S


def day_begin(instant: float, zone: ZoneInfo) -> int:
    """Midnight of the day around an instant."""
    return _midnight(_today(instant, zone), zone)


def days(since: int, until: int, zone: ZoneInfo) -> list[int]:
    """Midnights of the days that a span touches."""
    found = []
    day = _today(since, zone)
    while (begin := _midnight(day, zone)) < until:
        found.append(begin)
        day += dt.timedelta(days=1)
    return found


def hours(since: int, until: int, zone: ZoneInfo) -> list[int]:
    """Begins of the hours that a span touches."""
    return list(range(hour_begin(since, zone), until, HOUR_S))


def iso(instant: float, zone: ZoneInfo) -> str:
    """ISO 8601 with the zone's offset, to the second."""
    return dt.datetime.fromtimestamp(instant, zone).isoformat(timespec="seconds")


def _today(instant: float, zone: ZoneInfo) -> dt.date:
    return dt.datetime.fromtimestamp(instant, zone).date()


def _midnight(day: dt.date, zone: ZoneInfo) -> int:
    """The first instant of a day, where clocks change at midnight, too."""
    return int(dt.datetime.combine(day, dt.time.min, zone).timestamp())
