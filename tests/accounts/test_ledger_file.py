"""The ledger's file in its writer's hands: locks, modes, old entries, broken files."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.ledger_file import entries

from launcher.accounts import ledger_file
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LedgerFile, move_aside, open_reader, open_sums
from launcher.base import database
from launcher.base.database import MODE, is_proven, parts
from launcher.base.errors import LauncherError

NOW = 1_700_000_000.0


def hour_of(at: float) -> int:
    return int(at // 3600 * 3600)


def opened(path: Path, zone: str = "UTC") -> LedgerFile:
    return LedgerFile(path, zone, hour_of, NOW)


def made(count: int, first: float = NOW) -> list[EndedRequest]:
    return [
        EndedRequest(ended_at=first + number, request_id=f"r{number}", key="a") for number in range(count)
    ]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LedgerFile]:
    with closing(opened(tmp_path / "new folder" / "usage.db")) as file:
        yield file


def test_a_batch_is_read_while_the_file_is_open(file: LedgerFile) -> None:
    batch = made(3)
    file.write(batch, {("joules", 0, "0"): 1.5})
    file.write([], {("joules", 0, "0"): 2.0})
    with closing(open_sums(file.path)) as reader:
        assert list(entries(reader, 0, 2 * NOW)) == batch
        assert reader.execute("SELECT name, requests FROM hourly WHERE dimension = 'key'").fetchall() == [
            ("a", 3)
        ]
        assert reader.execute("SELECT * FROM metered").fetchall() == [("joules", 0, "0", 3.5)]
        assert reader.execute("SELECT zone, began FROM meta").fetchall() == [("UTC", NOW)]
    assert file.size > 0


def test_hundreds_of_names_take_several_statements(file: LedgerFile) -> None:
    file.write([EndedRequest(ended_at=NOW, request_id="", key=f"key {number}") for number in range(333)], {})
    with closing(open_sums(file.path)) as reader:
        assert reader.execute("SELECT count(*) FROM hourly WHERE dimension = 'key'").fetchone() == (333,)


def test_all_of_a_batch_or_nothing(file: LedgerFile) -> None:
    with pytest.raises(sqlite3.Error):
        file.write(made(3), {("joules", 0, "0"): None})  # type: ignore[dict-item]
    with closing(open_reader(file.path)) as reader:
        assert not list(entries(reader, 0, 2 * NOW))
        assert reader.execute("SELECT count(*) FROM hourly").fetchone() == (0,)
        assert reader.execute("SELECT count(*) FROM request_kind").fetchone() == (0,)


def test_its_group_may_read_it(file: LedgerFile) -> None:
    file.write(made(1), {})
    assert {part.stat().st_mode & 0o777 for part in file.path.parent.iterdir()} == {MODE}


def test_a_second_process_is_refused_until_the_first_ends(file: LedgerFile) -> None:
    program = (
        "import sys; from pathlib import Path; from launcher.accounts.ledger_file import LedgerFile\n"
        "LedgerFile(Path(sys.argv[1]), 'UTC', int, 0.0).close()"
    )

    def run() -> str:
        command = [sys.executable, "-c", program, str(file.path)]
        return subprocess.run(command, check=False, capture_output=True, text=True).stderr

    assert "another daemon writes it" in run()
    file.close()
    assert not run()


def test_another_program_that_looks_at_a_ledger_takes_nothing_of_it(tmp_path: Path) -> None:
    """It ends, as `sqlite3 usage.db` does, with a connection that removes the write-ahead log if no other has the file:
    what a daemon entered from then on nobody would see, and a kill would lose it."""
    path = tmp_path / "usage.db"
    program = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('SELECT * FROM meta').fetchall(); c.close()"
    for turn in range(2):  # a new file, and one that is there
        with closing(opened(path)) as file:
            for number in range(2):
                file.write(made(1, NOW + 10 * turn + number), {})
                subprocess.run([sys.executable, "-c", program, str(path)], check=True)
                with closing(open_reader(path)) as reader:
                    assert len(list(entries(reader, 0, 2 * NOW))) == 2 * turn + number + 1


def test_another_zone_is_entered(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    opened(path).close()
    opened(path, "Asia/Kolkata").close()
    with closing(open_reader(path)) as reader:
        assert reader.execute("SELECT zone, began FROM meta").fetchall() == [("Asia/Kolkata", NOW)]


def test_old_entries_are_deleted_step_by_step_and_their_space_given_back(
    file: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "_DELETED", 9_000)
    monkeypatch.setattr(database, "_UNUSED_PAGES", 10)
    batch = [
        EndedRequest(
            ended_at=NOW, request_id=str(number) * 9, path="/v1/chat/completions", prompt_tokens=number
        )
        for number in range(2000)
    ]
    for _ in range(25):
        file.write(batch, {})
    file.write(made(5, NOW + 100), {})
    before = pages(file.path)
    steps = 0
    while file.prune(NOW + 50):
        steps += 1
    assert steps > 3
    with closing(open_reader(file.path)) as reader:
        assert len(list(entries(reader, 0, 2 * NOW))) == 5
        assert reader.execute("SELECT requests FROM hourly WHERE dimension = 'all'").fetchone() == (50_005,)
    assert pages(file.path) < before / 4


def hourly(path: Path) -> list[tuple[str, int]]:
    """Requests by key, as the table has them."""
    with closing(open_reader(path)) as reader:
        return reader.execute(
            "SELECT name, requests FROM hourly WHERE dimension = 'key' ORDER BY 1"
        ).fetchall()


def summed(path: Path) -> list[tuple[str, int]]:
    """The same, as readers of sums see it."""
    with closing(open_sums(path)) as reader:
        query = "SELECT name, sum(requests) FROM hourly WHERE dimension = 'key' GROUP BY 1 ORDER BY 1"
        return reader.execute(query).fetchall()


def test_requests_wait_for_their_sums_and_every_reader_adds_them(
    file: LedgerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(made(3), {})
    file.write(made(2), {})
    assert (hourly(file.path), summed(file.path)) == ([], [("a", 5)])
    monkeypatch.setattr(ledger_file, "_FOLD_ROWS", 7)
    file.write(made(2), {})
    assert hourly(file.path) == summed(file.path) == [("a", 7)]
    file.write(made(1), {})
    assert (hourly(file.path), summed(file.path)) == ([("a", 7)], [("a", 8)])
    monkeypatch.setattr(ledger_file, "_FOLD_S", 0.0)
    file.write([], {})
    assert hourly(file.path) == summed(file.path) == [("a", 8)]


def test_what_a_killed_daemon_did_not_sum_up_is_summed_up_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    with closing(opened(path)) as file:
        file.write(made(5), {})
        left = {part: part.read_bytes() for part in parts(path)}
    for part, content in left.items():
        part.write_bytes(content)
    assert (hourly(path), summed(path)) == ([], [("a", 5)])
    for _ in range(2):
        opened(path).close()
        assert hourly(path) == summed(path) == [("a", 5)]


def test_requests_that_are_deleted_leave_no_id_to_later_ones(file: LedgerFile) -> None:
    """Else a later one would count as summed up."""
    file.write(made(5), {})
    assert file.prune(2 * NOW)
    file.close()
    with closing(opened(file.path)) as again:
        again.write(made(2), {})
        assert summed(file.path) == [("a", 7)]
        with closing(open_reader(file.path)) as reader:
            assert reader.execute("SELECT id FROM request").fetchall() == [(6,), (7,)]


def test_after_an_error_nothing_is_summed_up_that_is_not_there(file: LedgerFile) -> None:
    file.write(made(5), {})
    with pytest.raises(sqlite3.Error):
        file.write(made(3), {("joules", 0, "0"): None})  # type: ignore[dict-item]
    file.close()
    with closing(opened(file.path)) as again, pytest.raises(ZeroDivisionError), again.database.transaction():  # noqa: PT012
        again.write(made(4), {})
        raise ZeroDivisionError  # of another table's owner
    opened(file.path).close()
    assert hourly(file.path) == summed(file.path) == [("a", 5)]


def pages(path: Path) -> int:
    with closing(open_reader(path)) as reader:
        return int(reader.execute("PRAGMA page_count").fetchone()[0])


def test_a_removed_or_replaced_file_is_noticed(file: LedgerFile) -> None:
    assert not file.replaced
    file.path.rename(file.path.with_name("elsewhere"))
    assert file.replaced
    file.path.touch()
    assert file.replaced


@pytest.mark.parametrize("content", [b"no database" * 1000, b"SQLite format 3\0" + b"\xff" * 5000])
def test_a_broken_file_moves_aside_with_its_log(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "usage.db"
    path.write_bytes(content)
    with pytest.raises(sqlite3.DatabaseError) as caught:
        opened(path)
    assert is_proven(caught.value)
    path.with_name("usage.db-wal").write_bytes(b"log")
    moved = move_aside(path, NOW)
    assert moved.name == "usage.db.broken-20231114T221320Z"
    assert moved.read_bytes() == content
    assert moved.with_name(f"{moved.name}-wal").read_bytes() == b"log"
    opened(path).close()


def test_a_file_that_may_be_another_program_s_stays(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("root:x:0:0")
    with pytest.raises(LauncherError, match="the file is not a database"):
        move_aside(path, NOW)
    assert path.read_text() == "root:x:0:0"
