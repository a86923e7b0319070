"""A usage ledger's file with made-up hours, for tests of its readers."""

from __future__ import annotations

import datetime as dt
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from launcher.usage.entry import Entry
from launcher.usage.latency import counts_of, to_bytes
from launcher.usage.read import packed
from launcher.usage.schema import HISTOGRAMS, INTEGERS, SECONDS, migrate


def unix(text: str, zone: str = "UTC") -> int:
    return int(dt.datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp())


class LedgerFile:
    def __init__(self, path: Path, zone: str = "UTC", began: str = "2026-01-01T00:00") -> None:
        self.path = path
        self.zone = zone
        path.parent.mkdir(exist_ok=True)
        with self.changed() as file:
            migrate(file, path)
            file.execute("INSERT INTO meta VALUES (?, ?)", (zone, unix(began, zone)))

    @contextmanager
    def changed(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as file:
            yield file

    def hour(self, at: str | int, dimension: str = "all", name: str = "", **figures: Any) -> None:
        """`first_byte` and `duration`: lists of seconds. `at`: on the zone's clock, or Unix time."""
        values: list[Any] = [figures.pop(column, 0) for column in (*INTEGERS, *SECONDS)]
        values += [to_bytes(counts_of(figures.pop(column, []))) for column in HISTOGRAMS]
        assert not figures
        begin = at if isinstance(at, int) else unix(at, self.zone)
        marks = ", ".join("?" * (3 + len(values)))
        with self.changed() as file:
            file.execute(f"INSERT INTO hourly VALUES ({marks})", (dimension, begin, name, *values))  # noqa: S608

    def meter(self, at: str, what: str, name: str, amount: float) -> None:
        with self.changed() as file:
            file.execute("INSERT INTO metered VALUES (?, ?, ?, ?)", (what, unix(at, self.zone), name, amount))

    def batch(self, entries: Sequence[Entry]) -> None:
        ends = [entry.ended_at for entry in entries]
        with self.changed() as file:
            file.execute(
                "INSERT INTO entries (first_at, last_at, count, data) VALUES (?, ?, ?, ?)",
                (min(ends), max(ends), len(entries), packed(entries)),
            )
