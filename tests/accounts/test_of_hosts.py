"""Usage of several hosts as one report: what two ledgers say together is what one ledger of all requests says."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.ledger_file import LedgerFile, unix

from launcher.accounts.of_hosts import summed
from launcher.accounts.report_values import Question
from launcher.accounts.usage_report import report
from launcher.base.errors import LauncherError
from launcher.cli import main

NOW = unix("2026-11-23T01:30")
SERVED = {"first_byte": [0.2, 0.3], "duration": [2.0]}
HOSTS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "h1": [
        ("2026-11-22T10:00", "ann", {"requests": 10, "completed": 9, "failed": 1, "prompt_tokens": 900, "picos": 10**11}),
        ("2026-11-22T23:00", "bob", {"requests": 3, "completed": 3, "output_tokens": 70, "overflow_picos": 1}),
    ],
    "h2": [
        ("2026-11-22T10:00", "ann", {"requests": 5, "completed": 5, "prompt_tokens": 400, "picos": 2 * 10**11}),
        ("2026-11-23T01:00", "cal", {"requests": 1, "rejected": 1}),
    ],
}  # fmt: skip


def ledger(path: Path, *hosts: str) -> Path:
    file = LedgerFile(path / "-".join(hosts) / "usage.db", began="2026-11-02T09:14")
    for host in hosts:
        for hour, key, figures in HOSTS[host]:
            file.hour(hour, "key", key, **figures, **SERVED)
            file.hour(hour, "slot", "0", **figures, **SERVED)
            file.hour(hour, **figures, **SERVED)
        file.meter("2026-11-22T10:00", "ready_s", f"0 of {host}", 3600.0)
        file.meter("2026-11-22T10:00", "busy_s", f"0 of {host}", 900.0)
    return file.path


def asked(path: Path, by: str | None) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(report(path, Question(by=by), NOW, "USD"))
    return found


def without_quantiles(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if "_p5" not in name and "_p9" not in name}


@pytest.mark.parametrize("by", [None, "key", "day", "hour"])
def test_two_ledgers_say_together_what_one_of_all_says(tmp_path: Path, by: str | None) -> None:
    whole = asked(ledger(tmp_path, "h1", "h2"), by)
    found = summed({host: asked(ledger(tmp_path, host), by) for host in HOSTS}, by, {})
    assert without_quantiles(found["total"]) == without_quantiles(whole["total"])
    assert list(map(without_quantiles, found["rows"])) == list(map(without_quantiles, whole["rows"]))
    assert {name: found[name] for name in ("since", "until", "began", "zone", "currency", "by")} == {
        name: whole[name] for name in ("since", "until", "began", "zone", "currency", "by")
    }


def test_only_a_row_of_one_host_has_percentiles(tmp_path: Path) -> None:
    found = summed({host: asked(ledger(tmp_path, host), "key") for host in HOSTS}, "key", {})
    rows = {row["name"]: row for row in found["rows"]}
    assert rows["ann"]["first_byte_p50_s"] is found["total"]["duration_p99_s"] is None
    assert rows["bob"]["first_byte_p50_s"] == pytest.approx(0.2, rel=0.06)


@pytest.mark.parametrize(("by", "names"), [("host", ["h1", "h2"]), ("instance", ["h1/0", "h2/0"])])
def test_a_row_for_each_host_or_each_hosts_slot(tmp_path: Path, by: str, names: list[str]) -> None:
    asked_by = None if by == "host" else by
    reports = {host: asked(ledger(tmp_path, host), asked_by) for host in HOSTS}
    found = [(row["name"], row["requests"]) for row in summed(reports, by, {})["rows"] if row["requests"]]
    assert found == [*zip(names, (13, 6), strict=True)]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    found = summed({"h1": asked(ledger(tmp_path, "h1"), None)}, None, {"h2": "cannot reach it"})
    assert found["hosts"] == ["h1"]
    assert found["missing"] == {"h2": "cannot reach it"}


def test_lost_requests_are_added_up(tmp_path: Path) -> None:
    reports = {host: asked(ledger(tmp_path, host), None) for host in HOSTS}
    reports["h1"]["lost"] = 3
    del reports["h2"]["lost"]
    assert summed(reports, None, {})["lost"] == 3


def test_currencies_are_not_mixed(tmp_path: Path) -> None:
    reports = {host: asked(ledger(tmp_path, host), None) for host in HOSTS}
    reports["h2"]["currency"] = "EUR"
    with pytest.raises(LauncherError, match="EUR and USD"):
        summed(reports, None, {})


def test_the_form_is_that_of_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fields of a row, as `usage --csv` prints them."""
    path = ledger(tmp_path, "h1")
    assert (
        main(["usage", "--csv", "--file", str(path), "--since", "2026-11-01", "--until", "2026-11-23T01:00"])
        == 0
    )
    head = next(csv.reader(capsys.readouterr().out.splitlines()))
    assert sorted(head) == sorted(summed({"h1": asked(path, None)}, None, {})["total"])
