"""`usage` as text: what a report's time is, its table or its figures, and notes. Pure, but for the time zones' files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from msgspec import Struct

from launcher.accounts.report_values import iso, zone_of
from launcher.base.money import picos, to_text
from launcher.base.text import counted, fitted, table
from launcher.control.verdict import seconds

Row = dict[str, Any]
Report = dict[str, Any]

# Longest name in a table; --csv and --json have all of it.
_MAX_NAME: Final = 32
_HEADS: Final = {"instance": "SLOT", "overflow": "ENDPOINT"}
_NAMELESS: Final = {"key": "(no key)", "model": "(none)", "instance": "(none)", "overflow": "(local)"}


class Column(Struct, frozen=True):
    head: str
    cell: Callable[[Row], str]
    right: bool = True
    """Numbers are."""
    spare: int = 0
    """On a narrow terminal columns with a high number are dropped first; 0: never."""


def to_lines(report: Report, width: int | None) -> list[str]:
    """The complete text. `width`: columns of the terminal; None shows every column in full."""
    shown = _figures(report) if report["by"] is None else _rows(report, width)
    return [_title(report), "", *shown, *_notes(report)]


def requests_to_lines(report: Report, width: int | None) -> list[str]:
    """The table of single requests; `width` as for `to_lines`."""
    rows = report["requests"]
    zone = zone_of(report["zone"])
    columns = [
        Column("ENDED", lambda row: iso(row["time"], zone)[5:19].replace("T", " "), right=False),
        *_OF_REQUEST,
    ]
    lines = _table(columns, rows, width) if rows else ["no requests in this time"]
    return [_title(report), "", *lines, *_notes_on_requests(report)]


def _title(report: Report) -> str:
    zone = zone_of(report["zone"])
    since, until = (_minute(iso(report[name], zone)) for name in ("since", "until"))
    of = "".join(
        f" of {name} {_name(report[name])}" for name in ("key", "model") if report.get(name) is not None
    )
    return f"usage{of} from {since} to {until} ({report['zone']})"


def _minute(text: str) -> str:
    return text[:16].replace("T", " ")


def _name(text: str) -> str:
    return text if len(text) <= _MAX_NAME else f"{text[: _MAX_NAME - 1]}…"


# --- a report with rows ---------------------------------------------------------------------------


def _rows(report: Report, width: int | None) -> list[str]:
    by, rows, total = report["by"], report["rows"], report["total"]
    if not rows:
        return ["no requests in this time"]
    minutes = Counter(_minute(row["name"]) for row in rows)

    def named(row: Row) -> str:
        if row is total:
            return "total"
        if by == "hour":
            # An hour that comes twice, because the clock was set back, needs its offset.
            minute = _minute(row["name"])
            return minute if minutes[minute] == 1 else minute + row["name"][19:]
        return _name(row["name"]) or _NAMELESS[by]

    columns = [Column(_HEADS.get(by, by.upper()), named, right=False), *_COLUMNS]
    if total["overflowed"]:
        columns.append(Column("OVERFLOW", _count("overflowed"), spare=5))
        columns.append(
            Column(f"OVERFLOW {report['currency']}", lambda row: _amount(row["overflow_cost"]), spare=1)
        )
    if all(row["ready_s"] is None for row in rows):
        columns = [column for column in columns if column.head != "BUSY"]
    return _table(columns, [*rows, total], width)


def _tokens(name: str) -> Callable[[Row], str]:
    return lambda row: f"{'~' * bool(row['estimated'])}{row[name]:,}"


def _count(name: str) -> Callable[[Row], str]:
    # A daemon that was not restarted since an upgrade does not tell all of them.
    return lambda row: f"{row.get(name, 0):,}"


def _share(part: float, whole: float) -> str:
    """In whole percent; what is less, but not nothing, is <1%."""
    if not whole:
        return "-"
    percent = 100 * part / whole
    return "<1%" if 0 < percent < 0.5 else f"{percent:.0f}%"


def _cached(row: Row) -> str:
    return _share(row["cached_tokens"], row["prompt_tokens"])


def _busy(row: Row) -> str:
    return "-" if row["utilisation"] is None else _share(row["utilisation"], 1)


def _quantiles(row: Row, *names: str) -> str:
    values = [row[name] for name in names]
    return "-" if None in values else "/".join(map(seconds, values))


def _first_byte(row: Row) -> str:
    return _quantiles(row, "first_byte_p50_s", "first_byte_p90_s", "first_byte_p99_s")


def _duration(row: Row) -> str:
    return _quantiles(row, "duration_p50_s", "duration_p99_s")


def _amount(text: str, currency: str = "") -> str:
    return to_text(picos(text), currency).rstrip()


_COLUMNS: Final = (
    Column("REQUESTS", _count("requests")),
    Column("FAILED", _count("failed"), spare=2),
    Column("REJECTED", _count("rejected"), spare=7),
    Column("REFUSED", _count("refused"), spare=8),
    Column("ABORTED", _count("client_aborted"), spare=9),
    Column("PROMPT", _tokens("prompt_tokens")),
    Column("CACHED", _cached, spare=4),
    Column("OUTPUT", _tokens("output_tokens")),
    Column("TTFB 50/90/99", _first_byte, spare=6),
    Column("DURATION 50/99", _duration, spare=10),
    Column("BUSY", _busy, spare=3),
)
"""docs/usage.md explains them."""


def _table(columns: Sequence[Column], rows: Sequence[Row], width: int | None) -> list[str]:
    """Without `width` all columns are kept; else, from the least `spare` on, those that fit."""
    cells = {column.head: [column.head, *(column.cell(row) for row in rows)] for column in columns}
    widths = {head: max(map(len, its)) for head, its in cells.items()}
    kept: set[str] = set()
    for column in sorted(columns, key=lambda column: column.spare):
        full = sum(widths[head] for head in kept) + widths[column.head] + 2 * len(kept)
        if width is None or not column.spare or full <= width:
            kept.add(column.head)
    aligned = [
        [cell.rjust(widths[column.head]) if column.right else cell for cell in cells[column.head]]
        for column in columns
        if column.head in kept
    ]
    lines = table(list(zip(*aligned, strict=True)))
    return lines if width is None else fitted(lines, width)


# --- a report without rows ------------------------------------------------------------------------


def _figures(report: Report) -> list[str]:
    total = report["total"]
    outcomes = (("completed", "failed", "rejected", "refused"), ("client_aborted", "continued"))
    lines = [
        ("requests", f"{total['requests']:,}"),
*(("", " · ".join(f"{name.replace('_', ' ')} {total.get(name, 0):,}" for name in names)) for names in outcomes),
        ("prompt tokens", f"{_tokens('prompt_tokens')(total)}, of which {_cached(total)} cached"),
        ("output tokens", _tokens("output_tokens")(total)),
        ("first byte", _spelled(total, "first_byte", (50, 90, 99))),
        ("duration", _spelled(total, "duration", (50, 99))),
        ("overflow", f"{counted(total['overflowed'], 'request')}, {_amount(total['overflow_cost'], report['currency'])}"),
    ]  # fmt: skip
    if total["utilisation"] is not None:
        lines.append(("utilisation", f"{_busy(total)} of the time in which instances were ready"))
    return table(lines)


def _spelled(total: Row, what: str, percents: tuple[int, ...]) -> str:
    found = [(percent, total[f"{what}_p{percent}_s"]) for percent in percents]
    return (
        " · ".join(f"p{percent} {seconds(value)} s" for percent, value in found if value is not None) or "-"
    )


def _notes(report: Report) -> Iterator[str]:
    total, zone = report["total"], zone_of(report["zone"])
    # A daemon that was not restarted since an upgrade does not tell.
    if lost := report.get("lost", 0):
        yield ""
        yield f"{counted(lost, 'request')} of this time are missing: the ledger could not be written. Sums are too low."
    if report["began"] > report["until"]:
        yield ""
        began = _minute(iso(report["began"], zone))
        yield f"The ledger begins at {began}, which is to come: the clock was ahead, and set back."
    elif report["began"] > report["since"]:
        yield ""
        yield f"The ledger begins at {_minute(iso(report['began'], zone))}: earlier requests are not in it."
    if total["estimated"]:
        share = f"{100 * total['estimated'] / total['requests']:.2g} %"
        yield ""
        yield f"~ The tokens of {counted(total['estimated'], 'request')} ({share}) are estimated: no upstream counted them."


# --- single requests ------------------------------------------------------------------------------


def _optional(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[name] is None else seconds(row[name])


def _overflow(row: Row) -> str:
    return f"{_name(row['overflow'])} ({row['overflow_reason'] or '?'})" if row["overflow"] else "-"


_OF_REQUEST: Final = (
    Column("KEY", lambda row: _name(row["key"]) or "-", right=False, spare=2),
    Column("MODEL", lambda row: _name(row["adapter"] or row["model"]) or "-", right=False, spare=4),
    Column("OUTCOME", lambda row: row["outcome"].replace("_", " "), right=False),
    Column("STATUS", lambda row: str(row["status"] or "-"), spare=6),
    Column("SLOT", lambda row: "-" if row["slot"] is None else str(row["slot"]), spare=5),
    Column("PROMPT", _tokens("prompt_tokens")),
    Column("CACHED", _cached, spare=9),
    Column("OUTPUT", _tokens("output_tokens")),
    Column("QUEUED", _optional("queued_s"), spare=7),
    Column("TTFB", _optional("first_byte_s"), spare=1),
    Column("PREDICTED", _optional("predicted_s")),
    Column("DURATION", _optional("duration_s"), spare=3),
    Column("OVERFLOW", _overflow, right=False),
    Column("REQUEST ID", lambda row: row["request_id"], right=False, spare=8),
)


def _notes_on_requests(report: Report) -> Iterator[str]:
    if report["left_out"] == "limit":
        yield ""
        yield "Earlier requests of this time are left out: raise --limit, or give an earlier --until."
