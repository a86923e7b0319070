"""`usage`: its table for a person, CSV and JSON for programs, from the daemon or from the ledger's file."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_operations import Backstage, FakeOperations
from support.ledger_file import LedgerFile, unix

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.report_values import UsageToday
from launcher.base.errors import LauncherError
from launcher.base.money import picos
from launcher.cli import main
from launcher.cli.usage_table import requests_to_lines, to_lines
from launcher.control.client import ControlClient

NOW = unix("2026-11-23T01:30")
GOLDEN = Path(__file__).parent / "usage"
BAD = "evil\x1b[2J\nkey-2  0"


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    ledger = LedgerFile((tmp_path / "usage" / "usage.db"), "Europe/Berlin", began="2026-11-02T09:14")
    served = {"first_byte": [0.2, 0.31, 2.5], "duration": [2.0, 8.0, 31.0]}
    figures = {
        "team-search": {
            "requests": 81_234, "completed": 81_190, "failed": 3, "client_aborted": 9, "rejected": 32, "continued": 2,
            "prompt_tokens": 40_123_456, "cached_tokens": 17_250_000, "output_tokens": 12_345_678, **served,
        },
        "batch": {
            "requests": 12_000, "completed": 11_988, "failed": 12, "overflowed": 120, "inexact": 12,
            "prompt_tokens": 6_000_000, "output_tokens": 3_600_000, "overflow_picos": picos("0.305"), **served,
        },
        "": {"requests": 7, "rejected": 7},
    }  # fmt: skip
    hours = ("2026-11-22T23:00", "2026-11-22T10:00", "2026-11-23T01:00")
    for (key, its), hour in zip(figures.items(), hours, strict=True):
        ledger.hour(hour, "key", key, **its)
        ledger.hour(hour, **its)
    for hour, busy_s in (("2026-11-22T10:00", 3600.0), ("2026-11-22T23:00", 1000.0)):
        ledger.meter(hour, "ready_s", "0", 3600.0)
        ledger.meter(hour, "busy_s", "0", busy_s)
    about = {
        "model": "llama",
        "path": "/v1/chat/completions",
        "status": 200,
        "outcome": "completed",
        "attempts": 1,
    }
    ledger.batch(
        [
            EndedRequest(ended_at=NOW - 70, request_id="8d1f", key="team-search", slot=1, duration_s=8.0, queued_s=0.01,
                  first_byte_s=0.31, prompt_tokens=1200, cached_tokens=516, output_tokens=300, predicted_s=0.4, **about),
            EndedRequest(ended_at=NOW - 50, request_id="9e2a", key="batch", duration_s=12.0, first_byte_s=0.9,
                  prompt_tokens=5000, output_tokens=411, exact=False, predicted_s=6.2, overflow="cloud",
                  overflow_reason="predicted", **about),
            EndedRequest(ended_at=NOW - 20, request_id="a0b7", status=401, outcome="rejected", path="/v1/models",
                  duration_s=0.001),
        ]
    )  # fmt: skip
    return ledger


@pytest.fixture(scope="module")
def backstage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backstage]:
    with Backstage(str(tmp_path_factory.mktemp("d") / "c.sock"), FakeOperations(now=NOW + 0.5)) as backstage:
        yield backstage


@pytest.fixture
def operations(backstage: Backstage, ledger: LedgerFile) -> FakeOperations:
    backstage.operations.ledger, backstage.operations.today = ledger.path, None
    return backstage.operations


@pytest.fixture
def daemon(backstage: Backstage, operations: FakeOperations, monkeypatch: pytest.MonkeyPatch) -> Backstage:
    assert operations is backstage.operations
    monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", backstage.path)
    return backstage


GOLDENS = {
    "total": ("", 100),
    "by-key": ("--by key", 160),
    "by-key-80": ("--by key", 80),
    "by-day": ("--by day --since 2d", 100),
    "requests": ("--requests", 160),
    "requests-80": ("--requests", 80),
}


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("name", GOLDENS)
def test_text(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words, width = GOLDENS[name]
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["usage", *words.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
    assert max(map(len, out.splitlines()[2:])) <= max(width, 95)


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("width", [20, 60, 79, 80, 81, 100, 120])
@pytest.mark.parametrize("words", ["--by key", "--by day", "--by instance", "--requests"])
def test_a_table_never_exceeds_the_terminal(
    words: str, width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    main(["usage", *words.split()])
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[: lines.index("") if "" in lines else None])) <= width


def as_csv(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, str]]:
    assert main(["usage", *words, "--csv"]) == 0
    return list(csv.DictReader(io.StringIO(capsys.readouterr().out)))


@pytest.mark.usefixtures("daemon")
def test_csv_has_whole_numbers_and_no_total(capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_csv(capsys, "--by", "key")
    assert [(row["name"], row["prompt_tokens"], row["overflow_cost"]) for row in rows] == [
        ("team-search", "40123456", "0"), ("batch", "6000000", "0.305"), ("", "0", "0"),
    ]  # fmt: skip
    assert rows[2]["first_byte_p50_s"] == ""
    (total,) = as_csv(capsys)
    assert total["requests"] == str(sum(int(row["requests"]) for row in rows))
    assert [row["overflow_reason"] for row in as_csv(capsys, "--requests")] == ["", "predicted", ""]


@pytest.mark.parametrize(
    "name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "＝1", "＋1", "＠x", '=HYPERLINK("http://x","y")']
)
@pytest.mark.usefixtures("daemon")
def test_a_name_is_no_formula_in_a_spreadsheet(
    name: str, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.hour("2026-11-22T23:00", "model", name, requests=1)
    (row,) = as_csv(capsys, "--by", "model")
    assert row["name"] == f"'{name}"
    main(["usage", "--by", "model", "--json"])
    assert json.loads(capsys.readouterr().out)["rows"][0]["name"] == name


@pytest.mark.usefixtures("daemon")
def test_names_are_text_on_a_terminal_and_exact_in_json(
    ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.hour("2026-11-23T00:00", "model", BAD, requests=1)
    ledger.batch(
        [
            EndedRequest(
                ended_at=NOW - 5, request_id=BAD, key=BAD, model=BAD, overflow=BAD, overflow_reason=BAD
            )
        ]
    )
    for words in (["--by", "model"], ["--model", BAD, "--by", "day"], ["--requests"]):
        for form in (["--wide"], ["--csv"]):
            main(["usage", *words, *form])
            out = capsys.readouterr().out
            assert "\x1b" not in out
            assert "\nkey-2" not in out
    main(["usage", "--by", "model", "--json"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [row["name"] for row in json.loads(out)["rows"]] == [BAD]


@pytest.mark.usefixtures("daemon")
def test_json_is_what_the_daemon_answers(daemon: Backstage, capsys: pytest.CaptureFixture[str]) -> None:
    main(["usage", "--by", "key", "--since", "30d", "--json"])
    assert json.loads(capsys.readouterr().out) == ControlClient(daemon.path, exact=True).get(
        "/usage?by=key&since=30d"
    )


def test_a_long_name_is_cut_in_the_table_only(
    daemon: Backstage, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger.hour("2026-11-22T23:00", "model", "m" * 300, requests=1)
    main(["usage", "--by", "model", "--wide"])
    assert f"{'m' * 31}…  " in capsys.readouterr().out
    assert as_csv(capsys, "--by", "model")[0]["name"] == "m" * 300


# --- without a daemon -----------------------------------------------------------------------------


@pytest.fixture
def no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    return tmp_path


def test_the_file_answers_when_no_daemon_does(
    no_daemon: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", "--since", "2026-11-01", "--by", "key", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [row["name"] for row in json.loads(out)["rows"]] == ["team-search", "batch", ""]
    assert f"cannot reach numa-launcher on '{no_daemon}/none.sock': no such socket" in err
    assert f"the figures are from '{ledger.path}'" in err


def test_a_configuration_says_where_the_file_is_and_what_the_currency(
    no_daemon: Path, ledger: LedgerFile, capsys: pytest.CaptureFixture[str]
) -> None:
    other = no_daemon / "kept" / "other.db"
    other.parent.mkdir()
    ledger.path.rename(other)
    config = no_daemon / "config.toml"
    config.write_text(
        f'[[models]]\nname = "m"\npath = "/m"\n[usage]\npath = "{other}"\n[cost]\ncurrency = "EUR"\n'
        f'[control]\nsocket = "{no_daemon}/none.sock"\n'
    )
    assert main(["usage", "-c", str(config), "--since", "2026-11-01", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["currency"] == "EUR"


def test_a_named_file_is_read_without_asking_the_daemon(
    daemon: Backstage,
    operations: FakeOperations,
    ledger: LedgerFile,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    operations.ledger = None
    kept = ledger.path.rename(tmp_path / "kept.db")
    assert main(["usage", "--file", str(kept), "--since", "2026-11-01", "--csv"]) == 0
    out, err = capsys.readouterr()
    assert (out.count("\n"), err) == (2, "")
    assert main(["usage", "--file", str(kept), "--requests", "--since", "2026-11-01"]) == 0


@pytest.mark.usefixtures("no_daemon")
def test_neither_daemon_nor_file(no_daemon: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    message, remedy = err.splitlines()
    assert message.startswith("cannot reach numa-launcher on ")
    assert (
        f"without the daemon: cannot read the usage ledger '{no_daemon}/usage/usage.db': no such file"
        in message
    )
    assert "[usage] enabled" in remedy


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize(
    ("words", "said", "remedy"),
    [("--since soon", "--since: 'soon' is not a time such as", 'give a time such as "12h"'),
     ("--since 2026-02-30", "--since: '2026-02-30' is not a time", "give a time"),
     ("--until 1y", "--until: '1y' is not a time", "give a time"),
     ("--by week", "--by: invalid choice: 'week'", "choose one of key, model, instance"),
     ("--csv --json", "not allowed with", "remove one of the two"),
     ("--limit 5", "cannot limit a report", "add --requests"),
     ("--requests --limit 0", "--limit: '0' is not a number from 1 to 10000", "give a number from 1"),
     ("--requests --by key", "cannot list single requests by key", "remove --by"),
     ("--key batch --by model", "cannot report usage of a key by model", "--by day"),
     ("--key batsch", "cannot report usage of key 'batsch': the ledger has no request of it", "--by key"),
     ("--since today --until yesterday", "the end is not after the begin", "now it is 2026-11-23T02:30"),
     ("--sinse 3d", "unknown argument '--sinse'", "did you mean '--since'?")],
)  # fmt: skip
def test_mistakes(words: str, said: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["usage", *words.split()])
    except SystemExit as ended:
        code = int(str(ended.code))
    message, way_out = capsys.readouterr().err.splitlines()
    assert (code, message[:7]) == (2, "cannot ")
    assert said in message
    assert remedy in way_out


def test_a_ledger_that_is_off(
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    operations.ledger = None
    assert main(["usage"]) == 2
    assert capsys.readouterr().err.startswith("cannot report usage: the ledger is off\n")


@pytest.mark.parametrize("query", ["by=week", "since=soon", "limit=5", "name=x"])
def test_the_socket_refuses_what_it_does_not_know(daemon: Backstage, query: str) -> None:
    with pytest.raises(LauncherError, match="cannot "):
        ControlClient(daemon.path).get(f"/usage?{query}")
    with pytest.raises(LauncherError, match="cannot "):
        ControlClient(daemon.path).get("/usage/requests?limit=10001")


# --- status ---------------------------------------------------------------------------------------


def test_status_has_a_line_of_today(
    daemon: Backstage, operations: FakeOperations, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["status"])
    assert "today:" not in capsys.readouterr().out
    operations.today = UsageToday(since=0, requests=81_234, prompt_tokens=40_123_456, output_tokens=1)
    main(["status"])
    assert "\ntoday: 81,234 requests, 40,123,456 prompt and 1 output tokens\n" in capsys.readouterr().out


# --- text of made-up reports ----------------------------------------------------------------------


def made_up(**more: Any) -> dict[str, Any]:
    row = dict.fromkeys(
        ("requests", "completed", "client_aborted", "rejected", "failed", "continued", "overflowed", "estimated",
         "prompt_tokens", "cached_tokens", "output_tokens"), 0,
    ) | dict.fromkeys(
        ("first_byte_p50_s", "first_byte_p90_s", "first_byte_p99_s", "duration_p50_s", "duration_p99_s", "ready_s", "busy_s",
         "utilisation"),
    ) | {"name": "", "charged": "0", "overflow_cost": "0"}  # fmt: skip
    return row | more


def report(by: str | None, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "since": 0, "until": 7200, "zone": "UTC", "began": 0.0, "by": by, "key": None, "model": None, "currency": "USD",
        "lost": 0, "rows": rows, "total": made_up(requests=5),
    } | more  # fmt: skip


def test_an_hour_that_comes_twice_has_its_offset() -> None:
    names = ("2026-10-25T01:00:00+02:00", "2026-10-25T02:00:00+02:00", "2026-10-25T02:00:00+01:00")
    lines = to_lines(report("hour", *(made_up(name=name) for name in names)), None)
    assert [line[:22].rstrip() for line in lines[3:6]] == [
        "2026-10-25 01:00",
        "2026-10-25 02:00+02:00",
        "2026-10-25 02:00+01:00",
    ]


def test_nothing_at_all() -> None:
    assert to_lines(report("key"), 80) == [
        "usage from 1970-01-01 00:00 to 1970-01-01 02:00 (UTC)",
        "",
        "no requests in this time",
    ]
    assert "first byte     -" in to_lines(report(None), 80)


def test_a_part_of_a_percent_is_not_nothing() -> None:
    rows = [made_up(name="a", prompt_tokens=1000, cached_tokens=1), made_up(name="b", prompt_tokens=1000)]
    lines = to_lines(report("key", *rows), None)
    assert ("<1%" in lines[3], "  0%" in lines[4]) == (True, True)


@pytest.mark.parametrize(("left_out", "said"), [("limit", "raise --limit"), (None, "")])
def test_what_a_list_leaves_out_is_said(left_out: str | None, said: str) -> None:
    found = {
        "since": 0,
        "until": 7200,
        "zone": "UTC",
        "currency": "USD",
        "left_out": left_out,
        "requests": [],
    }
    assert said in requests_to_lines(found, 80)[-1]


def test_missing_requests_are_told() -> None:
    lines = to_lines(report(None, lost=1234), None)
    assert (
        "1,234 requests of this time are missing: the ledger could not be written. Sums are too low." in lines
    )
    assert not any("missing" in line for line in to_lines(report(None), None))


def test_a_backup_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, backup = tmp_path / "own" / "usage.db", tmp_path / "backup.db"
    LedgerFile(backup).batch([EndedRequest(1_795_168_800.0, "r")])
    path.parent.mkdir()
    path.with_name("usage.db.broken-20261120T101500Z").write_bytes(b"broken")
    config = tmp_path / "config.toml"
    config.write_text(f'[[models]]\nname = "m"\npath = "/m"\n[usage]\npath = "{path}"\n')
    assert main(["usage", "restore", str(backup), "-c", str(config)]) == 0
    said = capsys.readouterr().out
    assert f"{path}: restored from {backup}" in said
    assert "later ones are not in it" in said
    assert "does not count any longer" in said
    assert main(["usage", "restore", str(tmp_path / "none.db"), "-c", str(config)]) == 2
    assert "no such file" in capsys.readouterr().err
