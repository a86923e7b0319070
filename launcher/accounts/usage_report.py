"""Reports of the usage ledger's hourly sums: by key, model, instance, overflow endpoint, day or hour.

It blocks, for at most a second with a month of 100 keys; a daemon calls it in a thread. The sums are SQL's; histograms are
merged by numpy, because a month has hundreds of thousands.
"""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from operator import add
from pathlib import Path
from typing import Final
from zoneinfo import ZoneInfo

import numpy as np

from launcher.accounts import latency, report_values, request_rows
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LOST, DamagedLedgerError, open_reader, open_sums
from launcher.accounts.report_values import (
    Question,
    Times,
    UsageReport,
    UsageRequest,
    UsageRequests,
    UsageRow,
    UsageToday,
)
from launcher.accounts.sums import INTEGERS, OUTCOMES
from launcher.base.database import is_damage
from launcher.base.errors import LauncherError
from launcher.base.money import to_decimal
from launcher.base.text import quoted

# What a report of so many days or hours shows, nobody reads; and the histograms of each take 3 KiB.
MAX_ROWS: Final = 10_000
# Rows whose histograms are merged at once. numpy keeps the interpreter's lock meanwhile, and the event loop of a daemon
# waits for it: below 4 ms with 256 rows, up to 36 ms with 8192.
_CHUNK: Final = 256


class _Sums:
    """One row of a report while it is summed up."""

    __slots__ = ("busy_s", "figures", "ready_s")

    def __init__(self) -> None:
        self.figures = [0] * len(INTEGERS)
        self.ready_s: float | None = None
        self.busy_s = 0.0

    def take(self, figures: Iterable[int]) -> None:
        self.figures = list(map(add, self.figures, figures))

    def meter(self, what: str, amount: float) -> None:
        if what == "busy_s":
            self.busy_s += amount
        else:
            self.ready_s = (self.ready_s or 0.0) + amount


def report(path: Path, question: Question, now: float, currency: str) -> UsageReport:
    """Reads a ledger; also while a daemon writes it. `now`: Unix time. Raises LauncherError."""
    question.check()
    with reading(path) as (reader, zone, began):
        times = Times.of(question.since, question.until, now, zone)
        return _Reading(reader, question, times, zone, began).report(currency)


def today(path: Path, now: float) -> UsageToday:
    """The sums since midnight. Raises LauncherError."""
    with reading(path) as (reader, zone, _):
        since = report_values.day_begin(now, zone)
        sums = reader.execute(
            "SELECT total(requests), total(prompt_tokens), total(output_tokens) FROM hourly"
            " WHERE dimension = 'all' AND hour >= ? AND name = ''",
            (since,),
        ).fetchone()
        requests, prompt_tokens, output_tokens = map(int, sums)
    return UsageToday(
        since=since, requests=requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )


# Where the clocks of a zone change an hour may have less.
_HOUR_S: Final = 3600


@contextmanager
def reading(
    path: Path, opened: Callable[[Path], sqlite3.Connection] = open_sums
) -> Iterator[tuple[sqlite3.Connection, ZoneInfo, float]]:
    """A ledger, the zone of its hours, and when it began (Unix time). Raises LauncherError, also for what is
    read."""
    with _read(path, opened) as reader:
        meta = reader.execute("SELECT zone, began FROM meta").fetchone()
        if meta is None:
            raise LauncherError(
                f"cannot read the usage ledger '{path}': nothing was entered yet",
                "send the daemon a request first",
            )
        yield reader, report_values.zone_of(meta[0]), _began(reader, meta[1])


@contextmanager
def _read(path: Path, opened: Callable[[Path], sqlite3.Connection]) -> Iterator[sqlite3.Connection]:
    try:
        with closing(opened(path)) as reader:
            yield reader
    except LauncherError:
        raise
    except Exception as error:
        if is_damage(error):
            raise DamagedLedgerError(path, error) from None
        raise LauncherError(
            f"cannot read the usage ledger '{path}': {error}", "see that its disk works, and try again"
        ) from None


def _began(reader: sqlite3.Connection, noted: float) -> float:
    """When the first request was entered. The time that was noted then is too late where the clock, since set back, was
    ahead: a whole hour with requests lies before it."""
    first = reader.execute("SELECT min(hour) FROM hourly WHERE dimension = 'all'").fetchone()[0]
    return noted if first is None or first + _HOUR_S > noted else float(first)


class _Reading:
    def __init__(
        self, reader: sqlite3.Connection, question: Question, times: Times, zone: ZoneInfo, began: float
    ) -> None:
        self._reader = reader
        self._question = question
        self._times = times
        self._zone = zone
        self._began = began
        self._hours = (
            report_values.hour_begin(times.since, zone),
            report_values.hour_end(times.until, zone),
        )

    def report(self, currency: str) -> UsageReport:
        question = self._question
        groups, total = {name: _Sums() for name in self._expected()}, _Sums()
        name_of = self._name_of
        for label, *figures in self._summed():
            groups.setdefault(name_of(label), _Sums()).take(figures)
            total.take(figures)
        self._refuse_unknown(total)
        for what, label, amount in self._metered():
            total.meter(what, amount)
            if question.by in {"instance", "day", "hour"}:
                groups.setdefault(name_of(label), _Sums()).meter(what, amount)
        first_bytes, durations = self._histograms({name: index for index, name in enumerate(groups)})
        *rows, whole = _rows([*groups.items(), ("", total)], first_bytes, durations)
        return UsageReport(
            since=self._hours[0],
            until=int(min(self._hours[1], self._times.until)),
            zone=self._zone.key,
            began=self._began,
            by=question.by,
            key=question.key,
            model=question.model,
            currency=currency,
            lost=self._lost(),
            rows=tuple(_ordered(rows, question.by)) if question.by is not None else (),
            total=whole,
        )

    def _expected(self) -> Iterator[str]:
        """Days and hours without a request have a row, too, from the ledger's begin on."""
        if self._question.by not in {"day", "hour"}:
            return
        since = max(self._hours[0], report_values.hour_begin(self._began, self._zone))
        begins = (report_values.days if self._question.by == "day" else report_values.hours)(
            since, self._hours[1], self._zone
        )
        if len(begins) > MAX_ROWS:
            raise LauncherError(
                f"cannot report usage of {len(begins):,} {self._question.by}s: at most {MAX_ROWS:,}",
                "give a later --since" + (", or --by day" if self._question.by == "hour" else ""),
            )
        yield from map(self._name_of, begins)

    @property
    def _label(self) -> str:
        """The column by which SQL groups."""
        return {"day": "hour", "hour": "hour", None: "''"}.get(self._question.by, "name")

    @property
    def _name_of(self) -> Callable[[int | str], str]:
        """A row's name of a label."""
        zone = self._zone
        match self._question.by:
            case "day":
                return lambda hour: report_values.iso(int(hour), zone)[:10]
            case "hour":
                return lambda hour: report_values.iso(int(hour), zone)
            case _:
                return str

    @property
    def _where(self) -> tuple[str, tuple[str | int, ...]]:
        dimension, only = self._question.dimension
        where = "dimension = ? AND hour >= ? AND hour < ?"
        if only is None:
            return where, (dimension, *self._hours)
        return f"{where} AND name = ?", (dimension, *self._hours, only)

    def _summed(self) -> sqlite3.Cursor:
        where, values = self._where
        sums = ", ".join(f"sum({column})" for column in INTEGERS)
        return self._reader.execute(
            f"SELECT {self._label}, {sums} FROM hourly WHERE {where} GROUP BY 1",  # noqa: S608  columns of ours
            values,
        )

    def _metered(self) -> Iterable[tuple[str, int | str, float]]:
        if self._question.dimension[1] is not None:
            return ()  # an instance's time is not that of one key
        return self._reader.execute(
            f"SELECT what, {self._label}, sum(amount) FROM metered"  # noqa: S608  columns of ours
            " WHERE what IN ('ready_s', 'busy_s') AND hour >= ? AND hour < ? GROUP BY 1, 2",
            self._hours,
        )

    def _lost(self) -> int:
        [lost] = self._reader.execute(
            "SELECT total(amount) FROM metered WHERE what = ? AND hour >= ? AND hour < ?",
            (LOST, *self._hours),
        ).fetchone()
        return int(lost)

    def _histograms(self, names: dict[str, int]) -> tuple[latency.Counts, latency.Counts]:
        """Of the first bytes and of the durations: a row for each name, and the last one for all."""
        where, values = self._where
        cursor = self._reader.execute(
            f"SELECT {self._label}, first_byte, duration FROM hourly WHERE {where}",  # noqa: S608  columns of ours
            values,
        )
        name_of = self._name_of
        index_of: dict[int | str, int] = {}
        first_bytes = np.zeros((len(names) + 1, latency.BUCKETS), dtype=np.int64)
        durations = np.zeros_like(first_bytes)
        while rows := cursor.fetchmany(_CHUNK):
            labels, firsts, ends = zip(*rows, strict=True)
            for label in set(labels) - index_of.keys():
                index_of[label] = names[name_of(label)]
            indices = [index_of[label] for label in labels]
            first_bytes[:-1] += latency.merged_by(firsts, indices, len(names))
            durations[:-1] += latency.merged_by(ends, indices, len(names))
        first_bytes[-1], durations[-1] = first_bytes.sum(axis=0), durations.sum(axis=0)
        return first_bytes, durations

    def _refuse_unknown(self, total: _Sums) -> None:
        """A misspelt name must not be taken for one without requests. Raises LauncherError."""
        dimension, name = self._question.dimension
        if name is None or total.figures[0]:
            return
        found = self._reader.execute(
            "SELECT 1 FROM hourly WHERE dimension = ? AND name = ? LIMIT 1", (dimension, name)
        )
        if found.fetchone() is None:
            raise LauncherError(
                f"cannot report usage of {dimension} '{quoted(name)}': the ledger has no request of it",
                f"see `numa-launcher usage --by {dimension}` for the names",
            )


def _rows(
    groups: Sequence[tuple[str, _Sums]], first_bytes: latency.Counts, durations: latency.Counts
) -> Iterator[UsageRow]:
    quantiles = zip(
        *(latency.quantiles(first_bytes, share) for share in (0.5, 0.9, 0.99)),
        *(latency.quantiles(durations, share) for share in (0.5, 0.99)),
        strict=True,
    )
    for (name, sums), values in zip(groups, quantiles, strict=True):
        rounded = [None if value is None else float(f"{value:.3g}") for value in values]
        yield _row(name, sums, rounded)


def _row(name: str, sums: _Sums, quantiles: Sequence[float | None]) -> UsageRow:
    figures = dict(zip(INTEGERS, sums.figures, strict=True))
    picos, overflow_picos = figures.pop("picos"), figures.pop("overflow_picos")
    ready_s = None if sums.ready_s is None else round(sums.ready_s)
    first_byte_p50_s, first_byte_p90_s, first_byte_p99_s, duration_p50_s, duration_p99_s = quantiles
    return UsageRow(
        name=name,
        estimated=figures.pop("inexact"),
        refused=figures["requests"] - sum(figures[outcome] for outcome in OUTCOMES),
        **figures,
        charged=f"{to_decimal(picos):f}",
        overflow_cost=f"{to_decimal(overflow_picos):f}",
        first_byte_p50_s=first_byte_p50_s,
        first_byte_p90_s=first_byte_p90_s,
        first_byte_p99_s=first_byte_p99_s,
        duration_p50_s=duration_p50_s,
        duration_p99_s=duration_p99_s,
        ready_s=ready_s,
        busy_s=None if ready_s is None else round(sums.busy_s),
        utilisation=round(min(1.0, sums.busy_s / sums.ready_s), 4) if sums.ready_s else None,
    )


def _ordered(rows: list[UsageRow], by: str | None) -> list[UsageRow]:
    match by:
        case "day" | "hour":
            # Hours entered before usage.zone was changed may begin at other minutes.
            return sorted(rows, key=lambda row: dt.datetime.fromisoformat(row.name))
        case "instance":
            return sorted(rows, key=lambda row: (not row.name, len(row.name), row.name))
        case _:
            return sorted(rows, key=lambda row: (-row.prompt_tokens - row.output_tokens, row.name))


# --- The latest single requests of the usage ledger, with what was decided for each. It blocks, as
# launcher.accounts.usage_report.

MAX_LIMIT: Final = 10_000


def latest_requests(path: Path, question: Question, limit: int, now: float, currency: str) -> UsageRequests:
    """The last `limit` requests of a time, a key and a model; `question.by` is not used. Raises LauncherError."""
    if not 0 < limit <= MAX_LIMIT:
        raise LauncherError(
            f"cannot list {limit:,} requests: not a number from 1 to {MAX_LIMIT:,}",
            "give limit=50, and search for more with an earlier `until`",
        )
    wanted = {"key": question.key, "model": question.model}
    only = {name: value for name, value in wanted.items() if value is not None}
    with reading(path, open_reader) as (reader, zone, _):
        times = Times.of(question.since, question.until, now, zone)
        found = request_rows.latest(reader, *times, limit + 1, only)
        shown = tuple(map(_shown, found[limit - 1 :: -1]))
    return UsageRequests(
        since=times.since,
        until=times.until,
        zone=zone.key,
        currency=currency,
        left_out="limit" if len(found) > limit else None,
        requests=shown,
    )


def find_request(path: Path, request_id: str) -> EndedRequest | None:
    """The entry of a request; of several with its id the one that ended last. Raises LauncherError."""
    with _read(path, open_reader) as reader:
        return request_rows.find(reader, request_id)


def _shown(entry: EndedRequest) -> UsageRequest:
    return UsageRequest(
        time=round(entry.ended_at, 3),
        request_id=entry.request_id,
        key=entry.key,
        model=entry.model,
        adapter=entry.adapter,
        path=entry.path,
        status=entry.status,
        outcome=entry.outcome,
        slot=entry.slot,
        prompt_tokens=entry.prompt_tokens,
        cached_tokens=entry.cached_tokens,
        output_tokens=entry.output_tokens,
        estimated=not entry.exact,
        queued_s=_rounded(entry.queued_s),
        first_byte_s=_rounded(entry.first_byte_s),
        duration_s=round(entry.duration_s, 4),
        attempts=entry.attempts,
        continued=entry.continued,
        overflow=entry.overflow,
        overflow_reason=entry.overflow_reason,
        predicted_s=_rounded(entry.predicted_s),
        charged=f"{to_decimal(entry.picos):f}",
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
