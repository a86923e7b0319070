"""`numa-launcher fleet plan|verify|upgrade|usage|key|targets`: operations over all hosts."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from launcher.accounts.report_values import BY
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import counted, format_size, printable, printable_tree, table
from launcher.cli import fleet_keys, options, usage, verify
from launcher.control.messages import VERIFY_S
from launcher.fleet.config import DEFAULT_CONFIG, FleetConfig
from launcher.fleet.hosts import Hosts, each
from launcher.fleet.members import Member

# --- What operations over all hosts print. ---

COLUMNS: Final = (
    "cpu", "sockets", "nodes", "cores", "memory", "instances", "cores each", "model", "kv cache each", "warnings",
)  # fmt: skip
# A cell that differs from that of most hosts.
MARK: Final = "*"


def plan_of(topology: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, str]:
    """One host, as GET /v1/topology and GET /v1/plan answer it, in words by column."""
    slots = plan["slots"]
    return {
        "cpu": topology["name"] or "unknown",
        "sockets": str(len(topology["sockets"])),
        "nodes": str(len(topology["nodes"])),
        "cores": str(len(topology["cores"])),
        "memory": format_size(sum(node["memory_bytes"] for node in topology["nodes"])),
        "instances": str(len(slots)),
        "cores each": _different(str(_cores(topology, slot["cpus"])) for slot in slots),
        "model": _different(slot["model"] for slot in slots),
        "kv cache each": _different(
            format_size(slot["kv_cache_bytes"]) for slot in slots if slot["kv_cache_bytes"] is not None
        ),
        "warnings": str(len(plan.get("warnings", ())) + len(plan.get("violations", ()))),
    }


def _cores(topology: Mapping[str, Any], cpus: str) -> int:
    mine = set(CpuSet.parse(cpus))
    return sum(bool(mine & set(core["cpus"])) for core in topology["cores"])


def _different(values: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(values)) or "-"


def differences(plans: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """The columns in which a host is not as most hosts are, by host; of equally many the first host's value is the rule."""
    usual = {
        column: Counter(plan[column] for plan in plans.values()).most_common(1)[0][0]
        for column in COLUMNS
        if plans
    }
    found = {
        host: [column for column in COLUMNS if plan[column] != usual[column]] for host, plan in plans.items()
    }
    return {host: columns for host, columns in found.items() if columns}


def plan_lines(plans: Mapping[str, Mapping[str, str]]) -> list[str]:
    marked = differences(plans)
    rows = [["HOST", *(column.upper() for column in COLUMNS)]]
    for host, plan in plans.items():
        cells = [plan[column] + MARK * (column in marked.get(host, ())) for column in COLUMNS]
        rows.append([host, *cells])
    lines = table(rows)
    if marked:
        lines += ["", f"{MARK} differs from most hosts: {', '.join(marked)}"]
    return lines


def verify_rank(slots: Sequence[Mapping[str, Any]]) -> int:
    """How a host's placement is: 0 as planned, 1 other processes on its CPUs, 2 an instance does not run, 3 it differs."""
    ranks = [0]
    for slot in slots:
        found = slot["verified"]
        ranks.append(2 if found is None else 3 if not found["ok"] else int(bool(found["foreign"])))
    return max(ranks)


_WORDS: Final = (
    "as planned",
    "other processes on its CPUs",
    "not every instance runs",
    "DIFFERS from the plan",
)


def verify_lines(checked: Mapping[str, Sequence[dict[str, Any]]]) -> Iterator[str]:
    """The worst host first."""
    for host in sorted(checked, key=lambda host: (-verify_rank(checked[host]), host)):
        slots = checked[host]
        rank = verify_rank(slots)
        yield f"{host}: {_WORDS[rank]}, {counted(len(slots), 'slot')}"
        if rank:
            yield from (f"  {line}" for slot in slots for line in verify.lines_of(slot))


def missing_lines(failed: Mapping[str, LauncherError]) -> Iterator[str]:
    for host, error in failed.items():
        yield f"{host}: NO ANSWER: {error.message}; {error.remedy}"


ACTIONS: Final = ("plan", "verify", "upgrade", "usage", "key", "targets")
_PATIENCE_S: Final = VERIFY_S + 60.0
_HELP: Final = {
    "plan": "print the plan of each host side by side, and mark what differs",
    "verify": "compare cpus and memory of all hosts' instances with their plans, the worst host first",
    "upgrade": "upgrade one host at a time: drain, upgrade, check, return",
    "usage": "print what was served by all hosts, as one report",
    "key": "create, list and revoke the API keys of all hosts",
    "targets": "print the list of all hosts for Prometheus",
}


def add_actions(actions: Any) -> None:
    """Add the verbs to argparse's `actions`; -c is theirs, too."""
    for name in ACTIONS:
        text = _HELP[name]
        parser = actions.add_parser(
            name, help=text, description=f"{text[:1].upper()}{text[1:]}.", allow_abbrev=False
        )
        with_config: tuple[argparse.ArgumentParser, ...] = (parser,)
        match name:
            case "upgrade":
                _add_upgrade(parser)
            case "usage":
                usage.add_question(parser, (*BY, "host"))
                usage.add_form(parser)
            case "key":
                with_config = fleet_keys.add_arguments(parser)
            case "targets":
                parser.add_argument(
                    "--file", type=Path, metavar="FILE", help="write the list to this file, at once"
                )
            case _:
                parser.add_argument("--json", action="store_true", help="print JSON")
        for inner in with_config:
            inner.add_argument(
                "-c", "--config", type=Path, metavar="FILE", default=DEFAULT_CONFIG,
                help=f"use this configuration of the fleet (default: {DEFAULT_CONFIG})",
            )  # fmt: skip


def _add_upgrade(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--reload",
        action="store_true",
        help="only reload each host's configuration, instead of hosts.upgrade",
    )
    add("--host", action="append", default=[], metavar="HOST", help="upgrade only this host; can be repeated")
    add(
        "--accept",
        metavar="HOST",
        help="take this host as it is, though it got worse, and continue with the others",
    )
    add(
        "--restart", action="store_true", help="begin with all hosts, whatever an unfinished upgrade has done"
    )
    add(
        "--bench",
        metavar="MODEL",
        help="also compare first token and time per token, measured with this model",
    )
    add("--key-file", type=Path, metavar="FILE", help="measure with the API key in this file")
    add(
        "--drain-timeout", type=options.seconds, default=300.0, metavar="SECONDS",
        help="wait so long for running requests of a host (default: 300)",
    )  # fmt: skip
    add(
        "--ready-timeout", type=options.seconds, default=3600.0, metavar="SECONDS",
        help="wait so long for the instances of a host (default: 3600)",
    )  # fmt: skip


def run(action: str, args: argparse.Namespace, hosts: Hosts, config: FleetConfig) -> int:
    """Perform one of ACTIONS. Exit code 1: done, and a host is missing or not as it should be."""
    match action:
        case "plan":
            return _plan(args, hosts)
        case "verify":
            return _verify(args, hosts)
        case "usage":
            return _usage(args, hosts)
        case "key":
            return fleet_keys.run(args, hosts, _names(hosts))
        case "upgrade":
            return _upgrade(args, hosts, config)
        case _:
            return _targets(args, hosts, config)


def _names(hosts: Hosts) -> list[str]:
    """Raises LauncherError where there is none."""
    names = [member.host for member in hosts.members()]
    if not names:
        raise LauncherError("cannot ask the hosts: the fleet has none", "run `numa-launcher fleet up`")
    return names


def _warn(failed: Mapping[str, LauncherError]) -> None:
    for line in missing_lines(failed):
        print(printable(line), file=sys.stderr)


def _missing(failed: Mapping[str, LauncherError]) -> dict[str, str]:
    return {host: error.message for host, error in failed.items()}


def _plan(args: argparse.Namespace, hosts: Hosts) -> int:
    plans, failed = each(
        _names(hosts),
        lambda host: plan_of(hosts.ask(host, "GET", "/topology"), hosts.ask(host, "GET", "/plan")),
    )
    if args.json:
        found = {"hosts": plans, "differences": differences(plans), "missing": _missing(failed)}
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(plan_lines(printable_tree(plans))))
        _warn(failed)
    return int(bool(failed))


def _verify(args: argparse.Namespace, hosts: Hosts) -> int:
    def check(host: str) -> list[dict[str, Any]]:
        slots = hosts.ask(host, "GET", "/status")["slots"]
        return [
            hosts.ask(host, "POST", f"/slots/{slot['slot']}/verify", timeout_s=_PATIENCE_S) for slot in slots
        ]

    checked, failed = each(_names(hosts), check)
    if args.json:
        print(json.dumps({"hosts": checked, "missing": _missing(failed)}, indent=2))
    else:
        _warn(failed)
        print("\n".join(verify_lines(printable_tree(checked))))
    return int(bool(failed) or any(map(verify_rank, checked.values())))


def _usage(args: argparse.Namespace, hosts: Hosts) -> int:
    from launcher.accounts.of_hosts import summed  # noqa: PLC0415  heavy
    from launcher.accounts.report_values import Question  # noqa: PLC0415  heavy

    by = None if args.by == "host" else args.by
    question = Question(since=args.since or "30d", until=args.until, by=by, key=args.key, model=args.model)
    question.check()
    path = f"/usage?{urlencode(usage.given_of(question))}"
    reports, failed = each(_names(hosts), lambda host: hosts.ask(host, "GET", path, timeout_s=usage.ANSWER_S))
    # A host that never served this key or model says so: that is no usage, and no host that is missing.
    unused = {host for host, error in failed.items() if "the ledger has no request of it" in error.message}
    missing = {host: error for host, error in failed.items() if host not in unused}
    if not reports:
        raise next(iter({**missing, **failed}.values()))
    report = summed(reports, args.by, _missing(missing))
    args.requests = False
    usage.show(args, report)
    if len(reports) > 1 and not args.json:
        print(
            "percentiles of several hosts cannot be told from those of each: see --by host", file=sys.stderr
        )
    if len(report["zones"]) > 1:
        print(f"days begin at different times: hosts are in {', '.join(report['zones'])}", file=sys.stderr)
    if missing:
        print(f"INCOMPLETE: without {', '.join(missing)}", file=sys.stderr)
        _warn(missing)
    return int(bool(missing))


def _upgrade(args: argparse.Namespace, hosts: Hosts, config: FleetConfig) -> int:
    from launcher.cli import fleet_bench, fleet_upgrade  # noqa: PLC0415  heavy

    _names(hosts)
    members: dict[str, Member] = {member.host: member for member in hosts.members()}
    if unknown := [host for host in (*args.host, *filter(None, [args.accept])) if host not in members]:
        raise LauncherError(f"cannot upgrade '{unknown[0]}': no such host", f"hosts are {', '.join(members)}")
    names = [host for host in members if not args.host or host in args.host]
    key = _key(args.key_file)

    def measure(host: str) -> tuple[float, float]:
        return fleet_bench.measure(members[host].address, args.bench, key, config.hosts.ca)

    settings = fleet_upgrade.Settings(
        how=fleet_upgrade.RELOAD if args.reload else config.hosts.upgrade,
        file=Path(config.state) / "upgrade.json",
        drain_s=args.drain_timeout, ready_s=args.ready_timeout,
        bench=measure if args.bench else None,
    )  # fmt: skip
    if args.restart:
        settings.file.unlink(missing_ok=True)
    if args.accept:
        fleet_upgrade.accept(hosts, args.accept, settings)
    lost = fleet_upgrade.upgrade(hosts, names, settings, lambda text: print(printable(text), flush=True))
    for host in lost:
        print(
            f"{host}: not upgraded: it does not answer; start the command again when it does", file=sys.stderr
        )
    return int(bool(lost))


def _key(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LauncherError(
            f"cannot read the API key in '{file}': {error}", "name a readable file with --key-file"
        ) from None


def targets(members: Mapping[str, str], name: str, *, tls: bool) -> list[dict[str, Any]]:
    """Prometheus' file_sd_config and http_sd_config: each host's daemon. `members`: addresses by host. Pure."""
    return [
        {
            "targets": [address],
            "labels": {"fleet": name, "host": host, "__scheme__": "https" if tls else "http"},
        }
        for host, address in members.items()
    ]


def _targets(args: argparse.Namespace, hosts: Hosts, config: FleetConfig) -> int:
    from launcher.base.files import replace_file  # noqa: PLC0415  heavy

    _names(hosts)
    addresses = {member.host: member.address for member in hosts.members()}
    text = json.dumps(targets(addresses, config.name, tls=config.hosts.ca is not None), indent=2)
    if args.file is None:
        print(text)
        return 0
    try:
        replace_file(args.file, f"{text}\n".encode())
        args.file.chmod(0o644)  # names and addresses, for Prometheus' user
    except OSError as error:
        raise LauncherError(
            f"cannot write '{args.file}': {error}", "name a file in a folder that exists"
        ) from None
    return 0
