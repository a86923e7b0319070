"""Ledgers with planted sums, for the tests of reports and costs."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from launcher.usage.schema import HISTOGRAMS, INTEGERS, SECONDS, migrate


class PlantedLedger:
    """A ledger file to which a test adds hours."""

    def __init__(self, path: Path, began: float, zone: str = "UTC") -> None:
        self.path = path
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            migrate(connection, path)
            connection.execute("INSERT INTO meta VALUES (?, ?)", (zone, began))

    def hour(self, hour: int, sums: Mapping[str, float], overflow: str = "") -> None:
        """One hour's sums, in the dimensions `all` and `overflow`."""
        columns = (*INTEGERS, *SECONDS)
        assert not set(sums) - set(columns)
        values = tuple(sums.get(column, 0) for column in columns)
        names = ", ".join(("dimension", "hour", "name", *columns, *HISTOGRAMS))
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            for dimension, name in (("all", ""), ("overflow", overflow)):
                marks = ", ".join("?" * (3 + len(columns) + len(HISTOGRAMS)))
                connection.execute(
                    f"INSERT INTO hourly ({names}) VALUES ({marks}) ON CONFLICT DO UPDATE SET "  # noqa: S608
                    + ", ".join(f"{column} = {column} + excluded.{column}" for column in columns),
                    (dimension, hour, name, *values, *(b"" for _ in HISTOGRAMS)),
                )

    def meter(self, what: str, hour: int, name: str, amount: float) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None)) as connection:
            connection.execute("INSERT INTO metered VALUES (?, ?, ?, ?)", (what, hour, name, amount))
