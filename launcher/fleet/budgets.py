"""Budgets of API keys over all hosts: each daemon is told every few seconds what a key spent on the others.

A daemon admits while its own spending and that of the others is below the budget. What was spent since the last exchange
is not known elsewhere: a key spends at most that, and its running requests, more than its budget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from launcher.errors import LauncherError
from launcher.fleet.hosts import Hosts, each

INTERVAL_S: Final = 5.0
_Name = tuple[str, str, str]  # key, budget, begin of its period
Known = dict[str, Sequence[Mapping[str, Any]]]
"""`budgets` of GET /v1/budgets by host, as last answered: a host that is lost keeps what it spent."""


def elsewhere(known: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """By host what each key spent on the others, for each budget and begin of its period, in the form in which amounts came.
    Pure."""
    own: dict[str, dict[_Name, Decimal]] = {}
    total: dict[_Name, Decimal] = {}
    for host, states in known.items():
        here = own[host] = {}
        for state in states:
            if (spent := state.get("spent_here")) is not None:
                name = state["key"], state["budget"], state["begins"]
                here[name] = Decimal(spent)
                total[name] = total.get(name, Decimal(0)) + here[name]
    return {
        host: [
            {"key": name[0], "budget": name[1], "begins": name[2], "amount": _amount(name, spent - here.get(name, 0))}
            for name, spent in sorted(total.items())
        ]
        for host, here in own.items()
    }  # fmt: skip


def _amount(name: _Name, amount: Decimal) -> int | str:
    return int(amount) if "tokens" in name[1] else f"{amount:f}"


def exchange(hosts: Hosts, known: Known) -> dict[str, LauncherError]:
    """Ask all hosts, and tell each what the others spent. Returns the hosts that could not be asked or told."""
    names = [member.host for member in hosts.members()]
    found, failed = each(names, lambda host: hosts.ask(host, "GET", "/budgets")["budgets"])
    known.update(found)

    spent = elsewhere(known)

    def tell(host: str) -> None:
        body = json.dumps({"spent": spent[host]}).encode()
        hosts.ask(host, "POST", "/budgets/elsewhere", body)

    return failed | each([host for host in found if found[host]], tell)[1]
