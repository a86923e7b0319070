"""What a report of the usage ledger holds: the types of `GET /v1/usage`, `GET /v1/usage/requests` and
`usage` in `GET /v1/status`. Pure.

Amounts of money are decimal numbers as text, exact to a pico: a sum of floats would not be.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from msgspec import Struct

from launcher.base.errors import LauncherError
from launcher.base.text import quoted


class UsageRow(Struct, frozen=True, kw_only=True):
    """Requests that ended, of one key, model, instance, overflow endpoint, day or hour. Latencies are within 5 %."""

    name: str
    """Name of the key, the model or the overflow endpoint; number of the slot; day (2026-11-01) or begin of the hour (ISO
    8601). Empty: without key, for no known model, answered by no instance, not sent to an overflow endpoint."""
    requests: int
    """Requests: `completed` + `refused` + `client_aborted` + `rejected` + `failed`."""
    completed: int
    """A whole response was delivered."""
    refused: int
    """Refused by an instance or an overflow endpoint: answered with its 4xx. In no latency."""
    client_aborted: int
    """The client left first."""
    rejected: int
    """Refused by the proxy: limits, budgets, no such model, no ready instance."""
    failed: int
    """Answered with a 5xx, or broken off."""
    continued: int
    """Continued on another instance after the first token."""
    overflowed: int
    """Sent to an overflow endpoint."""
    estimated: int
    """Requests whose tokens are estimated, because no upstream counted them."""
    prompt_tokens: int
    """Tokens of prompts, the cached ones included."""
    cached_tokens: int
    """Prompt tokens found in a prefix cache."""
    output_tokens: int
    """Generated tokens."""
    charged: str
    """Amount taken from budgets: at [cost.price], and at the prices of the overflow endpoints."""
    overflow_cost: str
    """Amount that the overflow endpoints charge."""
    first_byte_p50_s: float | None
    """Seconds from the arrival of a request to the first byte of its response (of a stream: the first token), median; null
    without responses."""
    first_byte_p90_s: float | None
    """The same, 90th percentile."""
    first_byte_p99_s: float | None
    """The same, 99th percentile."""
    duration_p50_s: float | None
    """Seconds from the arrival of a request to its end, median."""
    duration_p99_s: float | None
    """The same, 99th percentile."""
    ready_s: int | None
    """Seconds in which instances were ready, summed over the instances; null for keys, models and endpoints."""
    busy_s: int | None
    """Of these, seconds with one request or more in flight."""
    utilisation: float | None
    """`busy_s` ÷ `ready_s`; null without an instance."""


class UsageReport(Struct, frozen=True, kw_only=True):
    """`GET /v1/usage`. Times are Unix seconds."""

    since: int
    """Begin of the report: a full hour."""
    until: int
    """End of the report."""
    zone: str
    """Time zone of days and hours."""
    began: float
    """The ledger has no requests from before."""
    by: str | None
    """What a row is: key, model, instance, overflow, day or hour; null: there are no rows."""
    key: str | None
    """Only requests of this key; null: all."""
    model: str | None
    """Only requests for this model; null: all."""
    currency: str
    """Currency of the amounts."""
    lost: int
    """Requests of this time, of whatever key or model, that are missing: the ledger could not be written, and the memory for
    them was full."""
    rows: tuple[UsageRow, ...]
    """Days and hours in order, others by tokens, the most first."""
    total: UsageRow
    """All requests of the report."""


class UsageToday(Struct, frozen=True, kw_only=True):
    """Requests that ended since the last midnight in [usage] zone."""

    since: int
    """That midnight, Unix seconds."""
    requests: int
    """Requests, whatever their outcome."""
    prompt_tokens: int
    """Tokens of prompts, the cached ones included."""
    output_tokens: int
    """Generated tokens."""


class UsageRequest(Struct, frozen=True, kw_only=True):
    """One request. Texts are empty where there is none."""

    time: float
    """Its end."""
    request_id: str
    """Its X-Request-Id."""
    key: str
    """Name of its API key."""
    model: str
    """The model that it named."""
    adapter: str
    """The LoRA adapter that it named."""
    path: str
    """Its route."""
    status: int
    """Status of the response; 0: none was sent."""
    outcome: str
    """completed, refused, client_aborted, rejected or failed."""
    slot: int | None
    """The last instance that worked on it; null: none did."""
    prompt_tokens: int
    """Tokens of its prompt, the cached ones included."""
    cached_tokens: int
    """Prompt tokens found in a prefix cache."""
    output_tokens: int
    """Generated tokens."""
    estimated: bool
    """Whether its tokens are estimated, because no upstream counted them."""
    queued_s: float | None
    """Seconds from its arrival until an instance was asked; null: none was."""
    first_byte_s: float | None
    """Seconds from its arrival to the first byte of its response; of a stream, to the first token."""
    duration_s: float
    """Seconds from its arrival to its end."""
    attempts: int
    """Attempts on upstreams."""
    continued: int
    """Continuations on other instances."""
    overflow: str
    """Name of the overflow endpoint that it was sent to."""
    overflow_reason: str
    """Why: full or predicted."""
    predicted_s: float | None
    """Time to the first token that was predicted at its arrival; null: not predicted."""
    charged: str
    """Amount at [cost.price], or at the prices of the overflow endpoint."""


class UsageRequests(Struct, frozen=True, kw_only=True):
    """`GET /v1/usage/requests`. Times are Unix seconds."""

    since: float
    """Begin of the time asked for."""
    until: float
    """Its end."""
    zone: str
    """Time zone of [usage]."""
    currency: str
    """Currency of the amounts."""
    left_out: str | None
    """Why earlier requests of this time are left out: limit (there are more); null: none is."""
    requests: tuple[UsageRequest, ...]
    """The latest requests, the latest last."""


# --- Spans of time of a report: "30d", "today", a date, and the days and hours in them, in one time zone.
#
# All instants are Unix seconds. A day begins at its zone's midnight and has 23 or 25 hours where the clocks change.

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


# --- What a report of the usage ledger is asked for, checked. ---

BY: Final = ("key", "model", "instance", "overflow", "day", "hour")
_DIMENSION: Final = {"key": "key", "model": "model", "instance": "slot", "overflow": "overflow"}


class Question(Struct, frozen=True, kw_only=True):
    """What a report is asked for. `since` and `until` as a person writes them (launcher.accounts.report_values)."""

    since: str = "30d"
    until: str = "now"
    by: str | None = None
    key: str | None = None
    model: str | None = None

    def check(self) -> None:
        """Raises LauncherError."""
        if self.by is not None and self.by not in BY:
            raise LauncherError(
                f"cannot report usage by '{quoted(self.by)}': no such grouping",
                f"choose one of {', '.join(BY)}",
            )
        if self.key is not None and self.model is not None:
            raise LauncherError(
                "cannot report usage of a key with a model: the ledger sums up keys and models apart",
                "give one of the two; `usage --requests` has both of each request",
            )
        name = "key" if self.key is not None else "model" if self.model is not None else None
        if name is not None and self.by in _DIMENSION and self.by != name:
            raise LauncherError(
                f"cannot report usage of a {name} by {self.by}: the ledger sums them up apart",
                "use --by day, --by hour, or `usage --requests`, which has both of each request",
            )

    @property
    def dimension(self) -> tuple[str, str | None]:
        """The dimension of the ledger's rows, and the name if only one is wanted."""
        if self.key is not None:
            return "key", self.key
        if self.model is not None:
            return "model", self.model
        return _DIMENSION.get(self.by or "", "all"), None


class Times(NamedTuple):
    """A report's time: Unix seconds."""

    since: float
    until: float

    @staticmethod
    def of(since: str, until: str, now: float, zone: ZoneInfo) -> Times:
        """Raises LauncherError."""
        found = Times(_parsed(since, now, zone), min(now, _parsed(until, now, zone)))
        if found.since >= found.until:
            raise LauncherError(
                f"cannot report usage from '{quoted(since)}' to '{quoted(until)}': "
                + ("that is in the future" if found.since >= now else "the end is not after the begin"),
                f"now it is {iso(now, zone)} (usage.zone = {zone.key})",
            )
        return found


def _parsed(text: str, now: float, zone: ZoneInfo) -> float:
    try:
        return parse_time(text, now, zone)
    except ValueError:
        raise LauncherError(
            f"cannot report usage of '{quoted(text)}': that is no time", f"give {WANTED}"
        ) from None
