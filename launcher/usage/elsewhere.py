"""What API keys spent of their budgets on the other hosts of a fleet: sums, and what the control socket is told. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Protocol

import msgspec

from launcher.errors import LauncherError
from launcher.money import picos


class SpentElsewhere(msgspec.Struct, frozen=True):
    """One key's sum over all other hosts in the present period. `budget`, `begins` and the form of `amount` are those of
    GET /v1/budgets."""

    key: str
    budget: str
    begins: str
    amount: int | str


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


def sums(known: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, Report]:
    """For each host what the keys spent on the others. `known`: `budgets` of GET /v1/budgets by host."""
    own: dict[str, dict[tuple[str, str, str], Decimal]] = {}
    total: dict[tuple[str, str, str], Decimal] = {}
    for host, states in known.items():
        here = own[host] = {}
        for state in states:
            if (spent := state.get("spent_here")) is not None:
                name = state["key"], state["budget"], state["begins"]
                here[name] = Decimal(spent)
                total[name] = total.get(name, Decimal(0)) + here[name]
    return {
        host: Report(tuple(_spent(name, spent - here.get(name, 0)) for name, spent in sorted(total.items())))
        for host, here in own.items()
    }


def _spent(name: tuple[str, str, str], amount: Decimal) -> SpentElsewhere:
    return SpentElsewhere(*name, int(amount) if "tokens" in name[1] else f"{amount:f}")


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
