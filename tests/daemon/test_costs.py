"""Live costs: the bill and the energy counted up, the ledger read."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.ledger_file import LedgerFile

from launcher.base import clock as clocks
from launcher.config.schema import Cost
from launcher.daemon import costs as module
from launcher.daemon.costs import Costs
from launcher.telemetry import metrics

BEGAN = 1_767_225_600  # a midnight in UTC
HOUR = 3600
LABELS = ("USD",)


class Clock:
    """time.monotonic, and a wall clock that nobody sets."""

    def __init__(self) -> None:
        self.now = float(BEGAN)
        self.wall = clocks.Clock(self.time, self.time)

    def time(self) -> float:
        return self.now

    monotonic = time


class Ledger:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.metered: list[tuple[str, str, float]] = []

    def meter(self, amounts: Iterable[tuple[str, str, float]]) -> None:
        self.metered += amounts

    def suspect(self) -> None:
        self.suspected = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def planted(tmp_path: Path) -> LedgerFile:
    return LedgerFile(tmp_path / "usage.db", began=BEGAN)


def powercap(root: Path, uj: int) -> Path:
    folder = root / "intel-rapl:0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text("package-0\n")
    (folder / "max_energy_range_uj").write_text(f"{2**36}\n")
    (folder / "energy_uj").write_text(f"{uj}\n")
    return root


async def test_the_last_hour_and_today(clock: Clock, planted: LedgerFile) -> None:
    costs = Costs(lambda: Cost(hourly=3.6), Ledger(planted.path), clock=clock.wall)
    clock.now += 60
    await costs.read()
    clock.now += HOUR - 60
    planted.sums(BEGAN, {"output_tokens": 1_000_000})
    planted.sums(BEGAN, {"output_tokens": 5_000_000}, overflow="api")  # not served here
    planted.meter(BEGAN, "busy_s", "0", 1800.0)
    await costs.read()
    now = costs.now()
    assert now is not None
    assert now.per_million_output == pytest.approx(3.54)
    assert (now.seconds, now.today, now.today_utilisation) == (3540, 3.6, 0.5)
    values = costs.values()
    assert values[metrics.COST] == {LABELS: 3.6}
    assert values[metrics.COST_PER_MILLION][LABELS] == pytest.approx(3.54)


async def test_without_a_price_there_is_nothing(clock: Clock, planted: LedgerFile) -> None:
    costs = Costs(Cost, Ledger(planted.path), clock=clock.wall)
    clock.now += 100
    await costs.read()
    assert costs.now() is None
    assert metrics.COST not in costs.values()


async def test_a_price_that_a_reload_brings(clock: Clock, planted: LedgerFile) -> None:
    prices = [Cost()]
    costs = Costs(lambda: prices[-1], Ledger(planted.path), clock=clock.wall)
    clock.now += HOUR
    costs.count()
    prices.append(Cost(hourly=3.6, currency="EUR"))
    clock.now += HOUR
    assert costs.values()[metrics.COST] == {("EUR",): 3.6}


async def test_without_a_ledger_the_bill_still_counts(clock: Clock, tmp_path: Path) -> None:
    for ledger in (None, Ledger(tmp_path / "none.db")):
        clock.now = float(BEGAN)
        costs = Costs(lambda: Cost(hourly=3.6), ledger, clock=clock.wall)
        clock.now += HOUR
        await costs.read()
        now = costs.now()
        assert now is not None
        assert (now.per_million_output, now.today, now.today_utilisation) == (None, None, None)
        assert costs.values()[metrics.COST] == {LABELS: 3.6}
        assert costs.values()[metrics.COST_PER_MILLION] == {}


async def test_measured_energy_is_billed_and_metered(clock: Clock, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "none.db")
    root = powercap(tmp_path / "powercap", 0)
    costs = Costs(lambda: Cost(watts="measured", price_per_kwh=3.6), ledger, root, clock.wall)
    costs.count()
    for step in (1, 2):
        clock.now += 10
        powercap(root, step * 5_000_000_000)
        costs.count()
    assert ledger.metered == [("joules", "package-0", 5000.0), ("joules_s", "", 10.0)] * 2
    values = costs.values()
    assert values[metrics.ENERGY] == {("package-0",): 10_000.0}
    assert values[metrics.COST] == {LABELS: 0.01}
    clock.now += 10
    powercap(root, 15_000_000_000)
    values = costs.values()
    assert values[metrics.COST] == {LABELS: 0.015}
    assert values[metrics.ENERGY] == {("package-0",): 15_000.0}, "of the same moment as its cost"


async def test_the_bill_of_an_hour_like_this_moment(clock: Clock, tmp_path: Path) -> None:
    assert Costs(Cost, None).per_hour() is None
    assert Costs(lambda: Cost(hourly=0.79), None).per_hour() == 0.79
    root = powercap(tmp_path / "powercap", 0)
    costs = Costs(lambda: Cost(hourly=1, watts="measured", price_per_kwh=2), None, root)
    assert costs.per_hour() == 1
    costs.count()
    clock.now += 10
    powercap(root, 5_000_000_000)
    costs.count()
    assert costs.per_hour() == 2


async def test_energy_that_cannot_be_measured_is_said_once(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "launcher.daemon")
    costs = Costs(lambda: Cost(watts="measured", price_per_kwh=1), None, tmp_path)
    for _ in range(3):
        clock.now += 10
        costs.count()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["cannot measure energy"]
    assert "set cost.watts" in caplog.text
    powercap(tmp_path, 0)
    costs.count()
    clock.now += 10
    powercap(tmp_path, 1_000_000)
    costs.count()
    assert costs.values()[metrics.ENERGY] == {("package-0",): 1.0}
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    costs.count()
    assert len(caplog.records) == 2
