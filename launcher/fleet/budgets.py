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
Known = dict[str, Sequence[Mapping[str, Any]]]
"""`budgets` of GET /v1/budgets by host, as last answered: a host that is lost keeps what it spent."""


def elsewhere(known: Mapping[str, Sequence[Mapping[str, Any]]], host: str) -> list[dict[str, Any]]:
    """What each key spent on the other hosts, for each budget and begin of its period, with the amounts in the form that
    they came in. Pure."""
    sums: dict[tuple[str, str, str], Decimal] = {}
    for other, states in known.items():
        for state in states if other != host else ():
            if (spent := state.get("spent_here")) is not None:
                name = (state["key"], state["budget"], state["begins"])
                sums[name] = sums.get(name, Decimal(0)) + Decimal(spent)
    return [
        {"key": key, "budget": budget, "begins": begins, "amount": int(amount) if "tokens" in budget else f"{amount:f}"}
        for (key, budget, begins), amount in sorted(sums.items())
    ]  # fmt: skip


def exchange(hosts: Hosts, known: Known) -> dict[str, LauncherError]:
    """Ask all hosts, and tell each what the others spent. Returns the hosts that could not be asked or told."""
    names = [member.host for member in hosts.members()]
    found, failed = each(names, lambda host: hosts.ask(host, "GET", "/budgets")["budgets"])
    known.update(found)

    def tell(host: str) -> None:
        body = json.dumps({"spent": elsewhere(known, host)}).encode()
        hosts.ask(host, "POST", "/budgets/elsewhere", body)

    return failed | each([host for host in found if found[host]], tell)[1]
