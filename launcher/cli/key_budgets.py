"""Budgets of API keys on the command line: checked against the configuration, and how much remains."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from launcher.base.errors import LauncherError
from launcher.base.money import EXAMPLES, STALE_S, parse_budget
from launcher.cli import options
from launcher.cli.usage import find_ledger

if TYPE_CHECKING:
    from launcher.config.schema import Config

REMOVED = "none"


def _checked(text: str) -> str:
    parse_budget(text)
    return text


BUDGET = options.Value(f"a budget such as {EXAMPLES}", _checked)
BUDGET_OR_NONE = options.Value(
    f'a budget such as {EXAMPLES}, or "{REMOVED}"', lambda text: text if text == REMOVED else _checked(text)
)


def config_of(args: argparse.Namespace) -> Config | None:
    """The configuration that names the file of keys; None where --file does."""
    return None if args.config is None and args.file is not None else options.configured(args.config)


def check(args: argparse.Namespace, text: str | None) -> None:
    """Raises LauncherError for a budget that the daemon could not hold."""
    if text is None or (config := config_of(args)) is None:
        return
    from launcher.accounts.budgets import rules_of  # noqa: PLC0415  heavy

    rules_of(config).check(text)


def states(args: argparse.Namespace, budgets: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By name of the key, as GET /v1/budgets answers: the daemon's, or by the ledger when no daemon answers. A key of
    which neither knows has none."""
    if not budgets:
        return {}
    from launcher.control.client import UnreachableError  # noqa: PLC0415  heavy

    found: dict[str, dict[str, Any]] = {}
    try:
        if args.file is None or args.socket is not None or args.config is not None:
            answered = options.client_of(args).get("/budgets")["budgets"]
            found = {
                state["key"]: state for state in answered if budgets.get(state["key"]) == state["budget"]
            }
    except UnreachableError:
        pass
    except LauncherError as error:
        print(
            f"cannot tell how much remains of the budgets: {error.message}; {error.remedy}", file=sys.stderr
        )
        return {}
    # Of a daemon that has not seen the latest change of the file yet, too.
    missing = {name: text for name, text in budgets.items() if name not in found}
    return found | (_by_ledger(args, missing) if missing else {})


def _by_ledger(args: argparse.Namespace, budgets: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    from launcher.accounts.budgets import Budgets, rules_of  # noqa: PLC0415  heavy
    from launcher.accounts.report_values import zone_of  # noqa: PLC0415  heavy
    from launcher.accounts.spent_before import read_past  # noqa: PLC0415  heavy
    from launcher.accounts.spent_sums import SpentSums  # noqa: PLC0415  heavy
    from launcher.base.clock import Clock  # noqa: PLC0415  heavy

    config = config_of(args)
    if config is None or not config.usage.enabled:
        return {}
    path = find_ledger(config.usage)
    if not path.exists():
        return {}
    zone = zone_of(config.usage.zone)
    sums = SpentSums()
    sums.read(path)
    held = Budgets(rules_of(config), zone, Clock(), sums.slot)
    held.learn(read_past(path, zone, time.time()))
    try:
        held.follow(budgets)
    except LauncherError as error:
        print(f"{error.message}; {error.remedy}", file=sys.stderr)
        return {}
    return {state.key: asdict(state) for state in held.states()}


def elsewhere(state: Mapping[str, Any] | None) -> str:
    """What other hosts of a fleet reported: "1,234 tokens", "1.5 EUR (95 s old)"; "-" without a report."""
    if state is None or state.get("elsewhere_age_s") is None:
        return "-"
    amount, age_s = state["spent_elsewhere"], state["elsewhere_age_s"]
    text = f"{amount:,} tokens" if isinstance(amount, int) else f"{amount} {state['unit']}"
    return f"{text} ({age_s:.0f} s old)" if age_s > STALE_S else text


def left(state: Mapping[str, Any] | None) -> str:
    """For people: "12,345,678 tokens", "48.5 EUR"; "-" where it is unknown."""
    if state is None or state["left"] is None:
        return "-"
    amount = state["left"]
    return f"{amount:,} tokens" if isinstance(amount, int) else f"{amount} {state['unit']}"
