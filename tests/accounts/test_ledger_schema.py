"""The ledger's file: versions, steps forward with a copy, files of others."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from launcher.accounts.ledger_schema import APPLICATION, MODE, STEPS, ForeignFileError, migrate, version_of

NEXT = (*STEPS, "ALTER TABLE hourly ADD COLUMN joules REAL NOT NULL DEFAULT 0")


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def test_an_empty_file_gets_every_table(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as connection:
        assert migrate(connection, path) == 0
        assert version_of(connection, path) == len(STEPS)
        assert connection.execute("SELECT count(*) FROM hourly").fetchone() == (0,)
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert [file.name for file in tmp_path.iterdir()] == ["usage.db"]  # nothing to copy


def test_an_older_ledger_is_copied_and_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as connection:
        migrate(connection, path)
        connection.execute("INSERT INTO metered VALUES ('joules', 0, '0', 7.5)")
    for turn in range(2):
        if turn:
            with opened(path) as connection:
                connection.execute(f"PRAGMA user_version = {len(STEPS)}")
                connection.execute("ALTER TABLE hourly DROP COLUMN joules")
        with opened(path) as connection:
            assert migrate(connection, path, NEXT) == len(STEPS)
            assert version_of(connection, path, NEXT) == len(NEXT)
            assert connection.execute("SELECT amount FROM metered").fetchone() == (7.5,)
            connection.execute("SELECT joules FROM hourly")
    copies = sorted(file for file in tmp_path.iterdir() if file != path)
    assert [copy.name for copy in copies] == [f"usage.db.v{len(STEPS)}", f"usage.db.v{len(STEPS)}.2"]
    for copy in copies:
        assert copy.stat().st_mode & 0o777 == MODE
        with opened(copy) as connection:
            assert version_of(connection, copy) == len(STEPS)
            assert connection.execute("SELECT amount FROM metered").fetchone() == (7.5,)


def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as connection:
        migrate(connection, path)
        broken = (*STEPS, "CREATE TABLE half (x); CREATE TABLE hourly (x)")
        with pytest.raises(sqlite3.OperationalError, match="already exists"):
            migrate(connection, path, broken)
        assert version_of(connection, path) == len(STEPS)
        assert not connection.execute("SELECT * FROM sqlite_schema WHERE name = 'half'").fetchall()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("CREATE TABLE songs (title)", "is not a usage ledger"),
        ("PRAGMA user_version = 3", "is not a usage ledger"),
        (f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = 99", "a newer numa-launcher made it"),
    ],
)
def test_files_of_others_are_never_changed(tmp_path: Path, statement: str, said: str) -> None:
    path = tmp_path / "usage.db"
    with opened(path) as connection:
        connection.executescript(statement)
    before = path.read_bytes()
    with opened(path) as connection, pytest.raises(ForeignFileError, match=said):
        migrate(connection, path)
    assert path.read_bytes() == before
