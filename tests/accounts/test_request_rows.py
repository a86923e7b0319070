"""Requests as rows of the ledger: what is entered comes back, by its time, its fields and its id."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ledger_file import LedgerFile, entries

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LEDGER, check, open_reader
from launcher.accounts.request_rows import (
    INSERT,
    KEPT,
    Kind,
    Kinds,
    Row,
    find,
    latest,
    rows_of,
    usable,
)
from launcher.base.database import migrate
from launcher.base.errors import LauncherError

TIME = st.floats(0, 2e9)
TEXT = st.sampled_from(["", "a", "\u00e4 b\n"])
COUNT = st.integers(0, 2**40) | st.integers(0, 9)
BUSY = 3000


@st.composite
def an_entry(draw: st.DrawFn) -> EndedRequest:
    return EndedRequest(
        ended_at=draw(TIME), request_id=draw(st.text(st.characters(codec="utf-8"))), key=draw(TEXT), model=draw(TEXT),
        adapter=draw(TEXT), path=draw(TEXT), status=draw(st.sampled_from([0, 200])), outcome=draw(TEXT),
        slot=draw(st.none() | st.integers(0, 3)), duration_s=draw(TIME), queued_s=draw(st.none() | TIME),
        first_byte_s=draw(st.none() | TIME), prompt_tokens=draw(COUNT), cached_tokens=draw(COUNT),
        output_tokens=draw(COUNT), exact=draw(st.booleans()), attempts=draw(st.integers(0, 3)),
        continued=draw(st.integers(0, 2)), overflow=draw(TEXT), overflow_reason=draw(TEXT),
        predicted_s=draw(st.none() | TIME), picos=draw(st.integers(0, 2**63 - 1)), streamed=draw(st.booleans()),
    )  # fmt: skip


def entered(connection: sqlite3.Connection, batch: list[EndedRequest], first: int, kinds: Kinds) -> None:
    marks = ", ".join("?" * len(Row._fields))
    connection.executemany(f"{INSERT} ({marks})", rows_of(batch, first, kinds))


@settings(max_examples=30)
@given(batch=st.lists(an_entry(), min_size=1, max_size=40), cut=st.integers(0, 40), restart=st.booleans())
def test_entries_come_back(batch: list[EndedRequest], cut: int, restart: bool) -> None:
    """Also where a daemon that starts finds their kinds in the file."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        migrate(LEDGER, connection, Path(":memory:"))
        kinds = Kinds(connection)
        entered(connection, batch[:cut], 1, kinds)
        entered(connection, batch[cut:], 1 + len(batch[:cut]), Kinds(connection) if restart else kinds)
        found = entries(connection, 0, 3e9)
        assert found == sorted(batch, key=lambda entry: entry.ended_at)
        assert all(type(entry.exact) is type(entry.streamed) is bool for entry in found)
        [count] = connection.execute("SELECT count(*) FROM request_kind").fetchone()
        assert count == len({tuple(getattr(entry, name) for name in Kind._fields) for entry in batch})


def test_every_field_is_kept() -> None:
    assert set(KEPT) == {*Kind._fields, *Row._fields} - {"id", "kind"}


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    """Thousands of requests: the parts of the index of ids are several."""
    ledger = LedgerFile(tmp_path / "usage.db")
    ledger.batch(
        [
            EndedRequest(number, f"{number * 7919:032x}", "ann" if number == 1500 else "bob", slot=number % 3)
            for number in range(BUSY)
        ]
    )
    return ledger


@pytest.fixture
def reader(ledger: LedgerFile) -> Iterator[sqlite3.Connection]:
    with closing(open_reader(ledger.path)) as reader:
        yield reader


def test_requests_of_a_time(reader: sqlite3.Connection) -> None:
    assert [entry.ended_at for entry in latest(reader, 2, 4, 9, {})] == [3, 2]


def test_the_latest_come_first(reader: sqlite3.Connection) -> None:
    def ends(limit: int, **only: str) -> list[float]:
        return [entry.ended_at for entry in latest(reader, 10, BUSY, limit, only)]

    assert ends(3) == [2999, 2998, 2997]
    assert ends(3, key="ann", model="") == [1500]
    assert ends(2, key="bob") == [2999, 2998]
    assert ends(2, key="bob", model="m") == ends(2, key="carl") == []
    assert len(ends(BUSY)) == BUSY - 10


def test_every_request_is_found_by_its_id(ledger: LedgerFile, reader: sqlite3.Connection) -> None:
    for number in (0, 1, 1022, 1023, 1024, 2047, 2999):
        found = find(reader, f"{number * 7919:032x}")
        assert found is not None
        assert found.ended_at == number
    assert find(reader, "never") is None
    twice = [EndedRequest(9.0, "twice"), EndedRequest(8.0, "twice")]
    ledger.batch(twice)
    assert find(reader, "twice") == twice[0]


def test_an_id_is_found_where_requests_before_and_after_it_are_deleted(
    ledger: LedgerFile, reader: sqlite3.Connection
) -> None:
    with ledger.changed() as file:
        file.execute("DELETE FROM request WHERE id NOT IN (1, 2001)")
        file.execute("UPDATE request SET id = 1 << 40 WHERE id = 2001")
    assert find(reader, f"{2000 * 7919:032x}") is not None
    assert find(reader, f"{0:032x}") is not None
    assert find(reader, f"{7919:032x}") is None
    with ledger.changed() as file:
        file.execute("DELETE FROM request")
    assert find(reader, f"{0:032x}") is None


def steps_of(read: Callable[[], object], connection: sqlite3.Connection) -> int:
    """Thousands of SQLite's instructions that a read takes."""
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    connection.set_progress_handler(count, 1000)
    read()
    return counted


def test_an_index_answers(reader: sqlite3.Connection) -> None:
    """A scan of the requests would take more than ten instructions for each."""
    assert steps_of(lambda: find(reader, "never"), reader) <= 1
    assert steps_of(lambda: latest(reader, 0, BUSY, 5, {"key": "bob"}), reader) <= 1
    assert steps_of(lambda: latest(reader, 0, BUSY, 5, {"key": "nobody"}), reader) <= 1
    assert steps_of(lambda: latest(reader, 100, 110, BUSY, {}), reader) <= 1


def test_a_reader_cannot_write(reader: sqlite3.Connection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("DELETE FROM request")


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


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE request SET duration_s = x'00' WHERE id = 7",
        "UPDATE request SET prompt_tokens = 'many' WHERE id = 7",
        "UPDATE request SET kind = 999 WHERE id = 7",
        "UPDATE request SET request_id = CAST(x'ff41' AS TEXT) WHERE id = 2999",
        "UPDATE request_kind SET slot = 'a' WHERE id = 1",
        "UPDATE request_kind SET model = CAST(x'ff41' AS TEXT) WHERE id = 1",
    ],
)
def test_rows_that_a_check_finds(ledger: LedgerFile, statement: str) -> None:
    assert check(ledger.path) == ""
    with ledger.changed() as file:
        file.execute(statement)
    assert check(ledger.path)


def odd(**fields: Any) -> EndedRequest:
    return EndedRequest(**{"ended_at": 1.0, "request_id": "r"} | fields)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (odd(), True),
        (odd(method="GET", bytes_in=7, reason="it left"), True),
        (odd(picos=2**63), False),
        (odd(model="half a pair \ud800"), False),
        (odd(key=None), False),
        (odd(ended_at=float("nan")), False),
    ],
)
def test_entries_that_no_file_can_take(entry: EndedRequest, expected: bool) -> None:
    assert usable(entry) == expected
