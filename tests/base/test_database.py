"""A database file: tables of several owners, versions, steps forward with a copy, files of others, one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from launcher.base import database_repair
from launcher.base.database import (
    MODE,
    DamagedError,
    Database,
    FileKind,
    ForeignFileError,
    Tables,
    migrate,
    open_reader,
    version_of,
)


def none_below_zero(reader: sqlite3.Connection) -> str:
    [wrong] = reader.execute("SELECT count(*) FROM parcel WHERE grams < 0").fetchone()
    return f"{wrong} parcels weigh nothing" if wrong else ""


PARCELS = Tables(("CREATE TABLE parcel (grams INTEGER NOT NULL);",), none_below_zero)
LETTERS = Tables(("CREATE TABLE letter (text TEXT NOT NULL);",), lambda _: "")
POST = FileKind(
    noun="post book",
    application=7,
    tables=(PARCELS, LETTERS),
    damaged=lambda path, why: DamagedError(f"cannot read the post book '{path}': {why}", "ask"),
    rename="name another file",
    choose="name another file",
    begin="start",
    fill="send a letter",
)
STEP = "ALTER TABLE letter ADD COLUMN stamp REAL NOT NULL DEFAULT 0;"
NEXT = replace(POST, tables=(PARCELS, replace(LETTERS, steps=(*LETTERS.steps, STEP))))


@contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


def test_an_empty_file_gets_every_table(tmp_path: Path) -> None:
    path = tmp_path / "post.db"
    with opened(path) as connection:
        assert migrate(POST, connection, path) == 0
        assert version_of(POST, connection, path) == 1
        assert connection.execute("SELECT count(*) FROM parcel, letter").fetchone() == (0,)
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
    assert [file.name for file in tmp_path.iterdir()] == ["post.db"]  # nothing to copy


def test_an_older_file_is_copied_and_keeps_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "post.db"
    with opened(path) as connection:
        migrate(POST, connection, path)
        connection.execute("INSERT INTO letter VALUES ('dear')")
    for turn in range(2):
        if turn:
            with opened(path) as connection:
                connection.execute("PRAGMA user_version = 1")
                connection.execute("ALTER TABLE letter DROP COLUMN stamp")
        with opened(path) as connection:
            assert migrate(NEXT, connection, path) == 1
            assert version_of(NEXT, connection, path) == 2
            assert connection.execute("SELECT text, stamp FROM letter").fetchone() == ("dear", 0.0)
    copies = sorted(file for file in tmp_path.iterdir() if file != path)
    assert [copy.name for copy in copies] == ["post.db.v1", "post.db.v1.2"]
    for copy in copies:
        assert copy.stat().st_mode & 0o777 == MODE
        with opened(copy) as connection:
            assert version_of(POST, connection, copy) == 1
            assert connection.execute("SELECT text FROM letter").fetchone() == ("dear",)


def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "post.db"
    with opened(path) as connection:
        migrate(POST, connection, path)
        broken = replace(LETTERS, steps=(*LETTERS.steps, "CREATE TABLE half (x); CREATE TABLE letter (x)"))
        with pytest.raises(sqlite3.OperationalError, match="already exists"):
            migrate(replace(POST, tables=(PARCELS, broken)), connection, path)
        assert version_of(POST, connection, path) == 1
        assert not connection.execute("SELECT * FROM sqlite_schema WHERE name = 'half'").fetchall()


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("CREATE TABLE songs (title)", "is not a post book"),
        ("PRAGMA user_version = 3", "is not a post book"),
        ("PRAGMA application_id = 7; PRAGMA user_version = 99", "a newer numa-launcher made it"),
    ],
)
def test_files_of_others_are_never_changed(tmp_path: Path, statement: str, said: str) -> None:
    path = tmp_path / "post.db"
    with opened(path) as connection:
        connection.executescript(statement)
    before = path.read_bytes()
    with pytest.raises(ForeignFileError, match=said):
        Database(POST, path)
    assert path.read_bytes() == before


def test_one_transaction_spans_the_tables_of_several_owners(tmp_path: Path) -> None:
    def parcel(grams: int | None) -> None:
        with file.transaction():
            file.insert("INSERT INTO parcel VALUES", [(grams,)])

    path = tmp_path / "post.db"
    with closing(Database(POST, path)) as file:
        with file.transaction():
            file.insert("INSERT INTO letter VALUES", [(str(number),) for number in range(120)])
            parcel(500)
        assert not file.failed
        with pytest.raises(sqlite3.IntegrityError), file.transaction():  # noqa: PT012
            file.insert("INSERT INTO letter VALUES", [("lost",)])
            parcel(None)
        assert file.failed
    with closing(open_reader(POST, path)) as reader:
        assert reader.execute("SELECT count(*) FROM letter").fetchone() == (120,)
        assert reader.execute("SELECT grams FROM parcel").fetchall() == [(500,)]


def test_each_owner_checks_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "post.db"
    with closing(Database(POST, path)) as file:
        assert database_repair.check(POST, path) == ""
        file.insert("INSERT INTO parcel VALUES", [(-1,)])
    assert database_repair.check(POST, path) == "1 parcels weigh nothing"
