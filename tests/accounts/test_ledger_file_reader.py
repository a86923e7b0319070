"""Reading the ledger: entries by time, files that cannot be read."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LEDGER, entries, open_reader, packed, unpacked
from launcher.base.database import migrate
from launcher.base.errors import LauncherError


def made(path: Path, *batches: list[EndedRequest]) -> Path:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        migrate(LEDGER, connection, path)
        for batch in batches:
            times = [entry.ended_at for entry in batch]
            row = (min(times), max(times), len(batch), packed(batch))
            connection.execute(
                "INSERT INTO entries (first_at, last_at, count, data) VALUES (?, ?, ?, ?)", row
            )
    return path


def entry(ended_at: float) -> EndedRequest:
    return EndedRequest(
        ended_at=ended_at, request_id=f"r{ended_at}", key="team", slot=3, picos=10**15, first_byte_s=0.25
    )


def test_packed_entries_come_back() -> None:
    batch = [entry(1.5), EndedRequest(ended_at=2.5, request_id="")]
    assert unpacked(packed(batch)) == batch


def test_entries_of_a_time(tmp_path: Path) -> None:
    path = made(tmp_path / "usage.db", [entry(1), entry(2)], [entry(3), entry(4)])
    with closing(open_reader(path)) as reader:
        assert [found.ended_at for found in entries(reader, 2, 4)] == [2, 3]


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    path = made(tmp_path / "usage.db")
    with closing(open_reader(path)) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM entries")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "nothing was entered yet"),
        (b"no database" * 100, "file is not a database"),
    ],
)
def test_files_that_are_no_ledger(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "usage.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LauncherError, match=said):
        open_reader(path)


def test_a_file_that_cannot_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot read the usage ledger .*: file name too long") as raised:
        open_reader(tmp_path / ("x" * 300))
    assert "as a user who may read it" in raised.value.remedy
