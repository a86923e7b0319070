"""What operations over all hosts print. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from launcher.cli import verify
from launcher.cpuset import CpuSet
from launcher.errors import LauncherError
from launcher.sizes import format_size
from launcher.text_table import counted, table

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
