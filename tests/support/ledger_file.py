"""A usage ledger's file with made-up hours, for tests of its readers."""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.latency import BUCKETS, Counts, buckets_of, each_to_bytes
from launcher.accounts.ledger_file import LEDGER
from launcher.accounts.request_rows import INSERT, Kinds, latest, rows_of
from launcher.accounts.sums import HISTOGRAMS, INTEGERS, SECONDS
from launcher.base.database import migrate


def unix(text: str, zone: str = "UTC") -> int:
    return int(dt.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp())


def counts_of(durations_s: Sequence[float]) -> Counts:
    return np.bincount(buckets_of(durations_s), minlength=BUCKETS)


def histogram(durations_s: Sequence[float]) -> bytes:
    """The stored form of durations."""
    return each_to_bytes(counts_of(durations_s).reshape(1, -1))[0]


def entries(reader: sqlite3.Connection, since: float, until: float) -> list[EndedRequest]:
    """The requests that ended in [since, until), Unix seconds, in the order of their ends."""
    return latest(reader, since, until, 2**62, {})[::-1]


class LedgerFile:
    def __init__(self, path: Path, zone: str = "UTC", began: str | float = "2026-01-01T00:00") -> None:
        self.path = path
        self.zone = zone
        path.parent.mkdir(exist_ok=True)
        with self.changed() as file:
            migrate(LEDGER, file, path)
            file.execute("INSERT INTO meta VALUES (?, ?, 0)", (zone, self._time(began)))

    def _time(self, at: str | float) -> float:
        """`at`: on the zone's clock, or Unix time."""
        return unix(at, self.zone) if isinstance(at, str) else at

    @contextmanager
    def changed(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as file:
            # As damage does.
            file.execute("PRAGMA ignore_check_constraints = ON")
            yield file

    def hour(self, at: str | float, dimension: str = "all", name: str = "", **figures: Any) -> None:
        """Add to an hour's row. `first_byte` and `duration`: lists of seconds."""
        numbers = (*INTEGERS, *SECONDS)
        values: list[Any] = [figures.pop(column, 0) for column in numbers]
        values += [histogram(figures.pop(column, [])) for column in HISTOGRAMS]
        assert not figures
        marks = ", ".join("?" * (3 + len(values)))
        sums = ", ".join(f"{column} = {column} + excluded.{column}" for column in numbers)
        with self.changed() as file:
            file.execute(
                f"INSERT INTO hourly VALUES ({marks}) ON CONFLICT DO UPDATE SET {sums}",  # noqa: S608
                (dimension, self._time(at), name, *values),
            )

    def sums(self, at: float, figures: Mapping[str, float], overflow: str = "") -> None:
        """Add to an hour in the dimensions `all` and `overflow`."""
        self.hour(at, **figures)
        self.hour(at, "overflow", overflow, **figures)

    def meter(self, at: str | float, what: str, name: str, amount: float) -> None:
        with self.changed() as file:
            file.execute("INSERT INTO metered VALUES (?, ?, ?, ?)", (what, self._time(at), name, amount))

    def batch(self, entries: Sequence[EndedRequest]) -> None:
        """Add single requests, whose sums are those of `hour`."""
        with self.changed() as file:
            file.execute("BEGIN")
            [last] = file.execute("SELECT coalesce(max(id), 0) FROM request").fetchone()
            rows = rows_of(entries, last + 1, Kinds(file))
            file.executemany(f"{INSERT} ({', '.join('?' * len(rows[0]))})", rows)
            file.execute("UPDATE meta SET summed_to = ?", (last + len(rows),))
            file.execute("COMMIT")
