"""What the ledger says of the time before the daemon's start."""

from __future__ import annotations

import datetime as dt
import os
import sqlite3
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LEDGER, LedgerFile
from launcher.accounts.report_values import hour_begin
from launcher.accounts.spending import Spending
from launcher.accounts.spent_before import read_past
from launcher.accounts.sums import HISTOGRAMS, INTEGERS, SECONDS
from launcher.base.database import migrate

BERLIN = ZoneInfo("Europe/Berlin")


def at(text: str) -> int:
    return int(dt.datetime.fromisoformat(text).replace(tzinfo=BERLIN).timestamp())


NOW = at("2026-11-20T12:30")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


def enter(path: Path, *rows: tuple[str, str, str, int, int, int]) -> None:
    """Hourly rows of dimension, hour, name, prompt and output tokens, picos."""
    connection = sqlite3.connect(path)
    migrate(LEDGER, connection, path)
    for dimension, hour, name, prompt, output, picos in rows:
        values = dict.fromkeys(INTEGERS, 0) | {
            "prompt_tokens": prompt,
            "output_tokens": output,
            "picos": picos,
        }
        fields = (
            dimension,
            at(hour),
            name,
            *values.values(),
            *(0.0 for _ in SECONDS),
            *(b"" for _ in HISTOGRAMS),
        )
        connection.execute(f"INSERT INTO hourly VALUES ({', '.join('?' * len(fields))})", fields)  # noqa: S608
    connection.commit()
    connection.close()


def test_the_sums_of_each_day_and_key(path: Path) -> None:
    enter(
        path,
        ("key", "2026-11-20T00:00", "ann", 10, 1, 5),
        ("key", "2026-11-20T12:00", "ann", 20, 2, 6),
        ("key", "2026-11-19T23:00", "ann", 40, 4, 7),
        ("key", "2026-10-25T02:00", "bob", 80, 8, 8),  # the day has 25 hours
        ("key", "2026-09-01T02:00", "bob", 9, 9, 9),  # of no period that still runs
        ("key", "2026-11-20T12:00", "", 9, 9, 9),  # without a key
        ("model", "2026-11-20T12:00", "ann", 9, 9, 9),
    )
    past = read_past(path, BERLIN, NOW)
    assert past.lost_at is None
    assert sorted(past.rows) == [
        ("ann", float(at("2026-11-19T00:00")), 44, 7),
        ("ann", float(at("2026-11-20T00:00")), 33, 11),
        ("bob", float(at("2026-10-25T00:00")), 88, 8),
    ]


def test_a_new_ledger_has_lost_nothing(path: Path) -> None:
    past = read_past(path, BERLIN, NOW)
    assert (past.rows, past.lost_at, past.unreadable) == ((), None, False)
    path.touch()
    assert read_past(path, BERLIN, NOW).lost_at is None


@pytest.mark.parametrize("damage", [b"garbage" * 1000, None])
def test_a_ledger_that_cannot_be_read_is_lost_now(path: Path, damage: bytes | None) -> None:
    enter(path, ("key", "2026-11-20T00:00", "ann", 10, 1, 5))
    data = path.read_bytes()
    # The second: the header is whole, the pages are not.
    path.write_bytes(damage or data[:100] + b"\xff" * (len(data) - 100))
    past = read_past(path, BERLIN, NOW)
    assert (past.lost_at, past.unreadable) == (NOW, True)
    assert "cannot read the usage ledger" in past.why or "malformed" in past.why


def test_a_newer_schema_is_lost_now(path: Path) -> None:
    enter(path)
    with sqlite3.connect(path) as connection:
        connection.executescript("CREATE TABLE tomorrow (x); PRAGMA user_version = 99")
    past = read_past(path, BERLIN, NOW)
    assert past.lost_at == NOW
    assert "newer numa-launcher" in past.why


def test_a_ledger_that_was_moved_aside_was_lost_when_it_was_last_written(path: Path) -> None:
    enter(path, ("key", "2026-11-20T00:00", "ann", 10, 1, 5))
    for name, written in (("20261119T120000Z", 100.0), ("20261120T080000Z", 200.0)):
        broken = path.with_name(f"usage.db.broken-{name}")
        broken.touch()
        os.utime(broken, (written, written))
    past = read_past(path, BERLIN, NOW)
    assert past.lost_at == 200.0
    assert len(list(past.rows)) == 1


def test_the_sums_of_days(path: Path) -> None:
    began = float(at("2026-11-20T10:30"))
    file = LedgerFile(path, "Europe/Berlin", partial(hour_begin, zone=BERLIN), began)
    ends = {"2026-11-19T23:59": 1, "2026-11-20T10:29": 20, "2026-11-20T10:30": 300, "2026-11-20T12:00": 4000}
    for key in ("ann", ""):
        file.write(
            [
                EndedRequest(
                    ended_at=float(at(end)), request_id="r", key=key, prompt_tokens=tokens, picos=tokens
                )
                for end, tokens in ends.items()
            ],
            {},
        )
    file.close()
    spending = Spending(BERLIN)
    spending.add_all(read_past(path, BERLIN, NOW).rows)
    assert spending.of("ann", at("2026-11-20T00:00"), NOW) == (4320, 4320)
    assert spending.of("ann", at("2026-11-19T00:00"), NOW) == (4321, 4321)
    assert spending.of("", 0, NOW) == (0, 0)
