"""`numa-launcher cost` and `cost estimate`: text, JSON, exit codes, and what a person mis-types."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support import bench_results
from support.fake_operations import Backstage, FakeOperations
from support.ledger_file import LedgerFile

from launcher.accounts.cost import CostNow
from launcher.base.errors import LauncherError
from launcher.cli import cost, cost_estimate, main
from launcher.config.schema import Cost
from launcher.control.client import ControlClient
from launcher.measure.bench import store
from launcher.measure.bench.result import BenchResult

Output = pytest.CaptureFixture[str]

GOLDEN = Path(__file__).parent / "cost"
CASE = ("--hourly", "0.79", "--tokens-per-second", "60")
TICKETS = ("--input", "500", "--output", "300")
HOUR = 3600
BEGAN = 1_767_225_600  # 2026-01-01 00:00 UTC


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No results, daemon or configuration of this machine; always the same day."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", str(tmp_path / "no.sock"))
    monkeypatch.setattr(cost_estimate, "_today", lambda: dt.date(2026, 1, 31))
    monkeypatch.setattr(cost, "time", SimpleNamespace(time=lambda: BEGAN + 48 * HOUR))


def estimate(*words: str) -> int:
    return main(["cost", "estimate", *words])


def refused(words: list[str], capsys: Output) -> list[str]:
    """The lines of the error, of which there are two."""
    try:
        code: Any = main(words)
    except SystemExit as end:
        code = end.code
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("cannot ")
    return lines


def compare(name: str, capsys: Output) -> None:
    """With the file of that name in tests/cli/cost."""
    assert capsys.readouterr().out == (GOLDEN / name).read_text(encoding="utf-8")


# --- estimate ----------------------------------------------------------------------------------------


def test_estimate_of_the_case_in_text(capsys: Output) -> None:
    assert estimate(*CASE) == 0
    compare("estimate.txt", capsys)
    assert estimate(*CASE, "--requests", "100000", *TICKETS) == 0
    compare("estimate-100000.txt", capsys)
    assert estimate(*CASE, "--requests", "500_000", *TICKETS) == 0
    compare("estimate-500000.txt", capsys)


def test_estimate_that_does_not_fit_ends_with_1(capsys: Output) -> None:
    assert estimate(*CASE, "--requests", "1,000,000", *TICKETS) == 1
    compare("estimate-1000000.txt", capsys)


def test_estimate_in_json(capsys: Output) -> None:
    assert estimate(*CASE, "--requests", "500000", *TICKETS, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["month_bill"] == 576.70
    assert found["month"]["utilisation"] == pytest.approx(0.9513, abs=1e-4)
    assert {row["name"]: row["amount"] for row in found["month"]["references"]}["GPT-4o-mini"] == 127.5
    assert found["slo"]["result"] is None
    assert main(["cost", "--json", "estimate", *CASE]) == 0  # before the action, too
    assert json.loads(capsys.readouterr().out)["month"] is None


def test_estimate_in_another_currency(capsys: Output) -> None:
    assert estimate(*CASE, "--currency", "EUR", "--requests", "10", *TICKETS) == 0
    text = capsys.readouterr().out
    assert "576.70 EUR a month" in text
    assert "no comparison: the launcher's table of API prices is in USD" in text
    assert "Claude" not in text


def test_estimate_from_a_configuration(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[[models]]\nname = "m"\npath = "/m"\n[cost]\npurchase = 43800\nyears = 5\n'
        '[[cost.reference]]\nname = "api"\ninput = 1\noutput = 2\ndate = "2026-01-30"\n'
    )
    assert estimate("-c", str(file), "--tokens-per-second", "60", "--requests", "10", *TICKETS) == 0
    text = capsys.readouterr().out
    assert "730.00 USD a month: 1.00 USD an hour" in text
    assert "api " in text
    assert "the oldest of 2026-01-30, 1 days ago" in text
    assert estimate("-c", str(file), "--purchase", "87600", "--tokens-per-second", "60") == 0
    assert "2.00 USD an hour" in capsys.readouterr().out


def test_energy_to_be_measured_cannot_be_estimated(tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[[models]]\nname = "m"\npath = "/m"\n[cost]\nwatts = "measured"\nprice_per_kwh = 0.3\n')
    words = ["cost", "estimate", "-c", str(file), "--tokens-per-second", "60"]
    first, second = refused(words, capsys)
    assert "nothing is measured here" in first
    assert "--watts 800" in second
    assert main([*words, "--watts", "1000"]) == 0
    assert "1.39 USD per million output tokens: 0.30 USD an hour" in capsys.readouterr().out


def test_amounts_of_any_size_can_be_shown(capsys: Output) -> None:
    most = ("--requests", "1000000000000", "--input", "1000000000000", "--output", "1000000000000")
    assert estimate("--hourly", "1e12", "--tokens-per-second", "0.001", *most) == 1
    assert "Claude Sonnet 4.5   18,000,000,000,000,000,000.00 " in capsys.readouterr().out
    assert estimate("--hourly", "1e-12", "--tokens-per-second", "1e12", *most) == 1
    assert estimate("--hourly", "0", "--tokens-per-second", "60", "--requests", "1", *TICKETS) == 0
    assert "the first token" in capsys.readouterr().out


def test_a_machine_with_room_for_peaks(capsys: Output) -> None:
    assert estimate(*CASE, "--requests", "300000", *TICKETS) == 0
    assert "42.9 % is left for peaks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why", "remedy"),
    [
        (["--hourly", "0.79"], "--tokens-per-second is missing", "--tokens-per-second"),
        (["--tokens-per-second", "60"], "nothing says what the machine costs", "--hourly 0.79"),
        ([*CASE, "--requests", "10"], "--input and --output are missing", "all of --requests"),
        ([*CASE, "--requests", "10", "--input", "5"], "--output is missing", "all of"),
        (["--hourly=-1", "--tokens-per-second", "60"], "'-1' is not an amount", "0.79"),
        (["--hourly", "$0.79", "--tokens-per-second", "60"], "'$0.79' is not an amount", "such as 0.79"),
        (["--hourly", "nan", "--tokens-per-second", "60"], "'nan' is not an amount", "such as 0.79"),
        (["--hourly", "0.79", "--tokens-per-second", "0"], "'0' is not a number from 0.001 on", "0.001"),
        (["--hourly", "0.79", "--tokens-per-second", "inf"], "'inf' is not", "0.001"),
        (["--hourly", "1e13", "--tokens-per-second", "60"], "'1e13' is not an amount", "such as 0.79"),
        (["--hourly", "1", "--tokens-per-second", "1e-9"], "'1e-9' is not a number from 0.001 on", "0.001"),
        ([*CASE, "--requests", "0", *TICKETS], "'0' is not a number of 1 or more", "1 or more"),
        ([*CASE, "--requests", "10", "--input", "1", "--output", "0"], "'0' is not", "1 or more"),
        ([*CASE, "--currency", "dollars"], "'dollars' is not a currency", "USD"),
        ([*CASE, "--slo", "ttft=2"], "'ttft=2' is not a list of limits", "ttft_p99=2s"),
        ([*CASE, "--watts", "800"], "--watts without --price-per-kwh", "--price-per-kwh"),
        ([*CASE, "--price-per-kwh", "0.3"], "--price-per-kwh without --watts", "--watts"),
        ([*CASE, "--houry", "3"], "unknown argument '--houry'", "--hourly"),
        ([*CASE, "-c", "/none.toml"], "cannot read configuration '/none.toml'", "existing file"),
    ],
)  # fmt: skip
def test_estimate_mistyped(words: list[str], why: str, remedy: str, capsys: Output) -> None:
    lines = refused(["cost", "estimate", *words], capsys)
    assert why in lines[0]
    assert remedy in lines[1]


def test_an_unknown_action(capsys: Output) -> None:
    assert "estimate" in refused(["cost", "estimat", *CASE], capsys)[1]


# --- the SLO that was measured -----------------------------------------------------------------------


def stored(tmp_path: Path, **fields: Any) -> BenchResult:
    result = bench_results.result(concurrencies=(1, 4, 16), runs=1, noise=0.0, **fields)
    (tmp_path / "bench").mkdir(exist_ok=True)
    store.save(tmp_path / "bench", result)
    return result


def test_a_demand_fits_what_was_measured(tmp_path: Path, capsys: Output) -> None:
    result = stored(tmp_path, slo={"ttft_p99": 0.6})
    met = [point for point in result.points if point.ttft_s is not None and point.ttft_s.p99 <= 0.6]
    assert 0 < len(met) < 3
    speed = max(point.output_tokens_per_s for point in met)
    demand = ("--requests", "500000", "--input", "128", "--output", "128")
    assert estimate("--hourly", "1", "--tokens-per-second", "200", *demand, "--json") == 0
    found = json.loads(capsys.readouterr().out)["slo"]
    assert found["result"] == result.id
    assert found["output_tokens_per_s"] == pytest.approx(speed)
    assert found["fits"] is True
    assert "other lengths" not in "".join(found["lines"])


def test_a_demand_above_what_met_the_slo_ends_with_1(tmp_path: Path, capsys: Output) -> None:
    stored(tmp_path, slo={"ttft_p99": 0.6})
    demand = ("--requests", "9000000", "--input", "500", "--output", "300")
    assert estimate("--hourly", "1", "--tokens-per-second", "5000", *demand) == 1
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert "which this estimate takes, it was not met" in text
    assert "measured with other lengths than yours" in text


def test_limits_of_the_user_come_first(tmp_path: Path, capsys: Output) -> None:
    stored(tmp_path, slo={})
    assert estimate(*CASE) == 0
    assert "no result of `numa-launcher bench` has an SLO" in capsys.readouterr().out
    assert estimate(*CASE, "--slo", "ttft_p99=1ms") == 0
    assert "no load met it" in capsys.readouterr().out
    assert estimate(*CASE, "--slo", "ttft_p99=1ms", "--requests", "1", *TICKETS) == 1
    assert estimate(*CASE, "--slo", "ttft_p99=100s") == 0
    assert "at 16 at once" in capsys.readouterr().out


# --- the ledger --------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    control = f'[control]\nsocket = "{tmp_path / "none.sock"}"\n'
    file.write_text(f'[[models]]\nname = "m"\npath = "/m"\n{control}[cost]\nhourly = 0.79\n')
    return file


@pytest.fixture
def ledger(tmp_path: Path) -> LedgerFile:
    """Two days, in the first of which something was served."""
    path = tmp_path / "usage" / "usage.db"
    path.parent.mkdir()
    ledger = LedgerFile(path, began=BEGAN)
    for hour in range(24):
        at = BEGAN + hour * HOUR
        ledger.sums(
            at,
            {
                "requests": 1000, "completed": 990, "prompt_tokens": 500_000, "cached_tokens": 125_000,
                "output_tokens": 150_000, "prefill_s": 500.0, "decode_s": 4500.0,
            },
        )  # fmt: skip
        for slot in "01":
            ledger.meter(at, "ready_s", slot, 3600.0)
            ledger.meter(at, "busy_s", slot, 2700.0)
    away = {"requests": 40, "completed": 40, "prompt_tokens": 20_000, "output_tokens": 12_000}
    ledger.sums(BEGAN, {**away, "overflow_picos": 240_000_000_000}, overflow="api")
    return ledger


def test_report_in_text(ledger: LedgerFile, config: Path, capsys: Output) -> None:
    assert main(["cost", "-c", str(config), "--file", str(ledger.path)]) == 0
    compare("report.txt", capsys)


def test_report_of_a_purchase_and_its_energy(ledger: LedgerFile, config: Path, capsys: Output) -> None:
    text = config.read_text().replace("hourly = 0.79", "purchase = 43_800\nwatts = 500\nprice_per_kwh = 0.5")
    config.write_text(text)
    assert main(["cost", "-c", str(config)]) == 0
    bill = "bill         60.00 USD: share of the purchase 48.00 USD, energy 12.00 USD (24.0 kWh)"
    assert bill in capsys.readouterr().out.splitlines()
    config.write_text(text.replace("purchase = 43_800\nwatts = 500", 'hourly = 1\nwatts = "measured"'))
    ledger.meter(BEGAN, "joules", "package-0", 36e6)
    ledger.meter(BEGAN, "joules_s", "", 12 * 3600.0)
    assert main(["cost", "-c", str(config)]) == 0
    bill = (
        "bill         53.00 USD: rent 48.00 USD, energy 5.00 USD (10.0 kWh, measured in 25.0 % of the time)"
    )
    assert bill in capsys.readouterr().out.splitlines()


def test_report_of_minutes(tmp_path: Path, config: Path, capsys: Output) -> None:
    ledger = LedgerFile(tmp_path / "other.db", began=BEGAN + 48 * HOUR - 90)
    assert main(["cost", "-c", str(config), "--file", str(ledger.path)]) == 0
    assert capsys.readouterr().out.startswith(
        "2026-01-02 23:58 to 2026-01-03 00:00 UTC, 2 minutes\nbill         0.02 USD"
    )


def test_report_of_a_ledger_without_times(tmp_path: Path, config: Path, capsys: Output) -> None:
    """Of slots, and of streams."""
    ledger = LedgerFile(tmp_path / "other.db", began=BEGAN)
    ledger.sums(BEGAN, {"completed": 1, "prompt_tokens": 10, "output_tokens": 10})
    assert main(["cost", "-c", str(config), "--file", str(ledger.path)]) == 0
    text = capsys.readouterr().out
    assert "utilisation  not known: the ledger has no times of slots" in text
    assert "prompts and output cannot be told apart" in text
    assert re.search(r"^output tokens +3,792,000.00 +-$", text, re.MULTILINE)


def test_the_file_is_read_where_no_daemon_answers(ledger: LedgerFile, config: Path, capsys: Output) -> None:
    assert main(["cost", "-c", str(config), "--since", "2026-01-02", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["begin"] == BEGAN + 24 * HOUR
    assert found["bill"] == pytest.approx(0.79 * 24)
    assert found["output_tokens"] == 0
    assert main(["cost", "-c", str(config), "--since", "2026-01-02"]) == 0
    assert "no tokens were served: there is no cost of a token" in capsys.readouterr().out


@pytest.fixture
def daemon(tmp_path: Path, ledger: LedgerFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backstage]:
    operations = FakeOperations(ledger=ledger.path, now=BEGAN + 48 * HOUR)
    with Backstage(str(tmp_path / "c.sock"), operations) as daemon:
        monkeypatch.setenv("NUMA_LAUNCHER_SOCKET", daemon.path)
        yield daemon


def test_the_daemon_is_asked_first(daemon: Backstage, capsys: Output) -> None:
    """No configuration is needed: it is the daemon's."""
    assert main(["cost"]) == 0
    compare("report.txt", capsys)
    daemon.operations.prices = Cost(hourly=7.9)
    assert main(["cost", "--since", "2026-01-02", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["begin"], found["bill"]) == (BEGAN + 24 * HOUR, pytest.approx(189.6))


def test_a_time_that_the_daemon_does_not_know(daemon: Backstage) -> None:
    with pytest.raises(LauncherError, match="cannot count since 'once': it is not a time"):
        ControlClient(daemon.path).get("/cost?since=once")


def test_an_error_of_the_daemon_is_not_answered_from_the_file(daemon: Backstage, capsys: Output) -> None:
    daemon.operations.prices = Cost()
    assert "[cost] does not say" in refused(["cost"], capsys)[0]


def test_status_has_one_line_of_cost(daemon: Backstage, capsys: Output) -> None:
    assert main(["status"]) == 0
    assert "cost:" not in capsys.readouterr().out
    now = CostNow(currency="USD", per_million_output=4.1234, seconds=3600, today=6.3, today_utilisation=0.431)
    daemon.operations.cost_now = now
    for changes, wanted in (
        ({}, "cost: 4.12 USD per million output tokens in the last hour, today 6.30 USD at 43 % utilisation"),
        ({"seconds": 120, "today_utilisation": None}, "in the last 2m00s, today 6.30 USD"),
        ({"per_million_output": None, "today": None}, "cost: no output tokens in the last hour"),
    ):
        daemon.operations.cost_now = replace(now, **changes)
        assert main(["status"]) == 0
        assert [line for line in capsys.readouterr().out.splitlines() if line.endswith(wanted)]


def test_overflow_without_prices_is_said(ledger: LedgerFile, config: Path, capsys: Output) -> None:
    ledger.sums(BEGAN + 30 * HOUR, {"requests": 1, "prompt_tokens": 5, "output_tokens": 5}, overflow="free")
    assert main(["cost", "-c", str(config), "--since", "2026-01-02"]) == 0
    assert "its endpoint has no prices: set them in [[proxy.overflow]]" in capsys.readouterr().out


def test_no_daemon_and_no_ledger(config: Path, capsys: Output) -> None:
    first, second = refused(["cost", "-c", str(config)], capsys)
    assert "no such socket, and without the daemon: cannot read the usage ledger" in first
    assert "[usage] enabled" in second


def test_no_cost_in_the_configuration(ledger: LedgerFile, config: Path, capsys: Output) -> None:
    config.write_text('[[models]]\nname = "m"\npath = "/m"\n')
    first, second = refused(["cost", "-c", str(config), "--file", str(ledger.path)], capsys)
    assert "[cost] does not say what the machine costs" in first
    assert "hourly = 0.79" in second


def test_a_file_that_is_no_ledger(tmp_path: Path, config: Path, capsys: Output) -> None:
    other = tmp_path / "other"
    other.write_text("no database, but more than a hundred bytes of text" * 9)
    assert "usage ledger" in refused(["cost", "-c", str(config), "--file", str(other)], capsys)[0]


@pytest.mark.parametrize("since", ["30", "yesterweek", "", "1y", "2026-13-01"])
def test_since_mistyped(since: str, capsys: Output) -> None:
    first, second = refused(["cost", "--since", since], capsys)
    assert f"'{since}' is not a time" in first
    assert "30d" in second
