"""Times as a person writes them, and days and hours of zones whose clocks change."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import subprocess
import sys
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.accounts.report_values import (
    HOUR_S,
    day_begin,
    days,
    hour_begin,
    hour_end,
    hours,
    iso,
    parse_time,
    zone_of,
)
from launcher.base.errors import LauncherError

UTC, BERLIN, INDIA = ZoneInfo("UTC"), ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata")
ZONES = [UTC, BERLIN, INDIA, ZoneInfo("America/Santiago"), ZoneInfo("America/Havana"), ZoneInfo("Asia/Kathmandu"),
         ZoneInfo("Pacific/Apia"), ZoneInfo("America/New_York")]  # fmt: skip


def at(text: str, zone: ZoneInfo = UTC) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


@pytest.mark.parametrize(
    ("text", "instant"),
    [("now", "2026-11-23T01:30:15"), ("90m", "2026-11-23T00:00:15"), ("12h", "2026-11-22T13:30:15"),
     ("0d", "2026-11-23T00:00"), ("1d", "2026-11-22T00:00"), ("30d", "2026-10-24T00:00"), ("4w", "2026-10-26T00:00"),
     ("today", "2026-11-23T00:00"), ("yesterday", "2026-11-22T00:00"), ("2026-11-01", "2026-11-01T00:00"),
     ("2026-11-01T14:00", "2026-11-01T14:00"), ("2026-11-01 14:30", "2026-11-01T14:30")],
)  # fmt: skip
@pytest.mark.parametrize("zone", [UTC, INDIA])
def test_times_as_written(text: str, instant: str, zone: ZoneInfo) -> None:
    assert parse_time(text, at("2026-11-23T01:30:15", zone), zone) == at(instant, zone)


@pytest.mark.parametrize(
    "text",
    ["", "30", "d", "-1d", "1.5h", "1y", "999999d", "tomorrow", "2026-13-01", "2026-02-30", "2026-11-01T25:00",
     "2026-11-01T14:00Z", "20261101", "2026-W05", "٣d", "30d "],
)  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  its text is the caller's
        parse_time(text, at("2026-11-23T01:30"), UTC)


def test_a_time_long_ago() -> None:
    assert parse_time("99999w", at("2026-11-23T01:30"), BERLIN) < 0


@pytest.mark.parametrize("name", ["UTC", "Europe/Berlin"])
def test_a_system_without_time_zones_knows_them_all(name: str) -> None:
    code = "import sys; from launcher.accounts.report_values import zone_of; print(zone_of(sys.argv[1]))"
    bare = os.environ | {"PYTHONTZPATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code, name], env=bare, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout == f"{name}\n"


@pytest.mark.parametrize("name", ["Europe/Bonn", "", "../etc/passwd", "\x00"])
def test_an_unknown_zone(name: str) -> None:
    with pytest.raises(LauncherError, match="cannot use time zone"):
        zone_of(name)


@pytest.mark.parametrize(
    ("zone", "day", "count"),
    [("Europe/Berlin", "2026-03-29", 23), ("Europe/Berlin", "2026-10-25", 25), ("Europe/Berlin", "2026-11-01", 24),
     ("America/New_York", "2026-03-08", 23), ("America/New_York", "2026-11-01", 25),
     # Clocks change at midnight: the first hour of the day is missing, or comes twice.
     ("America/Santiago", "2026-09-06", 23), ("America/Havana", "2026-03-08", 23), ("America/Havana", "2026-11-01", 25),
     ("Asia/Kolkata", "2026-11-01", 24)],
)  # fmt: skip
def test_days_have_23_to_25_hours(zone: str, day: str, count: int) -> None:
    where = ZoneInfo(zone)
    begin = day_begin(at(f"{day}T12:00", where), where)
    (first, following) = days(begin, begin + 26 * HOUR_S, where)
    assert first == begin
    assert following - first == count * HOUR_S
    assert len(hours(first, following, where)) == count


def test_half_hours() -> None:
    assert iso(hour_begin(at("2026-11-01T14:29", INDIA), INDIA), INDIA) == "2026-11-01T14:00:00+05:30"
    assert hour_end(at("2026-11-01T14:29", INDIA), INDIA) == at("2026-11-01T15:00", INDIA)
    assert hour_end(at("2026-11-01T14:00", INDIA), INDIA) == at("2026-11-01T14:00", INDIA)


@given(st.floats(1.6e9, 2.2e9), st.sampled_from(ZONES))
def test_hours_and_days_hold_their_instant(instant: float, zone: ZoneInfo) -> None:
    hour, day = hour_begin(instant, zone), day_begin(instant, zone)
    assert hour <= instant < hour + HOUR_S
    assert day <= hour
    assert hour_begin(hour, zone) == hour
    assert dt.datetime.fromtimestamp(hour, zone).minute == 0
    assert day_begin(hour, zone) == day
    assert day_begin(day - 1, zone) < day
    assert day <= instant < day + 25 * HOUR_S


@given(st.integers(1_600_000_000, 2_000_000_000), st.integers(1, 100), st.sampled_from(ZONES))
def test_days_of_a_span_follow_one_another(since: int, count: int, zone: ZoneInfo) -> None:
    until = since + count * HOUR_S
    found = days(since, until, zone)
    assert found[0] <= since
    assert found[-1] < until
    assert all(22 * HOUR_S < b - a < 26 * HOUR_S for a, b in itertools.pairwise(found))
    assert set(found) == {day_begin(hour, zone) for hour in hours(found[0], until, zone)}
