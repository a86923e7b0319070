"""Budgets of API keys: what a key may spend in a period, what it has spent, and what its running requests may spend.

A request is admitted while spent + reserved < limit. It reserves the most that it can spend, and settles what it did
spend. So a key spends at most one request's worth more than its budget, and never less than it because of a request that
could have been large. Spent is counted by the key's name: a renewed key continues its owner's budget. What a fleet says that
the key spent on other hosts counts like what it spent here, until the period ends, and never falls: a host that is lost
has spent what it had. After the clock was set, a period goes on until the ledger was read again (`reading`, `learn`):
launcher.base.clock.

Pure: the clock and the stored sums come in as arguments. Owned by the event loop.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from math import inf
from typing import Final, NamedTuple, Protocol
from zoneinfo import ZoneInfo

from msgspec import Struct

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.report_values import iso
from launcher.accounts.spending import NOTHING, Spending, Spent, amounts, read_report
from launcher.base.clock import Bounds, Clock, Moment, Period
from launcher.base.errors import LauncherError
from launcher.base.money import STALE_S, Budget, TokenPrices, parse_budget, to_decimal, to_text, token_prices
from launcher.config.schema import Config

_LOG = logging.getLogger(__name__)


# --- Which budgets can be held: by the configuration of ledger, currency and prices. ---


class Rules(NamedTuple):
    """What is configured for all keys."""

    enabled: bool = True  # [usage] enabled: the ledger is kept
    currency: str = "USD"
    price: TokenPrices | None = None  # [cost.price]
    allow_unknown: bool = False  # [usage] when_unknown = "allow"

    def check(self, text: str) -> Budget:
        """The budget of these words. Raises LauncherError where it cannot be held."""
        why = f"cannot hold budget '{text}'"
        try:
            budget = parse_budget(text)
        except ValueError as error:
            raise LauncherError(f"cannot use a budget: {error}", "write it as NUMBER-UNIT/PERIOD") from None
        if not self.enabled:
            raise LauncherError(
                f"{why}: no usage ledger is kept",
                "set enabled = true and path under [usage], or remove the budget",
            )
        if budget.is_money and budget.unit != self.currency.lower():
            raise LauncherError(
                f"{why}: amounts are in {self.currency}",
                f"write the budget in {self.currency.lower()}, or set currency under [cost]",
            )
        if budget.is_money and self.price is None:
            raise LauncherError(
                f"{why}: a token that is served here has no price",
                "set input and output under [cost.price]; 0 where only overflow counts",
            )
        return budget


def rules_of(config: Config) -> Rules:
    price = config.cost.price
    return Rules(
        enabled=config.usage.enabled,
        currency=config.cost.currency,
        price=None if price is None else token_prices(price.input, price.output, price.cached),
        allow_unknown=config.usage.when_unknown == "allow",
    )


ALMOST: Final = 80
"""Percent of a budget at which an event is logged."""
SOON_S: Final = 5.0
"""When to try again while only running requests are in the way."""
UNKNOWN_S: Final = 60.0
_SHARES: Final = (ALMOST, 100)


class StoredSum(Protocol):
    """A slot of launcher.accounts.spent_sums."""

    def amount(self, begin: int, /) -> int | None: ...
    def store(self, begin: int, amount: int, /) -> None: ...


class Past(NamedTuple):
    """What the ledger says of the time before the daemon's start."""

    rows: Iterable[tuple[str, float, int, int]] = ()
    """Name of a key, Unix time, tokens, picos."""
    lost_at: float | None = None
    """When an earlier ledger became unreadable, Unix seconds; None: it is whole."""
    why: str = "an earlier ledger was unreadable and was moved aside"
    unreadable: bool = False
    """It could not be read now: another try may say more."""
    damaged: bool = False
    """What was read of it is damaged."""


class BudgetState(Struct, frozen=True, kw_only=True):
    """One key's budget, as `key list` and the control socket show it. Amounts in money are decimal texts."""

    key: str
    budget: str
    unit: str
    limit: int | str
    spent: int | str | None
    reserved: int | str
    left: int | str | None
    begins: str
    ends: str
    spent_here: int | str | None = None
    """Without what other hosts of a fleet report."""
    spent_elsewhere: int | str = 0
    elsewhere_age_s: float | None = None
    """Since the last report of a fleet; None: there was none."""


class Why(StrEnum):
    """Why a request is not admitted."""

    SPENT = "spent"
    RESERVED = "reserved"
    UNKNOWN = "unknown"


class Refusal(NamedTuple):
    why: Why
    message: str
    wait_s: float  # until it may be admitted; of UNKNOWN a guess


class Account(Struct):
    """The budget of one key's name in its current period."""

    name: str
    text: str
    budget: Budget
    slot: StoredSum
    elsewhere_slot: StoredSum
    period: Period
    dated: int = 0  # spent here, by requests that ended in the period; tokens or picos, as the budget
    carried: int = 0  # since the begin of the period before the clock was set, while that counts
    elsewhere: int = 0  # on other hosts, the most that was reported since nothing before counts
    told: int = 0  # the most that was reported of this period
    known: bool = True  # False: neither the ledger nor a stored sum says what was spent before
    tell_at: float = 0  # the amount at which an event is logged
    reserved: Spent = NOTHING  # by running requests

    def of(self, amount: Spent) -> int:
        return amount.picos if self.budget.is_money else amount.tokens

    @property
    def begin(self) -> int:
        return self.period.begin

    @property
    def end(self) -> int:
        return self.period.end

    @property
    def spent(self) -> int:
        """Here."""
        return max(self.dated, self.carried)

    def add(self, amount: int) -> None:
        self.dated += amount
        if self.period.carries:
            self.carried += amount

    @property
    def total(self) -> int:
        return self.spent + self.elsewhere

    @property
    def ratio(self) -> float:
        return self.total / self.budget.amount

    def set_tell_at(self) -> None:
        """To the next share that is not reached."""
        amounts = (-(-self.budget.amount * share // 100) for share in _SHARES)
        self.tell_at = min((amount for amount in amounts if amount > self.total), default=inf)


class _Held(NamedTuple):
    """An account, as far as a report must fit it."""

    text: str
    is_money: bool
    begins: str


class Reservation:
    """The most that one running request can spend."""

    __slots__ = ("_account", "_most")

    def __init__(self, account: Account, most: Spent) -> None:
        self._account = account
        self._most = most
        account.reserved = account.reserved.plus(most)

    def release(self) -> None:
        """The request has ended; a second call does nothing."""
        self._account.reserved = self._account.reserved.minus(self._most)
        self._most = NOTHING


class Budgets:
    """The budgets of all keys. `stored`: the slot of a kind, name and unit."""

    def __init__(
        self,
        rules: Rules,
        zone: ZoneInfo,
        clock: Clock,
        stored: Callable[[str, str, str], StoredSum],
    ) -> None:
        self.rules = rules
        self._zone = zone
        self._clock = clock
        self._stored = stored
        self._read_steps = -1  # of the clock, when the ledger was read
        self._spending = Spending(zone)
        self._accounts: dict[str, Account] = {}
        # What was entered before this time is not known.
        self._lost_at: float | None = inf
        # The ledger could not be read yet.
        self._unread = False
        # What requests spent since `reading`.
        self._since = Spending(zone)
        # When a fleet reported last what was spent on other hosts.
        self._told_at: float | None = None

    def reading(self) -> None:
        """The ledger is about to be read. All that was spent before this call must be in it when it is."""
        self._since = Spending(self._zone)

    def learn(self, past: Past) -> None:
        """What the ledger says. To be called before the first request: nothing is known until then. Again, each time after
        `reading`, where the ledger was unreadable before, and after the clock was set."""
        now = self._clock.now()
        again, self._unread = self._unread, past.unreadable
        if again or self._lost_at == inf:  # a ledger that was moved aside since is no loss here
            self._lost_at = past.lost_at
        if self._lost_at is not None:  # the clock was set back since: nothing is unknown until a time to come
            self._lost_at = min(self._lost_at, now.wall)
        read = Spending(self._zone)
        read.add_all(past.rows)
        self._spending.merge(read, self._since)
        self._read_steps = now.steps
        for account in self._accounts.values():
            # The sums are read together with the ledger.
            account.told = max(account.told, account.elsewhere_slot.amount(account.begin) or 0)
            account.elsewhere = max(account.elsewhere, account.told)
            self._begin(account, now)
            if again and account.known:
                account.slot.store(account.begin, account.spent)
        unknown = [name for name, account in self._accounts.items() if not account.known]
        if again and not unknown:
            _LOG.info("the usage ledger was read: what API keys spent of their budgets is known")
        if unknown:
            _LOG.error(
                "cannot tell what API keys spent of their budgets: %s; %s: %s; %s, or set [usage] when_unknown",
                past.why, "requests are allowed" if self.rules.allow_unknown else "requests are refused", ", ".join(unknown),
                "make the usage ledger readable: it is tried again" if past.unreadable
                else "stop the daemon, restore a backup (numa-launcher usage restore BACKUP), and start it",
            )  # fmt: skip

    def follow(self, budgets: Mapping[str, str]) -> None:
        """The budgets of all keys that have one, by name; each was checked by `rules.check`. A changed budget counts what
        was spent in its period before."""
        accounts: dict[str, Account] = {}
        for name, text in budgets.items():
            account = self._accounts.get(name)
            if account is None or account.text != text:
                account = self._changed(name, text, account)
            accounts[name] = account
        self._accounts = accounts

    def admit(self, name: str, most: Spent) -> Reservation | Refusal | None:
        """A reservation of the most that a request can spend, or why it cannot be admitted now. None: no budget."""
        account = self._accounts.get(name)
        if account is None:
            return None
        refusal = self._refusal(account)
        return Reservation(account, most) if refusal is None else refusal

    def refusal(self, name: str) -> Refusal | None:
        """Why no request of this key can be admitted now."""
        account = self._accounts.get(name)
        return None if account is None else self._refusal(account)

    def _refusal(self, account: Account) -> Refusal | None:
        now = self._clock.now()
        self._roll(account, now)
        if not account.known and not self.rules.allow_unknown:
            why = "the server does not know what this API key has spent of its budget"
            return Refusal(Why.UNKNOWN, f"{why}; ask its administrator", UNKNOWN_S)
        limit = account.budget.amount
        if account.total >= limit:
            message = (
                f"you exceeded your current quota: the budget of this API key is {account.text}, "
                f"{self.shown(account, account.total)} are spent; the next period begins at {iso(account.end, self._zone)}"
            )
            return Refusal(Why.SPENT, message, self._left_s(account, now))
        if account.total + account.of(account.reserved) >= limit:
            message = f"this API key's running requests may spend the rest of its budget, {account.text}"
            return Refusal(Why.RESERVED, message, min(SOON_S, self._left_s(account, now)))
        return None

    def spend(self, entry: EndedRequest) -> None:
        """A request has ended."""
        if not entry.key:
            return
        at, tokens, picos = entry.ended_at, entry.prompt_tokens + entry.output_tokens, entry.picos
        account = self._accounts.get(entry.key)
        if account is not None:
            self._roll(account, self._clock.now())
            account.add(picos if account.budget.is_money else tokens)
            if account.known:
                account.slot.store(account.begin, account.spent)
            if account.total >= account.tell_at:
                self._tell(account)
        self._spending.add(entry.key, at, tokens, picos)
        self._since.add(entry.key, at, tokens, picos)

    def told(self, body: bytes) -> dict[str, int | list[str]]:
        """A fleet reports what keys spent on its other hosts (accounts/spending.py): how many figures count here, and why
        others do not. A figure counts until a higher one, or the end of its period. Raises LauncherError."""
        self._roll_all()
        held = {
            name: _Held(account.text, account.budget.is_money, iso(account.begin, self._zone))
            for name, account in self._accounts.items()
        }
        found, ignored = amounts(read_report(body), held)
        self._told_at = self._clock.now().steady
        for name, amount in found.items():
            account = self._accounts[name]
            if amount > account.told:
                account.told = amount
                account.elsewhere_slot.store(account.begin, amount)
            account.elsewhere = max(account.elsewhere, amount)
            if account.total >= account.tell_at:
                self._tell(account)
        return {"taken": len(found), "ignored": ignored}

    def warnings(self) -> tuple[str, ...]:
        """For `status`."""
        age_s = self._told_age_s()
        if age_s is None or age_s <= STALE_S or not self._accounts:
            return ()
        what = f"no report for {age_s:.0f} s of what API keys spent on other hosts: budgets count what was reported before"
        return (f"{what}; see `numa-launcher fleet status`",)

    def _told_age_s(self) -> float | None:
        return None if self._told_at is None else max(0.0, self._clock.now().steady - self._told_at)

    def ratios(self) -> dict[str, float]:
        """Spent divided by the budget, by the name of the key; without the keys of which it is unknown."""
        self._roll_all()
        return {name: account.ratio for name, account in self._accounts.items() if account.known}

    def states(self) -> list[BudgetState]:
        """Of every key with a budget, by name."""
        self._roll_all()
        return [self._state(account) for _, account in sorted(self._accounts.items())]

    def shown(self, account: Account, amount: int) -> str:
        """An amount for people: "20,000,123 of 20,000,000 tokens", "50.12 of 50.00 USD"."""
        limit, currency = account.budget.amount, self.rules.currency
        if not account.budget.is_money:
            return f"{amount:,} of {limit:,} tokens"
        return f"{to_text(amount, currency).removesuffix(f' {currency}')} of {to_text(limit, currency)}"

    def _changed(self, name: str, text: str, before: Account | None) -> Account:
        budget = self.rules.check(text)
        kind = f"{budget.unit}/{budget.period}"
        slot, elsewhere_slot = self._stored("key", name, kind), self._stored("elsewhere", name, kind)
        now = self._clock.now()
        account = before
        if account is None or (budget.unit, budget.period) != (account.budget.unit, account.budget.period):
            period = Period(self._bounds(budget), now)
            if account is None:
                account = Account(name, text, budget, slot, elsewhere_slot, period)
            account.period, account.carried, account.dated = period, 0, 0
            account.elsewhere = account.told = elsewhere_slot.amount(period.begin) or 0
        account.text, account.budget = text, budget
        account.slot, account.elsewhere_slot = slot, elsewhere_slot
        self._begin(account, now)
        return account

    def _bounds(self, budget: Budget) -> Bounds:
        def bounds(now: float) -> tuple[int, int]:
            begin, end = budget.period.bounds(dt.datetime.fromtimestamp(now, self._zone))
            return int(begin.timestamp()), int(end.timestamp())

        return bounds

    @staticmethod
    def _left_s(account: Account, now: Moment) -> float:
        """Until the period ends."""
        return max(0.0, account.end - now.wall)

    def _roll_all(self) -> None:
        now = self._clock.now()
        for account in self._accounts.values():
            self._roll(account, now)

    def _roll(self, account: Account, now: Moment) -> None:
        if account.period.is_due(now):
            self._begin(account, now)

    def _begin(self, account: Account, now: Moment) -> None:
        """The period around `now`; while the clock was set since the ledger was read, the one before."""
        carries, period = account.period.carries, account.period
        # A new account continues the period that the clock was set from.
        earlier = account.of(self._spending.of(account.name, period.begin, period.end))
        carried = max(account.spent, earlier, account.slot.amount(period.begin) or 0)
        before, fresh = period.begin, now.steps == self._read_steps and period.move(now)
        if period.begin != before:
            account.told = account.elsewhere_slot.amount(period.begin) or 0
            account.elsewhere = max(account.elsewhere, account.told)
        if fresh:
            account.carried, account.elsewhere = 0, account.told
        elif period.carries and not carries:
            account.carried = carried
        begin, end = period.begin, period.end
        account.dated = account.of(self._spending.of(account.name, begin, end))
        account.known = self._lost_at is None or self._lost_at < begin
        stored = account.slot.amount(begin)
        if stored is not None and self._lost_at != inf:
            account.known = True
            self._add_lost(account, max(0, stored - account.dated), max(begin, min(now.wall, end - 1)))
        if account.known and period.carries:  # for the next process
            account.slot.store(begin, account.spent)
        account.set_tell_at()

    def _add_lost(self, account: Account, lost: int, now: float) -> None:
        """What a killed daemon had served and not yet entered."""
        account.dated += lost
        self._spending.add(account.name, now, *((0, lost) if account.budget.is_money else (lost, 0)))

    def _tell(self, account: Account) -> None:
        """Once for each share in each period."""
        account.set_tell_at()
        what = "budget spent" if account.tell_at == inf else f"{ALMOST} % of the budget spent"
        _LOG.warning(
            "API key %s: %s: %s, %s, until %s",
            account.name, what, account.text, self.shown(account, account.total), iso(account.end, self._zone),
            extra={"key": account.name, "budget": account.text, "spent_ratio": round(account.ratio, 4)},
        )  # fmt: skip

    def _state(self, account: Account) -> BudgetState:
        money = account.budget.is_money
        reserved, limit = account.of(account.reserved), account.budget.amount

        def plain(amount: int) -> str | int:
            return f"{to_decimal(amount).normalize():f}" if money else amount

        return BudgetState(
            key=account.name,
            budget=account.text,
            unit=self.rules.currency if money else "tokens",
            limit=plain(limit),
            spent=plain(account.total) if account.known else None,
            reserved=plain(reserved),
            left=plain(max(0, limit - account.total)) if account.known else None,
            begins=iso(account.begin, self._zone),
            ends=iso(account.end, self._zone),
            spent_here=plain(account.spent) if account.known else None,
            spent_elsewhere=plain(account.elsewhere),
            elsewhere_age_s=self._told_age_s(),
        )
