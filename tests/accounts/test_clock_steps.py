"""Somebody sets the clock by hours, weeks and years: nothing is spent twice, refused for years, deleted or billed."""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from zoneinfo import ZoneInfo

import msgspec
import pytest
from support.deployments import CLOUD, made
from support.fakes import until
from support.hand_clock import DAY_S, HOUR_S, STEPS_S, HandClock
from support.history_rows import row
from support.ledger_file import entries
from support.stored_sums import StoredSums
from support.written import written

from launcher.accounts.audit import TrailFile
from launcher.accounts.audit_verify import verify
from launcher.accounts.budgets import Budgets, Past, Reservation, Rules
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.accounts.ledger_file import open_reader
from launcher.accounts.spending import KEPT_S, Spent, SpentElsewhere
from launcher.base.clock import BELIEVED_S
from launcher.base.money import PICOS
from launcher.config.schema import Audit, Usage
from launcher.config.usage_schema import Cost
from launcher.daemon.accounts import Accounts
from launcher.daemon.costs import Costs
from launcher.telemetry import metrics
from launcher.telemetry.history import HOUR, History

NOON = 1_795_132_800.0 + 12 * HOUR_S  # Friday, 2026-11-20, UTC
PERIODS = ("day", "week", "month")


def accounts(folder: Path, clock: HandClock) -> Accounts:
    config = made(usage={}, proxy={"overflow": (CLOUD,)}).config
    found = Accounts(config, {"STATE_DIRECTORY": str(folder)}, clock)
    found.budgets.follow({period: f"100-tokens/{period}" for period in PERIODS})
    return found


def spend(found: Accounts, clock: HandClock, tokens: int) -> None:
    for period in PERIODS:
        found.accounting.record(EndedRequest(clock.at, "r", period, output_tokens=tokens))
    cap = found.accounting.caps["cloud"]
    cap.reserve(PICOS)
    cap.settle(PICOS, PICOS)
    found.accounting.record(EndedRequest(clock.at, "r", overflow="cloud", picos=PICOS))


def spent(found: Accounts) -> list[int | str | None]:
    return [state.spent for state in found.budgets.states()]


async def follows(found: Accounts, clock: HandClock) -> None:
    """The daemon has read the ledger again: the periods are those around the clock."""
    await until(lambda: found.accounting.caps["cloud"].begins == clock.at // DAY_S * DAY_S)
    await until(lambda: all(state.begins[:7] == iso(clock.at)[:7] for state in found.budgets.states()[1:2]))


def iso(at: float) -> str:
    return dt.datetime.fromtimestamp(at, ZoneInfo("UTC")).isoformat()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.daemon.accounts.LOOK_S", 0.01)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("step_s", STEPS_S)
async def test_budgets_and_caps(tmp_path: Path, step_s: float) -> None:
    clock = HandClock(NOON)
    found = accounts(tmp_path, clock)
    await found.start(dict)
    spend(found, clock, 70)
    cap = found.accounting.caps["cloud"]
    try:
        clock.set_by(step_s)
        assert spent(found) == [70, 70, 70]  # until the ledger was read
        cap.next_day(clock.now())
        assert cap.settled == PICOS
        await follows(found, clock)
        assert spent(found) == [70, 70, 70]  # no period began: no time elapsed
        assert cap.settled == PICOS
        spend(found, clock, 20)
        assert spent(found) == [90, 90, 90]
        clock.wait(60)
        clock.set_by(-step_s)
        await follows(found, clock)
        assert spent(found) == [90, 90, 90]
        assert (cap.settled, cap.admits(3 * PICOS), cap.admits(3 * PICOS + 1)) == (2 * PICOS, True, False)
        clock.wait(12 * HOUR_S)  # Saturday
        await until(lambda: cap.next_day(clock.now()) or not cap.settled)
        assert (cap.settled, cap.ends) == (0, NOON + 36 * HOUR_S)
        assert spent(found)[0] == 0
        clock.wait(2 * DAY_S)  # Monday
        assert spent(found)[2] == 0
        clock.wait(8 * DAY_S)  # December
        assert spent(found) == [0, 0, 0]
        spend(found, clock, 10)
        assert spent(found) == [10, 10, 10]
    finally:
        await found.stop()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("stepped", ["before", "while it was stopped"])
@pytest.mark.parametrize("step_s", STEPS_S)
async def test_a_restart_in_the_middle_of_a_step(tmp_path: Path, step_s: float, stepped: str) -> None:
    clock = HandClock(NOON)
    first = accounts(tmp_path, clock)
    await first.start(dict)
    spend(first, clock, 70)
    if stepped == "before":
        clock.set_by(step_s)
        await follows(first, clock)
        spend(first, clock, 10)
    await first.stop()
    if stepped != "before":
        clock.at += step_s
    clock = clock.restarted()
    second = accounts(tmp_path, clock)
    await second.start(dict)
    assert second.accounting.caps["cloud"].settled >= PICOS
    already = 80 if stepped == "before" else 70
    requests = already // 10 - 6
    try:
        await follows(second, clock)
        cap = second.accounting.caps["cloud"]
        assert (spent(second), cap.settled) == ([already] * 3, requests * PICOS)
        spend(second, clock, 10)
        assert spent(second) == [already + 10] * 3
        clock.set_by(-step_s)
        await follows(second, clock)
        assert spent(second) == [already + 10] * 3
        assert cap.settled == (requests + 1) * PICOS
        clock.wait(14 * HOUR_S)  # the second process began at ten o'clock where the clock was two hours slow
        await until(lambda: cap.next_day(clock.now()) or not cap.settled)
        assert (cap.settled, spent(second)[0]) == (0, 0)
    finally:
        await second.stop()


@pytest.mark.parametrize("step_s", STEPS_S)
def test_a_restart_with_a_wrong_clock_deletes_nothing(step_s: float) -> None:
    clock = HandClock(NOON)
    clock.set_by(step_s)
    clock = clock.restarted()
    clock.settle()
    found = clock.delete_before(DAY_S)
    assert found is not None
    assert found <= NOON
    clock.wait(BELIEVED_S)  # a machine without a battery has only this time
    found = clock.delete_before(DAY_S)
    assert found == clock.at - DAY_S


@pytest.mark.parametrize(("period", "days"), [("day", 1), ("week", 7), ("month", 28)])
@pytest.mark.parametrize("seed", range(12))
def test_time_alone_makes_amounts_available(seed: int, period: str, days: int) -> None:
    """A key takes what it is given while the clock is set and daemons restart: no more than 100 tokens for each period that
    elapses, the two that it is in at the begin and the end, and the rest of one that the clock is set into; of days, never
    nothing for longer than two. `days`: of the shortest period."""
    pick = random.Random(seed)  # noqa: S311
    shortest_s, into = days * DAY_S, 0
    clock, served, since = HandClock(NOON), list[tuple[str, float, int, int]](), 0.0
    sums = StoredSums()
    budgets, began = periodic(period, clock, served, sums), clock.elapsed_s
    for _ in range(60):
        kind = pick.random()
        if kind < 0.15:
            clock.set_by(step_s := pick.choice(STEPS_S))
            into += step_s % shortest_s != 0
            budgets.reading()
            budgets.learn(past_of(clock, served))
        elif kind < 0.25:
            clock.at += (step_s := pick.choice([0.0, *STEPS_S]))  # while it is stopped
            into += step_s % shortest_s != 0
            clock = clock.restarted()
            budgets = periodic(period, clock, served, sums := sums.next())
        else:
            clock.wait(pick.choice([60, *(share * shortest_s for share in (1 / 24, 5 / 24, 1))]))
        before = len(served)
        while isinstance(given := budgets.admit("ann", Spent(10, 0)), Reservation):
            given.release()
            served.append(("ann", clock.at, 10, 0))
            budgets.spend(EndedRequest(clock.at, "r", "ann", output_tokens=10))
        since = clock.elapsed_s if len(served) > before else since
        assert clock.elapsed_s - since <= 2 * DAY_S or period != "day"
    assert 10 * len(served) <= 100 * ((clock.elapsed_s - began) / shortest_s + 2 + into)


def periodic(
    period: str, clock: HandClock, served: Sequence[tuple[str, float, int, int]], sums: StoredSums
) -> Budgets:
    """The budgets of a new process."""
    found = Budgets(Rules(), ZoneInfo("UTC"), clock, sums.slot)
    found.learn(past_of(clock, served))
    found.follow({"ann": f"100-tokens/{period}"})
    return found


def past_of(clock: HandClock, served: Iterable[tuple[str, float, int, int]]) -> Past:
    """As read_past reads it: around the times of both clocks."""
    times = clock.now()[:2]
    return Past([row for row in served if any(-KEPT_S <= row[1] - at < DAY_S for at in times)])


@pytest.mark.parametrize(
    ("period", "ends"),
    [
        ("day", "2026-11-20T23:00"),
        ("week", "2026-11-22T23:00"),
        ("month", "2026-11-30T23:00"),
    ],
)
@pytest.mark.parametrize("step_s", STEPS_S)
def test_what_other_hosts_spent_counts_on_until_the_period_has_elapsed(
    step_s: float, period: str, ends: str
) -> None:
    """An hour before its end the clock is set. What they report of the period around the new time never takes less, and is
    not forgotten when the one before has elapsed."""
    clock = HandClock(dt.datetime.fromisoformat(f"{ends}+00:00").timestamp())
    found = Budgets(Rules(), ZoneInfo("UTC"), clock, StoredSums().slot)
    found.learn(Past())
    found.follow({"ann": f"100-tokens/{period}"})
    before = found.states()[0].begins
    tell(found, 50)
    clock.set_by(step_s)
    found.reading()
    found.learn(Past())
    tell(found, 10)
    assert found.states()[0].spent_elsewhere == 50
    clock.wait(HOUR_S - 1)
    assert found.states()[0].spent_elsewhere == 50
    begins = found.states()[0].begins
    clock.wait(1)
    state = found.states()[0]
    if state.begins == before:  # the clock was set back within the period
        assert state.spent_elsewhere == 50
    else:
        assert state.spent_elsewhere == (10 if state.begins == begins else 0)


def tell(found: Budgets, tokens: int) -> None:
    state = found.states()[0]
    said = SpentElsewhere("ann", state.budget, state.begins, tokens)
    assert found.told(msgspec.json.encode({"spent": [said]})) == {"taken": 1, "ignored": []}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("wrong_s", STEPS_S)
async def test_a_daemon_that_starts_with_a_wrong_clock(tmp_path: Path, wrong_s: float) -> None:
    """NTP sets it later: what was spent in the right periods before is read from the ledger, and counts."""
    clock = HandClock(NOON)
    first = accounts(tmp_path, clock)
    await first.start(dict)
    spend(first, clock, 70)
    await first.stop()
    clock = HandClock(NOON + wrong_s)
    second = accounts(tmp_path, clock)
    await second.start(dict)
    try:
        clock.set_by(-wrong_s)
        await follows(second, clock)
        await until(lambda: spent(second) == [70, 70, 70])
        assert second.accounting.caps["cloud"].settled == PICOS
    finally:
        await second.stop()


@pytest.mark.parametrize("step_s", STEPS_S)
def test_entries_of_the_ledger_stay(tmp_path: Path, step_s: float) -> None:
    clock, path = HandClock(NOON), tmp_path / "usage.db"
    with written(Ledger(Usage(), path, clock), by_flush=True) as ledger:
        for age in (29, 10, 0):
            ledger.put(EndedRequest(NOON - age * DAY_S, str(age)))
            assert ledger.flush()
        clock.settle()
        for _ in range(2):
            clock.set_by(step_s)
            assert ledger.flush()
            clock.wait(HOUR_S)
            assert ledger.flush()
            step_s = -step_s
        assert ids(path) == ["29", "10", "0"]
        clock.wait(2 * DAY_S)
        assert ledger.flush()
        assert ledger.flush()
        assert ids(path) == ["10", "0"]  # time that elapses does


def ids(path: Path) -> list[str]:
    with closing(open_reader(path)) as reader:
        return [entry.request_id for entry in entries(reader, 0, 2**40)]


@pytest.mark.parametrize("step_s", STEPS_S)
def test_audit_files_are_begun_each_day_and_stay(tmp_path: Path, step_s: float) -> None:
    clock, folder = HandClock(NOON), tmp_path / "trail"
    writer = TrailFile(folder, Audit(keep_days=3), "1.0", clock)
    settle_and(clock, writer.turn)
    clock.set_by(step_s)
    settle_and(clock, writer.turn)
    clock.set_by(-step_s)
    settle_and(clock, writer.turn)
    before = len(list(folder.glob("*.jsonl")))
    assert before == (1 if abs(step_s) < DAY_S else 3)
    for day in range(1, 4):
        clock.wait(DAY_S)
        settle_and(clock, writer.turn)
        assert len(list(folder.glob("*.jsonl"))) == before + day
    clock.wait(2 * DAY_S)
    writer.turn()
    assert (
        len(list(folder.glob("*.jsonl"))) == 3
    )  # past keep_days they go, whatever day a wrong clock gave them
    writer.stopped()
    writer.store()
    writer.close()
    assert verify(folder).wrong is None


def settle_and(clock: HandClock, then: Callable[[], None]) -> None:
    clock.settle()
    then()


@pytest.mark.parametrize("step_s", STEPS_S)
async def test_a_step_is_not_billed(step_s: float) -> None:
    clock = HandClock(NOON)
    costs = Costs(lambda: Cost(hourly=1.0), None, clock=clock)
    clock.wait(HOUR_S)
    clock.set_by(step_s)
    clock.wait(HOUR_S)
    assert costs.values()[metrics.COST] == {("USD",): 2.0}


@pytest.mark.parametrize("step_s", STEPS_S)
def test_rows_of_the_history_stay(step_s: float) -> None:
    """A wrong minute takes the places of a minute's rows at most."""
    history, now = History(), int(NOON * 1000)
    history.add(row(now + number * HOUR.step_ms) for number in range(1, 901))
    now += 900 * HOUR.step_ms
    wrong = now + int(step_s * 1000)
    history.add(row(wrong + number * HOUR.step_ms) for number in range(1, 31))
    history.add([row(now + 31 * HOUR.step_ms)])
    assert len(history.find("1h", 0, now + 31 * HOUR.step_ms).rows) >= 901 - 30
