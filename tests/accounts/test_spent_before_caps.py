"""What an endpoint has cost before the daemon's start: by the ledger, by a stored sum, by neither."""

from __future__ import annotations

from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from support.hand_clock import at
from support.ledger_file import LedgerFile, unix
from support.stored_sums import StoredSums

from launcher.accounts.spent_before import Lookup, begin_caps, day_in, make_caps, read_before
from launcher.base.money import PICOS
from launcher.base.money_limits import DailyCap
from launcher.config.schema import Overflow

ZONE = "Europe/Berlin"
NOW = unix("2026-11-20T12:30", ZONE)
CLOUD = Overflow(url="https://cloud/v1", models={"m": "big"}, input=1.0, output=2.0, max_per_day=20.0)
FREE = Overflow(url="https://free/v1", models={"m": "big"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


@pytest.fixture
def sums() -> StoredSums:
    return StoredSums()


def cap_of(path: Path, sums: StoredSums, now: float = NOW, *, allow_unknown: bool = False) -> DailyCap:
    """At a start of the daemon."""
    zone, moment, stored = ZoneInfo(ZONE), at(now), sums.next().slot
    caps = make_caps((CLOUD, FREE), zone, moment, stored, "USD")
    assert list(caps) == ["cloud"]
    assert not caps["cloud"].known
    before = read_before(path, zone, Lookup(moment, moment.steady, tuple(caps)))
    begin_caps(caps, before, stored, allow_unknown=allow_unknown)
    return caps["cloud"]


def spend(path: Path, at: str, amount: int, name: str = "cloud") -> None:
    """Through the ledger."""
    ledger = LedgerFile(path, ZONE) if not path.exists() else LedgerFile.__new__(LedgerFile)
    ledger.path, ledger.zone = path, ZONE
    ledger.hour(at, "overflow", name, picos=amount)


def test_a_first_start_has_spent_nothing(path: Path, sums: StoredSums) -> None:
    cap = cap_of(path, sums)
    assert (cap.cap, cap.settled, cap.known) == (20 * PICOS, 0, True)


def test_the_ledger_counts_from_the_zones_midnight(path: Path, sums: StoredSums) -> None:
    spend(path, "2026-11-19T23:00", 7)
    spend(path, "2026-11-20T00:00", 20)
    spend(path, "2026-11-20T12:00", 300)
    spend(path, "2026-11-20T12:00", 4000, "other")
    cap = cap_of(path, sums)
    assert (cap.settled, cap.ends) == (320, unix("2026-11-21T00:00", ZONE))


def test_a_stored_sum_has_what_was_under_way(path: Path, sums: StoredSums) -> None:
    spend(path, "2026-11-20T12:00", 300)
    before = cap_of(path, sums)
    before.reserve(1000)
    before.reserve(50)
    before.settle(1000, 100)
    assert cap_of(path, sums).settled == 450  # with what was still under way
    assert cap_of(path, sums, unix("2026-11-21T00:00", ZONE)).settled == 0


def test_the_ledger_counts_where_it_has_more(path: Path, sums: StoredSums) -> None:
    cap_of(path, sums).reserve(5)
    spend(path, "2026-11-20T12:00", 300)
    assert cap_of(path, sums).settled == 300


@pytest.mark.parametrize("allow", [True, False])
def test_a_ledger_that_cannot_be_read(
    path: Path, sums: StoredSums, caplog: pytest.LogCaptureFixture, allow: bool
) -> None:
    path.write_bytes(b"no database at all, but long enough to be looked at" * 30)
    cap = cap_of(path, sums, allow_unknown=allow)
    assert (cap.known, cap.admits(1)) == (allow, allow)
    assert "cannot tell what overflow endpoint cloud has cost today" in caplog.text


def test_a_ledger_that_was_moved_aside_today(path: Path, sums: StoredSums) -> None:
    path.with_name("usage.db.broken-1").touch()
    now = path.with_name("usage.db.broken-1").stat().st_mtime
    assert not cap_of(path, sums, now).known
    assert cap_of(path, sums, now + 86400 * 2).known


def test_a_stored_sum_is_enough(path: Path, sums: StoredSums) -> None:
    cap_of(path, sums).reserve(5)
    path.write_bytes(b"no database" * 300)
    assert (cap_of(path, sums).settled, cap_of(path, sums).known) == (5, True)


def test_days_have_23_to_25_hours() -> None:
    day_of = day_in(ZoneInfo(ZONE))
    lengths = [
        (day.ends - day.begins) / 3600
        for day in (
            day_of(unix(f"{date}T12:00", ZONE)) for date in ("2026-03-29", "2026-10-25", "2026-11-20")
        )
    ]
    assert lengths == [23, 25, 24]
