"""What each key spent on each day, so that the sum of any current period is known without reading the ledger again. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from decimal import Decimal
from typing import Final, NamedTuple, Protocol
from zoneinfo import ZoneInfo

import msgspec

from launcher.accounts.report_values import day_begin
from launcher.base.errors import LauncherError
from launcher.base.money import picos

DAY_S: Final = 86400
KEPT_S: Final = 40 * DAY_S
"""Longer than a month and the week that began before it."""
_DAYS_KEPT: Final = 128
"""Of each key: a count, because days of a clock that was wrong are no reason to forget others."""


class Spent(NamedTuple):
    tokens: int  # prompt and output
    picos: int

    def plus(self, other: Spent) -> Spent:
        return Spent(self.tokens + other.tokens, self.picos + other.picos)

    def minus(self, other: Spent) -> Spent:
        return Spent(self.tokens - other.tokens, self.picos - other.picos)


NOTHING: Final = Spent(0, 0)


class Spending:
    """Sums by the name of a key and the midnight of a day, Unix seconds."""

    def __init__(self, zone: ZoneInfo) -> None:
        self._zone = zone
        self._days: dict[str, dict[int, Spent]] = {}
        # The day of the last amount: nearly every one is of the same.
        self._day = 0
        self._next_day = 0

    def add(self, name: str, at: float, tokens: int, picos: int) -> None:
        if not self._day <= at < self._next_day:
            self._day = day_begin(at, self._zone)
            # From noon of the next day: a day may have 25 hours.
            self._next_day = day_begin(self._day + DAY_S * 3 // 2, self._zone)
        days = self._days.get(name)
        if days is None:
            days = self._days[name] = {}
        before = days.get(self._day, NOTHING)
        if before is NOTHING and len(days) >= _DAYS_KEPT:
            del days[next(iter(days))]
        days[self._day] = Spent(before[0] + tokens, before[1] + picos)

    def add_all(self, rows: Iterable[tuple[str, float, int, int]]) -> None:
        """Rows of name, Unix time, tokens, picos."""
        for row in rows:
            self.add(*row)

    def merge(self, read: Spending, since: Spending) -> None:
        """Take the sums of `read`, to which those of `since` are to be added, where they are larger."""
        read.add_all(since.rows())
        for name, days in read._days.items():
            own = self._days.setdefault(name, {})
            for day, spent in days.items():
                here = own.get(day, NOTHING)
                own[day] = Spent(max(here.tokens, spent.tokens), max(here.picos, spent.picos))

    def rows(self) -> Iterator[tuple[str, float, int, int]]:
        """As `add_all` takes them."""
        for name, days in self._days.items():
            for day, spent in days.items():
                yield name, day, *spent

    def of(self, name: str, begin: int, end: int) -> Spent:
        """The sum of a key's days that began in [begin, end)."""
        total = NOTHING
        for day, spent in self._days.get(name, {}).items():
            if begin <= day < end:
                total = total.plus(spent)
        return total


# --- What API keys spent of their budgets on the other hosts of a fleet: sums, and what the control socket is told.


class SpentElsewhere(msgspec.Struct, frozen=True):
    """One key's sum over all other hosts in the present period. `budget`, `begins` and the form of `amount` are those of
    GET /v1/budgets."""

    key: str
    budget: str
    begins: str
    amount: int | str


class Heard(msgspec.Struct, frozen=True):
    """What a host says that a key spent there: those fields of GET /v1/budgets that are summed."""

    key: str
    budget: str
    begins: str
    spent_here: int | str | None = None


Known = Mapping[str, Sequence[Heard]]
"""By host."""
_Sum = tuple[str, str, str]
"""Key, unit and period of its budget, begin of the period: one sum. The amount of the budget may change meanwhile."""
_PERIODS_KEPT: Final = 3
"""Before each period that a host is in, and after: those of hosts whose clocks differ."""


class Report(msgspec.Struct, frozen=True):
    spent: tuple[SpentElsewhere, ...]


class Held(Protocol):
    """A budget here."""

    @property
    def text(self) -> str: ...
    @property
    def is_money(self) -> bool: ...
    @property
    def begins(self) -> str: ...


def read_report(body: bytes) -> Report:
    """Raises LauncherError."""
    try:
        return msgspec.json.decode(body, type=Report)
    except msgspec.DecodeError as error:
        raise LauncherError(
            f"cannot read what was spent elsewhere: {error}",
            'send {"spent": [{"key": NAME, "budget": TEXT, "begins": TIME, "amount": AMOUNT}]}',
        ) from None


def amounts(report: Report, held: Mapping[str, Held]) -> tuple[dict[str, int], list[str]]:
    """Tokens or picos by key, and why others of the report do not count here. Raises LauncherError for what is no
    amount."""
    found: dict[str, int] = {}
    ignored: list[str] = []
    for said in report.spent:
        budget = held.get(said.key)
        if budget is None:
            ignored.append(f"{said.key}: it has no budget here")
        elif budget.text != said.budget:
            ignored.append(f"{said.key}: its budget here is {budget.text}, not {said.budget}")
        elif budget.begins != said.begins:
            ignored.append(f"{said.key}: its period here began at {budget.begins}, not at {said.begins}")
        else:
            found[said.key] = _amount(said, is_money=budget.is_money)
    return found, ignored


def merged(*known: Known) -> Known:
    """Each host's spending, by the highest figure that anybody heard of it."""
    most: dict[str, dict[_Sum, Heard]] = {}
    for host, states in (entry for each in known for entry in each.items()):
        its = most.setdefault(host, {})
        for state in states:
            if state.spent_here is not None:
                name = _sum_of(state)
                before = its.get(name)
                if before is None or _spent(state) >= _spent(before):
                    its[name] = state
    return {host: tuple(state for _, state in sorted(its.items())) for host, its in most.items()}


def recent(known: Known, now: Known) -> Known:
    """Without the periods that are far from those of `now`. Which periods are the last ones is not asked: one host's wrong
    clock would make all forget."""
    dates: dict[tuple[str, str], set[str]] = {}
    present: dict[tuple[str, str], set[str]] = {}
    for found, source in ((dates, known), (present, now)):
        for state in (state for states in source.values() for state in states):
            name = _sum_of(state)
            found.setdefault(name[:2], set()).add(_date(name))
    near = {
        of: _near(sorted(all_of | present.get(of, set())), present.get(of)) for of, all_of in dates.items()
    }
    return {
        host: tuple(state for state in states if _date(name := _sum_of(state)) in near[name[:2]])
        for host, states in known.items()
    }


def _near(dates: Sequence[str], present: AbstractSet[str] | None) -> AbstractSet[str]:
    if present is None:
        return frozenset(dates)
    places = [place for place, date in enumerate(dates) if date in present]
    return {
        date for place in places for date in dates[max(0, place - _PERIODS_KEPT) : place + _PERIODS_KEPT + 1]
    }


def sums(known: Known, now: Known) -> dict[str, Report]:
    """For each host of `now` what the keys spent on the others. `known`: the most that each host ever said; `now`: the
    answers of those that answer. One that says less than before, as with a new disk, spent the difference elsewhere."""
    total: dict[_Sum, Decimal] = {}
    texts: dict[_Sum, str] = {}
    for state in (state for states in known.values() for state in states):
        name = _sum_of(state)
        total[name] = total.get(name, Decimal(0)) + _spent(state)
        texts[name] = state.budget

    def report(host: str) -> Report:
        own, of = dict(texts), {_sum_of(state): state for state in known.get(host, ())}
        for state in now[host]:
            own[_sum_of(state)] = state.budget
            if state.spent_here is not None:  # else what it had said before is its own
                of[_sum_of(state)] = state
        rest = (
            (name, spent - (_spent(of[name]) if name in of else 0)) for name, spent in sorted(total.items())
        )
        return Report(tuple(_told(name, own[name], max(Decimal(0), amount)) for name, amount in rest))

    return {host: report(host) for host in now}


def _sum_of(state: Heard) -> _Sum:
    return state.key, state.budget.partition("-")[2], state.begins


def _date(name: _Sum) -> str:
    return name[2][:10]


def _spent(state: Heard) -> Decimal:
    return Decimal(state.spent_here or 0)


def _told(name: _Sum, budget: str, amount: Decimal) -> SpentElsewhere:
    return SpentElsewhere(
        name[0], budget, name[2], int(amount) if name[1].startswith("tokens/") else f"{amount:f}"
    )


def _amount(said: SpentElsewhere, *, is_money: bool) -> int:
    try:
        if is_money:
            return picos(str(said.amount))
        if isinstance(said.amount, int) and said.amount >= 0:
            return said.amount
    except ValueError:
        pass
    raise LauncherError(
        f"cannot count what key '{said.key}' spent elsewhere: {said.amount!r} is no amount of its budget, {said.budget}",
        "send tokens as a number, money as a text, as GET /v1/budgets shows them",
    )
