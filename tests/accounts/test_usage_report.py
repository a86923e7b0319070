"""Reports of a ledger with known hours."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.ledger_file import LedgerFile, histogram, unix

from launcher.accounts.report_values import BY, Question, UsageReport, UsageRow
from launcher.accounts.sums import HISTOGRAMS, INTEGERS, SECONDS
from launcher.accounts.usage_report import MAX_ROWS, report
from launcher.base.errors import LauncherError
from launcher.base.money import picos

NOW = "2026-11-23T01:30"


def asked(ledger: LedgerFile, now: str = NOW, **question: Any) -> UsageReport:
    return report(ledger.path, Question(**question), unix(now, ledger.zone) + 0.5, "USD")


def names(found: UsageReport) -> list[str]:
    return [row.name for row in found.rows]


def by_name(found: UsageReport) -> dict[str, UsageRow]:
    return {row.name: row for row in found.rows}


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    """Two keys, two slots, an endpoint, two days."""
    ledger = LedgerFile(tmp_path / "usage.db")
    tokens = {"prompt_tokens": 1000, "cached_tokens": 400, "output_tokens": 300}
    fast, slow = {"first_byte": [0.2] * 9, "duration": [2.0] * 9}, {"first_byte": [4.0], "duration": [9.0]}
    ledger.hour(
        "2026-11-22T10:00", "key", "alice", requests=9, completed=8, client_aborted=1, **tokens, **fast
    )
    ledger.hour(
        "2026-11-23T01:00", "key", "bob",
        requests=3, completed=1, rejected=1, failed=1, continued=1, overflowed=1, inexact=1, prompt_tokens=5000,
        output_tokens=10, picos=picos("0.75"), overflow_picos=picos("0.000001"), **slow,
    )  # fmt: skip
    ledger.hour("2026-11-23T01:00", "key", "", requests=2, rejected=2)
    for slot, requests in (("10", 4), ("2", 6), ("", 4)):
        ledger.hour("2026-11-23T01:00", "slot", slot, requests=requests)
    ledger.hour("2026-11-23T01:00", "overflow", "", requests=13)
    ledger.hour("2026-11-23T01:00", "overflow", "cloud", requests=1, overflowed=1)
    ledger.hour("2026-11-22T10:00", requests=9, completed=8, client_aborted=1, **tokens, **fast)
    ledger.hour(
        "2026-11-23T01:00",
        requests=5,
        completed=1,
        rejected=3,
        failed=1,
        prompt_tokens=5000,
        output_tokens=10,
        **slow,
    )
    for slot, busy_s in (("2", 900.0), ("10", 300.0)):
        ledger.meter("2026-11-23T01:00", "ready_s", slot, 1800.0)
        ledger.meter("2026-11-23T01:00", "busy_s", slot, busy_s)
    ledger.meter("2026-11-23T01:00", "joules", "0", 1e6)
    return ledger


def test_what_an_upstream_refused_is_the_rest_of_all_requests(ledger: LedgerFile) -> None:
    ledger.hour("2026-11-22T11:00", requests=9, completed=2, client_aborted=1, rejected=1, failed=1)
    assert asked(ledger).total.refused == 4


def test_by_key_each_key_has_its_sums(ledger: LedgerFile) -> None:
    found = asked(ledger, by="key")
    assert names(found) == ["bob", "alice", ""]  # by tokens
    rows = by_name(found)
    bob = rows["bob"]
    outcomes = (bob.completed, bob.client_aborted, bob.rejected, bob.failed)
    assert (bob.requests, outcomes, bob.continued, bob.overflowed) == (3, (1, 0, 1, 1), 1, 1)
    assert (bob.prompt_tokens, bob.output_tokens, bob.estimated) == (5000, 10, 1)
    assert (bob.charged, bob.overflow_cost) == ("0.75", "0.000001")
    assert (rows["alice"].cached_tokens, rows["alice"].client_aborted) == (400, 1)
    assert rows[""].first_byte_p50_s is None  # only rejected
    assert [row.refused for row in found.rows] == [0, 0, 0]
    assert bob.utilisation is None
    total = found.total
    assert (total.requests, total.prompt_tokens, total.cached_tokens, total.rejected) == (14, 6000, 400, 3)
    assert (found.currency, found.zone, found.by, found.began) == ("USD", "UTC", "key", unix("2026-01-01"))
    assert (found.since, found.until) == (unix("2026-10-24"), unix(NOW))


def test_percentiles_are_of_the_merged_histograms(ledger: LedgerFile) -> None:
    total = asked(ledger).total
    assert total.first_byte_p50_s == pytest.approx(0.2, rel=0.06)
    assert total.first_byte_p90_s == pytest.approx(0.2, rel=0.06)  # the ninth of ten
    assert total.first_byte_p99_s == pytest.approx(4.0, rel=0.06)
    assert total.duration_p50_s == pytest.approx(2.0, rel=0.06)
    assert total.duration_p99_s == pytest.approx(9.0, rel=0.06)


def test_percentiles_of_many_keys_and_hours(tmp_path: Path) -> None:
    generator, ledger = random.Random(3), LedgerFile(tmp_path / "usage.db")  # noqa: S311
    seconds: dict[str, list[float]] = {f"key-{number}": [] for number in range(7)}
    for hour in range(9):
        for key, values in seconds.items():
            new = [generator.lognormvariate(0, 1) for _ in range(generator.randrange(40))]
            values.extend(new)
            ledger.hour(f"2026-11-22T{hour:02}:00", "key", key, requests=len(new), first_byte=new)
    rows = by_name(asked(ledger, by="key"))
    for key, values in seconds.items():
        middle = sorted(values)[-(-len(values) // 2) - 1]
        assert rows[key].first_byte_p50_s == pytest.approx(middle, rel=0.06), key


def test_by_instance_slots_in_order_with_their_utilisation(ledger: LedgerFile) -> None:
    found = asked(ledger, by="instance")
    assert [(row.name, row.requests, row.utilisation) for row in found.rows] == [
        ("2", 6, 0.5), ("10", 4, 0.1667), ("", 4, None),
    ]  # fmt: skip
    assert (found.total.ready_s, found.total.busy_s, found.total.utilisation) == (3600, 1200, 0.3333)


def test_an_instance_without_requests_was_ready(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "usage.db")
    ledger.meter("2026-11-22T10:00", "ready_s", "0", 3600.0)
    (row,) = asked(ledger, by="instance").rows
    assert (row.name, row.requests, row.utilisation) == ("0", 0, 0.0)


def test_by_overflow_local_requests_have_no_name(ledger: LedgerFile) -> None:
    assert {row.name: row.requests for row in asked(ledger, by="overflow").rows} == {"": 13, "cloud": 1}


def test_without_by_there_is_only_the_total(ledger: LedgerFile) -> None:
    found = asked(ledger)
    assert (found.rows, found.total.requests, found.total.utilisation) == ((), 14, 0.3333)


def test_days_and_hours_without_a_request_have_a_row(ledger: LedgerFile) -> None:
    found = asked(ledger, by="day", since="2d")
    assert [(row.name, row.requests) for row in found.rows] == [
        ("2026-11-21", 0),
        ("2026-11-22", 9),
        ("2026-11-23", 5),
    ]
    found = asked(ledger, by="hour", since="2h")
    assert [row.name for row in found.rows] == [
        "2026-11-22T23:00:00+00:00",
        "2026-11-23T00:00:00+00:00",
        "2026-11-23T01:00:00+00:00",
    ]
    assert found.rows[-1].utilisation == 0.3333


def test_a_key_by_day(ledger: LedgerFile) -> None:
    found = asked(ledger, key="alice", by="day", since="yesterday")
    assert [(row.name, row.requests, row.utilisation) for row in found.rows] == [
        ("2026-11-22", 9, None), ("2026-11-23", 0, None),
    ]  # fmt: skip
    assert found.total.utilisation is None
    assert asked(ledger, key="alice", by="key").total.requests == 9
    assert asked(ledger, key="alice", since="today").total.requests == 0  # known, without requests today


def test_hours_at_the_ends_count_whole(ledger: LedgerFile) -> None:
    assert asked(ledger, since="2026-11-22T10:59", until="2026-11-22T11:00").total.requests == 9
    assert asked(ledger, since="2026-11-22T11:00", until="today").total.requests == 0
    found = asked(ledger, since="2026-11-22T09:00", until="2026-11-22T10:01")
    assert (found.total.requests, found.until) == (9, unix("2026-11-22T10:01"))


@pytest.mark.parametrize(
    ("zone", "day", "hours"),
    [
        ("Europe/Berlin", "2026-10-25", 25),
        ("Europe/Berlin", "2026-03-29", 23),
        ("Asia/Kolkata", "2026-10-25", 24),
    ],
)
def test_days_where_clocks_change(tmp_path: Path, zone: str, day: str, hours: int) -> None:
    ledger = LedgerFile(tmp_path / "usage.db", zone)
    begin = unix(f"{day}T00:00", zone)
    for number in range(-1, hours + 1):
        ledger.hour(begin + 3600 * number, requests=1)
    question = {"since": day, "until": f"{day[:8]}{int(day[8:]) + 1}"}
    (row,) = asked(ledger, by="day", **question).rows
    assert (row.name, row.requests) == (day, hours)
    rows = asked(ledger, by="hour", **question).rows
    assert [row.requests for row in rows] == [1] * hours
    assert len({row.name for row in rows}) == hours
    if hours == 25:
        assert [row.name for row in rows[2:4]] == [f"{day}T02:00:00+02:00", f"{day}T02:00:00+01:00"]


def test_hours_from_before_a_change_of_the_zone(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "usage.db", "Asia/Kolkata")
    ledger.hour(unix("2026-11-22T10:00", "UTC"), requests=1)
    ledger.hour("2026-11-22T15:00", requests=1)
    rows = asked(ledger, by="hour", since="2026-11-22T15:00", until="2026-11-22T16:00").rows
    assert [(row.name[11:16], row.requests) for row in rows] == [("15:00", 1), ("15:30", 1)]
    assert [row.requests for row in asked(ledger, by="day", since="yesterday").rows] == [2, 0]


def test_days_from_before_the_ledger_have_no_row(tmp_path: Path) -> None:
    ledger = LedgerFile(tmp_path / "usage.db", began="2026-11-22T14:20")
    found = asked(ledger, by="day")
    assert (names(found), found.began) == (["2026-11-22", "2026-11-23"], unix("2026-11-22T14:20"))
    assert found.since == unix("2026-10-24")
    assert len(asked(ledger, by="hour").rows) == 12


def test_a_ledger_that_began_while_the_clock_was_ahead(tmp_path: Path) -> None:
    """Its first requests are those of the clock that was set back since."""
    ledger = LedgerFile(tmp_path / "usage.db", began="2028-03-01T14:20")
    ledger.hour("2026-11-22T12:00", requests=3)
    ledger.hour("2028-03-01T14:00", requests=1)
    found = asked(ledger, by="day")
    assert found.began == unix("2026-11-22T12:00")
    assert (names(found), found.total.requests) == (["2026-11-22", "2026-11-23"], 3)


@pytest.mark.parametrize("by", [None, *BY])
def test_an_empty_ledger(tmp_path: Path, by: str | None) -> None:
    found = asked(LedgerFile(tmp_path / "usage.db", began=NOW), by=by)
    assert all(not row.requests for row in found.rows)
    assert (found.total.requests, found.total.charged, found.total.utilisation) == (0, "0", None)


@pytest.mark.parametrize(
    ("question", "said", "remedy"),
    [({"by": "week"}, "cannot report usage by 'week': no such grouping", "choose one of key, model"),
     ({"by": "model", "key": "alice"}, "cannot report usage of a key by model", "--by day"),
     ({"by": "instance", "model": "m"}, "cannot report usage of a model by instance", "--requests"),
     ({"key": "alice", "model": "m"}, "cannot report usage of a key with a model", "--requests"),
     ({"key": "alicia"}, "cannot report usage of key 'alicia': the ledger has no request of it", "--by key"),
     ({"model": "m\x1b[2J"}, r"cannot report usage of model 'm\x1b[2J'", "--by model"),
     ({"since": "soon"}, "cannot report usage of 'soon': that is no time", '"12h", "30d"'),
     ({"since": "2026-02-30"}, "that is no time", "give"),
     ({"since": "2027-01-01"}, "that is in the future", "now it is 2026-11-23T01:30:00+00:00 (usage.zone = UTC)"),
     ({"since": "today", "until": "yesterday"}, "the end is not after the begin", "now it is"),
     ({"by": "hour", "since": "500w"}, f"cannot report usage of 84,002 hours: at most {MAX_ROWS:,}", "--by day")],
)  # fmt: skip
def test_mistakes(ledger: LedgerFile, question: dict[str, Any], said: str, remedy: str) -> None:
    if question.get("by") == "hour":
        ledger.path.unlink()
        ledger = LedgerFile(ledger.path, began="2015-01-01")
    with pytest.raises(LauncherError) as raised:
        asked(ledger, **question)
    assert said in raised.value.message
    assert remedy in raised.value.remedy


def test_a_broken_row(ledger: LedgerFile) -> None:
    with ledger.changed() as file:
        file.execute("UPDATE hourly SET first_byte = x'ffff00000001'")
    with pytest.raises(LauncherError, match=r"cannot read the usage ledger .* bucket 65535"):
        asked(ledger)


def test_a_newer_ledger(ledger: LedgerFile) -> None:
    with ledger.changed() as file:
        file.executescript("CREATE TABLE tomorrow (x); PRAGMA user_version = 99")
    with pytest.raises(LauncherError, match="a newer numa-launcher made it"):
        asked(ledger)


@pytest.mark.budget
def test_a_month_of_100_keys_takes_little_time(tmp_path: Path) -> None:
    """Ten million requests: 720 hours of 100 keys with 140 requests each. Start of the interpreter included."""
    ledger = LedgerFile(tmp_path / "usage.db")
    generator = random.Random(5)  # noqa: S311
    blobs = [histogram([generator.lognormvariate(0, 1) for _ in range(140)]) for _ in range(50)]
    hour = int(time.time()) // 3600 * 3600
    figures = [140] * len(INTEGERS) + [1.0] * len(SECONDS)
    rows = (
        ("key", hour - 3600 * number, f"key-{key}", *figures, *generator.choices(blobs, k=len(HISTOGRAMS)))
        for number in range(720)
        for key in range(100)
    )
    marks = ", ".join("?" * (3 + len(figures) + len(HISTOGRAMS)))
    with ledger.changed() as file:
        file.execute("BEGIN")
        file.executemany(f"INSERT INTO hourly VALUES ({marks})", rows)  # noqa: S608
        file.execute("COMMIT")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ("usage", "--since", "30d", "--by", "key", "--json", "--file", str(ledger.path))
    done = subprocess.run([sys.executable, "-m", "launcher", *words], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["total"]["requests"] == 720 * 100 * 140
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_requests_that_could_not_be_written_are_told_for_their_time(ledger: LedgerFile) -> None:
    ledger.meter("2026-11-22T10:00", "lost", "", 7.0)
    ledger.meter("2026-11-23T01:00", "lost", "", 2.0)
    assert asked(ledger, since="2d").lost == 9
    assert asked(ledger, since="2026-11-23").lost == 2
    assert asked(ledger, since="2026-11-22T11:00", until="2026-11-23T00:00").lost == 0
