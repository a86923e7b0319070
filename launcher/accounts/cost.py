"""What tokens cost on this machine: the bill over what was served, and the share of the busy time alone. Pure.

Two figures, because one misleads. Allocated: the whole bill over what was served; idle hours are paid for, too. Used: the
bill of the busy time alone, what a token would cost on a machine that is never idle. Utilisation lies between them."""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections import deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, NamedTuple
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Struct

from launcher.accounts.references import (
    Comparison,
    References,
    Tokens,
    comparisons,
    per_million,
    references,
    units,
)
from launcher.accounts.report_values import WANTED, hour_begin, parse_time
from launcher.accounts.usage_report import reading
from launcher.base.errors import LauncherError
from launcher.base.money import picos
from launcher.base.text import quoted
from launcher.config.usage_schema import Cost

# --- What the machine costs for a span of time, by `[cost]`: rent, its share of the purchase, and energy.

HOUR_S: Final = 3600
MONTH_HOURS: Final = 730
"""A twelfth of the 8,760 hours of a year, as clouds bill."""
MONTH_S: Final = MONTH_HOURS * HOUR_S
YEAR_S: Final = 12 * MONTH_S
JOULES_PER_KWH: Final = 3_600_000


class Bill(NamedTuple):
    """Picos of the currency."""

    rent: int
    purchase: int
    energy: int

    @property
    def total(self) -> int:
        return self.rent + self.purchase + self.energy


def is_priced(cost: Cost) -> bool:
    """Whether `[cost]` says what the machine costs. 0 is a price: that of a machine that is free."""
    return cost.hourly is not None or cost.purchase is not None or has_energy_price(cost)


def has_energy_price(cost: Cost) -> bool:
    return cost.watts is not None and cost.price_per_kwh is not None


def bill(cost: Cost, seconds: int, joules: float | None = None) -> Bill:
    """Of so many seconds. `joules`: what was measured in them, for `watts = "measured"`; None: nothing."""
    return Bill(
        rent=_share(0 if cost.hourly is None else picos(cost.hourly), Fraction(seconds, HOUR_S)),
        purchase=0
        if cost.purchase is None
        else _share(picos(cost.purchase), Fraction(seconds, YEAR_S) / exact(cost.years)),
        energy=_share(
            picos(cost.price_per_kwh), Fraction(energy_joules(cost, seconds, joules)) / JOULES_PER_KWH
        )
        if cost.price_per_kwh is not None
        else 0,
    )


def energy_joules(cost: Cost, seconds: int, joules: float | None) -> Fraction:
    """By `watts`: measured, or power times time."""
    if cost.watts is None:
        return Fraction(0)
    if cost.watts == "measured":
        return Fraction(joules or 0)
    return exact(cost.watts) * seconds


def exact(number: float) -> Fraction:
    """A number of the configuration as it was written: 0.79 and not the nearest binary fraction."""
    return Fraction(Decimal(repr(number)))


def _share(amount: int, of: Fraction) -> int:
    """Rounded to a pico, once."""
    return round(amount * of)


class Sums(NamedTuple):
    """Of some requests."""

    requests: int
    tokens: Tokens
    prefill_s: float  # from asking an instance to the first byte
    decode_s: float  # from the first byte to the end
    picos: int = 0  # at the prices of the overflow endpoint

    @property
    def served(self) -> bool:
        return bool(self.tokens.total)


class Observed(NamedTuple):
    """What the ledger says of a window, in Unix seconds."""

    begin: int
    end: int
    local: Sums
    """Served by the instances here."""
    overflow: Sums
    slots: int
    """The most at once; 0: not known."""
    busy_s: float | None
    """Time of the whole machine: slot-seconds with requests, over the slots. None: not metered."""
    joules: float | None
    """None: not metered."""
    joules_s: float = 0.0
    """Seconds in which energy was metered."""

    @property
    def seconds(self) -> int:
        return self.end - self.begin


class PerMillion(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of a million tokens, a number in the currency's unit; null: there were none."""

    output: float | None
    """The whole cost over the output tokens."""
    total: float | None
    """The whole cost over prompt and output tokens."""
    input_part: float | None
    """The cost of the time before the first byte of streams, over the prompt tokens that were not cached."""
    output_part: float | None
    """The cost of the time after the first byte, over the output tokens."""


class OverflowCost(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent to overflow endpoints. Amounts are numbers in the currency's unit."""

    requests: int
    """Requests."""
    prompt_tokens: int
    """Their prompt tokens."""
    output_tokens: int
    """Their output tokens."""
    amount: float
    """What they cost there."""
    priced: bool
    """False: they have tokens but no cost, because the endpoint has no prices in [[proxy.overflow]]."""
    second_machine: float
    """Bill of one more machine like this for the same time."""
    saved: float
    """`second_machine` less `amount`; negative: one more machine would have been cheaper."""


class CostReport(msgspec.Struct, frozen=True, kw_only=True):
    """What tokens cost. Amounts are numbers in the currency's unit, times seconds since the epoch."""

    currency: str
    """Currency of all amounts."""
    zone: str
    """Time zone of the ledger's hours."""
    begin: int
    """Begin of the time, at an hour or at the ledger's begin."""
    end: int
    """Its end."""
    bill: float
    """The machine's bill for this time: `rent` + `purchase` + `energy`."""
    rent: float
    """By `hourly`."""
    purchase: float
    """Share of the purchase."""
    energy: float
    """By `price_per_kwh`."""
    kwh: float
    """Energy, by `watts` or measured."""
    kwh_measured_share: float | None
    """Share of the time in which energy was measured; null: it is not to be measured."""
    requests: int
    """Requests completed here, not by overflow endpoints."""
    prompt_tokens: int
    """Prompt tokens of requests served here, the cached ones included."""
    cached_tokens: int
    """Of these, tokens that were in a prefix cache."""
    output_tokens: int
    """Output tokens of requests served here."""
    slots: int
    """The most slots in an hour; 0: not metered."""
    utilisation: float | None
    """Share of the slots' time with requests; null: not metered."""
    input_share: float | None
    """Share of the streams' time on instances that was before the first byte; null: there were none."""
    allocated: PerMillion
    """The whole bill over what was served."""
    used: PerMillion | None
    """The busy share of the bill alone; null: utilisation is not known."""
    month_bill: float
    """The bill of 730 hours at the rate of this time."""
    month_tokens: int
    """Prompt and output tokens of 730 hours at the rate of this time."""
    references: tuple[Comparison, ...]
    """APIs."""
    references_note: str
    """Where their prices are from, and how old they are."""
    overflow: OverflowCost | None
    """Null without such requests."""


def cost_report(cost: Cost, observed: Observed, references: References, zone: str) -> CostReport:
    """`cost` must have a price (`is_priced`), and the window at least a second."""
    assert is_priced(cost)  # noqa: S101  the caller's
    seconds, local = observed.seconds, observed.local
    parts = bill(cost, seconds, observed.joules)
    # The busy share of the machine's time; clocks of metering and window may differ by a moment.
    busy = None if observed.busy_s is None else min(Fraction(1), Fraction(observed.busy_s) / seconds)
    input_share = _input_share(local)
    month = round(Fraction(parts.total * MONTH_S, seconds))
    return CostReport(
        currency=cost.currency,
        zone=zone,
        begin=observed.begin,
        end=observed.end,
        bill=units(parts.total),
        rent=units(parts.rent),
        purchase=units(parts.purchase),
        energy=units(parts.energy),
        kwh=float(energy_joules(cost, seconds, observed.joules) / JOULES_PER_KWH),
        kwh_measured_share=min(1.0, observed.joules_s / seconds) if cost.watts == "measured" else None,
        requests=local.requests,
        prompt_tokens=local.tokens.prompt,
        cached_tokens=local.tokens.cached,
        output_tokens=local.tokens.output,
        slots=observed.slots,
        utilisation=None if busy is None else float(busy),
        input_share=None if input_share is None else float(input_share),
        allocated=_per_million(Fraction(parts.total), local.tokens, input_share),
        used=None if busy is None else _per_million(parts.total * busy, local.tokens, input_share),
        month_bill=units(month),
        month_tokens=local.tokens.total * MONTH_S // seconds,
        references=comparisons(references.rows, local.tokens, month),
        references_note=references.note,
        overflow=_overflow(observed.overflow, parts.total),
    )


def _per_million(amount: Fraction, tokens: Tokens, input_share: Fraction | None) -> PerMillion:
    share = input_share
    return PerMillion(
        output=per_million(amount, tokens.output),
        total=per_million(amount, tokens.total),
        input_part=None if share is None else per_million(amount * share, tokens.prompt - tokens.cached),
        output_part=None if share is None else per_million(amount * (1 - share), tokens.output),
    )


def _input_share(sums: Sums) -> Fraction | None:
    """None where nothing was served, or output that was not streamed, whose time is not known."""
    before, after = Fraction(sums.prefill_s), Fraction(sums.decode_s)
    if not before + after or (sums.tokens.output and not after):
        return None
    return before / (before + after)


def _overflow(sums: Sums, machine: int) -> OverflowCost | None:
    if not sums.requests:
        return None
    return OverflowCost(
        requests=sums.requests,
        prompt_tokens=sums.tokens.prompt,
        output_tokens=sums.tokens.output,
        amount=units(sums.picos),
        priced=bool(sums.picos) or not sums.served,
        second_machine=units(machine),
        saved=units(machine - sums.picos),
    )


# --- What the usage ledger says of a window, for its cost. ---

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


# --- The cost report of a usage ledger: what `numa-launcher cost` prints, for the daemon and for a file. ---


def spent(path: Path, cost: Cost, since: str, now: float) -> CostReport:
    """Of the ledger at `path`, since a time as launcher.accounts.report_values reads it. Raises LauncherError."""
    if not is_priced(cost):
        raise LauncherError(
            "cannot say what a token costs: [cost] does not say what the machine costs",
            "set hourly = 0.79 (rent for an hour), or purchase and years, under [cost] in the configuration",
        )
    with reading(path) as (reader, zone, began):
        begin, end = window(began, zone, since, now)
        today = dt.datetime.fromtimestamp(now, zone).date()
        return cost_report(cost, observe(reader, begin, end, zone), references(cost, today), zone.key)


# --- Live figures of cost: what the machine has cost since the daemon's start, and what tokens cost in the last hour.


class CostNow(Struct, frozen=True, kw_only=True):
    """Costs in the currency's unit."""

    currency: str
    """Currency of [cost]."""
    per_million_output: float | None
    """Allocated cost of a million output tokens in `seconds`; null if there were none."""
    seconds: int
    """The last hour, or less after a start of the daemon."""
    today: float | None
    """Bill since midnight in the zone of [usage], or since the ledger's begin; null if the ledger cannot be read."""
    today_utilisation: float | None
    """Share of the slots' time with requests, since then; null if unknown."""


class _Sample(NamedTuple):
    at: int  # seconds, of a clock that nobody sets
    spent: int  # picos
    output_tokens: int


class Meter:
    """Counts the bill up, second by second, so that a new price applies from now on only. `now`: base.clock's steady
    time; a clock that is set ahead bills no year."""

    def __init__(self, now: float) -> None:
        self._counted_until = int(now)
        self.spent = 0
        """Picos since the start."""
        self._samples: deque[_Sample] = deque()

    def count(self, cost: Cost, now: float, joules: float | None = None) -> None:
        """`joules`: measured since the last count."""
        seconds = max(0, int(now) - self._counted_until)
        self._counted_until += seconds
        self.spent += bill(cost, seconds, joules).total

    def sample(self, now: float, output_tokens: int) -> None:
        """`output_tokens`: served here since some fixed time."""
        if self._samples and output_tokens < self._samples[-1].output_tokens:
            self._samples.clear()  # the ledger began again: its file was broken
        self._samples.append(_Sample(int(now), self.spent, output_tokens))
        while len(self._samples) > 2 and self._samples[1].at <= int(now) - HOUR_S:
            self._samples.popleft()

    def forget(self) -> None:
        """The samples: output tokens are counted since another time from now on."""
        self._samples.clear()

    def now(self, cost: Cost, today: Observed | None) -> CostNow:
        """`today`: the ledger's sums since midnight."""
        busy = None if today is None or today.busy_s is None else min(1.0, today.busy_s / today.seconds)
        first, last = self._ends()
        return CostNow(
            currency=cost.currency,
            per_million_output=per_million(
                last.spent - first.spent, last.output_tokens - first.output_tokens
            ),
            seconds=last.at - first.at,
            today=None if today is None else units(bill(cost, today.seconds, today.joules).total),
            today_utilisation=busy,
        )

    def _ends(self) -> tuple[_Sample, _Sample]:
        return (self._samples[0], self._samples[-1]) if self._samples else (_EMPTY, _EMPTY)


_EMPTY: Final = _Sample(0, 0, 0)
