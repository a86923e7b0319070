"""Budgets of API keys over all hosts: each daemon is told every few seconds what a key spent on the others.

A daemon admits while its own spending and that of the others is below the budget. What was spent since the last exchange
is not known elsewhere: a key spends at most that, and its running requests, more than its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from launcher.errors import LauncherError
from launcher.fleet.hosts import Hosts, each
from launcher.usage.elsewhere import sums

INTERVAL_S: Final = 5.0
Known = dict[str, Sequence[Mapping[str, Any]]]
"""`budgets` of GET /v1/budgets by host, as last answered: a host that is lost keeps what it spent."""


def exchange(hosts: Hosts, known: Known) -> dict[str, LauncherError]:
    """Ask all hosts, and tell each what the others spent. Returns the hosts that could not be asked or told."""
    names = [member.host for member in hosts.members()]
    found, failed = each(names, lambda host: hosts.ask(host, "GET", "/budgets")["budgets"])
    known.update(found)
    bodies = {host: msgspec.json.encode(report) for host, report in sums(known).items()}
    asked = [host for host in found if found[host]]
    return failed | each(asked, lambda host: hosts.ask(host, "POST", "/budgets/elsewhere", bodies[host]))[1]
