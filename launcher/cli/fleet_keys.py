"""`numa-launcher fleet key`: the API keys file that all hosts have."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.base.errors import LauncherError
from launcher.base.text import counted, printable
from launcher.cli import key
from launcher.control.client import UnreachableError
from launcher.fleet.hosts import Hosts, each
from launcher.keys import key_file

LIST = "list"
ADOPT = "adopt"


def add_arguments(parser: argparse.ArgumentParser) -> tuple[argparse.ArgumentParser, ...]:
    """Returns the parsers of the actions."""
    actions = parser.add_subparsers(dest="key_action", metavar="ACTION", required=True)
    edited = key.add_actions(actions)
    adopt = actions.add_parser(
        ADOPT, help="give the API keys file of one host to all", allow_abbrev=False,
        description="Give the API keys file of one host to all.",
    )  # fmt: skip
    adopt.add_argument("host", metavar="HOST", help="take the file of this host")
    return (*edited, adopt)


def run(args: argparse.Namespace, hosts: Hosts, names: Sequence[str]) -> int:
    """Exit code 1: a host does not have the file yet."""
    stamps, failed = each(names, hosts.key_stamp)
    if not stamps:
        raise next(iter(failed.values()))
    number = max(map(key_file.version, stamps.values()))
    if args.key_action == ADOPT:
        if args.host not in stamps:
            raise LauncherError(
                f"cannot read the keys of '{args.host}': no such host answers", "see `fleet status`"
            )
        text, said = hosts.key_file(args.host), ""
    else:
        text, said = _edited(args, _fleets(hosts, stamps), hosts, list(stamps))
    if args.key_action == LIST:
        print(said, end="")
        behind = {host: "it has another keys file" for host in stamps if stamps[host] != key_file.stamp(text)}
    else:
        behind = _distribute(hosts, key_file.stamped(text, number + 1), list(stamps))
        # Only now: a key that no host has is of no use.
        print(said, end="")
        print(
            f"the keys file is on {counted(len(stamps) - len(behind), 'host')} of {len(names)}",
            file=sys.stderr,
        )
    behind |= {host: error.message for host, error in failed.items()}
    for host, why in behind.items():
        print(printable(f"{host} gets it when it answers: {why}"), file=sys.stderr)
    return int(bool(behind))


def _fleets(hosts: Hosts, stamps: Mapping[str, str]) -> str:
    """The file that all hosts should have. Raises LauncherError where that is not known."""
    source = key_file.newest(stamps)
    if source is None:
        found = {stamp: host for host, stamp in stamps.items() if stamp != key_file.NONE}
        if len(found) > 1:
            raise LauncherError(
                f"cannot tell which API keys file is the fleet's: those of {' and '.join(found.values())} differ",
                "choose one with `numa-launcher fleet key adopt HOST`",
            )
        source = next(iter(found.values()), None)
    return "" if source is None else hosts.key_file(source)


def _edited(args: argparse.Namespace, text: str, hosts: Hosts, names: Sequence[str]) -> tuple[str, str]:
    """The file after the action, and what it prints. A new key is in that text only: it is neither logged nor stored."""
    # Neither the configuration nor the daemon of this machine counts.
    args.file, args.config, args.socket = Path("-"), None, None

    def states(_args: argparse.Namespace, budgets: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        found, _ = each(names, lambda host: hosts.ask(host, "GET", "/budgets")["budgets"])
        return {
            # Each host knows what all spent, as of the last exchange.
            state["key"]: {**state, "elsewhere_age_s": None}
            for answer in found.values() for state in answer if budgets.get(state["key"]) == state["budget"]
        }  # fmt: skip

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        file = Path(folder, "api-keys")
        file.write_text(key_file.unstamped(text), encoding="utf-8")
        file.chmod(0o600)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            key.perform(args.key_action, args, str(file), states)
        return (text if args.key_action == LIST else file.read_text(encoding="utf-8")), printed.getvalue()


def _distribute(hosts: Hosts, text: str, names: list[str]) -> dict[str, str]:
    """Give it to all hosts; the first that answers refuses the second of two changes at once, so that it ends there. Returns
    why a host does not have it."""
    behind: dict[str, str] = {}
    while names:
        first, *names = names
        done, failed = each([first], lambda host: hosts.key_file(host, text))
        if done:
            break
        if not isinstance(error := failed[first], UnreachableError):
            raise error
        behind[first] = error.message
    else:
        raise LauncherError(
            "cannot store API keys: no host answers", "nothing was changed; see `fleet status`"
        )
    _, failed = each(names, lambda host: hosts.key_file(host, text))
    return behind | {host: error.message for host, error in failed.items()}
