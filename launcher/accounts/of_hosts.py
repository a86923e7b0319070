"""Usage reports of the hosts as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Final

from msgspec.structs import fields

from launcher.accounts.report_values import UsageRow
from launcher.base.errors import LauncherError

Row = dict[str, Any]
Report = dict[str, Any]

_MONEY: Final = ("charged", "overflow_cost")
_METERED: Final = ("ready_s", "busy_s")
# Percentiles of several hosts do not follow from those of each.
_QUANTILES: Final = tuple(name for name in UsageRow.__struct_fields__ if "_p" in name and name.endswith("_s"))
_SUMMED: Final = tuple(field.name for field in fields(UsageRow) if field.type is int)


def summed(reports: Mapping[str, Report], by: str | None, missing: Mapping[str, str]) -> Report:
    """One report of those of the hosts, in their form, and `hosts` (that are in it), `missing` (why a host is not), `zones`
    where hosts count days by different ones. A row of several hosts has no percentiles. Slots are named HOST/SLOT; with
    `by` "host" a row is a host's total. Raises LauncherError for amounts in several currencies."""
    currencies = {report["currency"] for report in reports.values()}
    if len(currencies) > 1:
        raise LauncherError(
            f"cannot sum usage of the hosts: their amounts are in {' and '.join(sorted(currencies))}",
            "set the same currency under [cost] on every host",
        )
    whole = list(reports.values())
    rows: dict[str, list[Row]] = {}
    for host, report in reports.items():
        for row in [{**report["total"], "name": host}] if by == "host" else report["rows"]:
            name = f"{host}/{row['name']}" if by == "instance" and row["name"] else row["name"]
            rows.setdefault(name, []).append(row)
    return {
        **whole[0],
        "since": min(report["since"] for report in whole),
        "until": max(report["until"] for report in whole),
        "began": max(report["began"] for report in whole),
        # A daemon of an earlier version does not say it.
        "lost": sum(report.get("lost", 0) for report in whole),
        "by": by,
        "rows": _ordered((_sum(name, parts) for name, parts in rows.items()), by),
        "total": _sum("", [report["total"] for report in whole if report["total"]["requests"]] or [whole[0]["total"]]),
        "hosts": sorted(reports),
        "missing": dict(missing),
        "zones": sorted({report["zone"] for report in whole}),
    }  # fmt: skip


def _sum(name: str, parts: list[Row]) -> Row:
    # A daemon of an earlier version does not say all of them.
    row: Row = {**parts[0], "name": name}
    row.update({figure: sum(part.get(figure, 0) for part in parts) for figure in _SUMMED})
    row.update(
        {figure: f"{sum((Decimal(part[figure]) for part in parts), Decimal(0)):f}" for figure in _MONEY}
    )
    for figure in _METERED:
        known = [part[figure] for part in parts if part[figure] is not None]
        row[figure] = sum(known) if known else None
    row["utilisation"] = round(min(1.0, row["busy_s"] / row["ready_s"]), 4) if row["ready_s"] else None
    if len(parts) > 1:
        row.update(dict.fromkeys(_QUANTILES))
    return row


def _ordered(rows: Iterable[Row], by: str | None) -> list[Row]:
    if by in {"day", "hour"}:
        return sorted(rows, key=lambda row: str(row["name"]))
    return sorted(rows, key=lambda row: (-row["prompt_tokens"] - row["output_tokens"], row["name"]))
