"""What API keys spent of their budgets on the other hosts of a fleet, as the control socket is told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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
