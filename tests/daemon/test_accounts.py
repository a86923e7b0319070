"""What the daemon keeps of its requests: where, how it is told, what status and metrics say."""

from __future__ import annotations

import asyncio
import datetime as dt
import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from support.deployments import CLOUD, made
from support.fakes import until
from support.history_rows import row
from support.ledger_file import entries

from launcher.accounts import ledger
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LEDGER, LedgerFile, open_reader
from launcher.accounts.report_values import hour_begin
from launcher.accounts.spent_sums import SpentSums
from launcher.base import writer
from launcher.base.database import locked
from launcher.base.errors import LauncherError
from launcher.base.money import PICOS
from launcher.daemon import accounts as module
from launcher.daemon.accounts import Accounts
from launcher.proxy.dispatch.traffic import Occupied
from launcher.telemetry import metrics

UTC = ZoneInfo("UTC")
ENTRY = EndedRequest(ended_at=2e9, request_id="r")


def accounts(folder: Path, proxy: dict[str, Any] | None = None, **usage: Any) -> Accounts:
    return Accounts(made(usage=usage, proxy=proxy or {}).config, {"STATE_DIRECTORY": str(folder)})


async def test_entries_and_seconds_of_slots_are_in_the_file_at_the_end(tmp_path: Path) -> None:
    found = accounts(tmp_path)
    seconds = {0: Occupied(10.0, 4.0)}
    await found.start(lambda: seconds)
    await asyncio.sleep(0)
    found.accounting.record(ENTRY)
    seconds[0] = Occupied(12.0, 5.0)
    await found.stop()
    await found.stop()
    with closing(open_reader(tmp_path / "usage" / "usage.db")) as reader:
        assert list(entries(reader, 0, 3e9)) == [ENTRY]
        metered = reader.execute("SELECT what, name, amount FROM metered ORDER BY what").fetchall()
    assert metered == [("busy_s", "0", 5.0), ("ready_s", "0", 12.0)]
    assert found.values()[metrics.LEDGER_ENTRIES] == {(): 1.0}
    assert found.values()[metrics.LEDGER_OK] == {(): 1.0}
    assert found.warnings() == ()


def test_no_ledger_and_no_history(tmp_path: Path) -> None:
    config = made(usage={"enabled": False}, telemetry={"history": False}).config
    found = Accounts(config, {"STATE_DIRECTORY": str(tmp_path)})

    async def run() -> None:
        await found.start(dict)
        found.accounting.record(ENTRY)
        await found.stop()

    asyncio.run(run())
    assert (found.values(), found.warnings(), list(tmp_path.iterdir())) == ({}, (), [])


async def test_the_history_without_a_ledger(tmp_path: Path) -> None:
    now = time.time_ns() // 2_000_000_000 * 2000
    for count in (0, 1):
        found = accounts(tmp_path, enabled=False)
        assert found.load is not None
        await found.start(dict)
        found.accounting.record(ENTRY)
        await until(lambda load=found.load, count=count: len(load.find("1h", 0).rows) == count)
        found.load.add([row(now)])
        await found.stop()
        assert (found.ledger, found.values(), found.warnings()) == (None, {}, ())
        assert found.folders() == {"usage": tmp_path / "usage"}
    with closing(open_reader(tmp_path / "usage" / "usage.db")) as reader:
        assert reader.execute("SELECT count(*) FROM request").fetchone() == (0,)


async def test_a_history_whose_file_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("a file")
    found = accounts(tmp_path, enabled=False)
    await found.start(dict)
    await until(found.warnings)
    await found.stop()
    [warning] = found.warnings()
    assert warning == (
        f"cannot write the history '{tmp_path}/usage/usage.db': file exists; let the daemon's user write in "
        f"'{tmp_path}/usage', or name another file in [usage] path"
    )


async def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "usage").write_text("a file")
    found = accounts(tmp_path)
    await found.start(dict)
    found.accounting.record(ENTRY)
    assert found.ledger is not None
    await asyncio.to_thread(found.ledger.flush)
    [warning] = found.warnings()
    assert "file exists; 1 entries wait, 0 are lost" in warning
    assert found.values()[metrics.LEDGER_OK] == {(): 0.0}
    assert found.values()[metrics.LEDGER_WAITING] == {(): 1.0}
    await found.stop()


def test_a_user_without_a_state_folder_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 4242424)
    [warning] = Accounts(made().config, {}).warnings()
    assert "user 4242424 has no home folder" in warning
    assert "set [usage] path" in warning
    [warning] = Accounts(made(usage={"enabled": False}).config, {}).warnings()
    assert warning.startswith("cannot keep the history of the load beyond the daemon's end: ")


def test_a_ledger_that_was_not_started_ends(tmp_path: Path) -> None:
    asyncio.run(accounts(tmp_path).stop())
    assert not list(tmp_path.iterdir())


def test_an_unknown_zone_is_found_before_anything_starts() -> None:
    with pytest.raises(LauncherError, match="cannot use time zone 'Mars'"):
        made(usage={"zone": "Mars"})


def spent(found: Accounts, budget: str = "1000-tokens/month") -> int | str | None:
    found.budgets.follow({"ann": budget})
    [state] = found.budgets.states()
    return state.spent


async def test_what_keys_spent_is_known_after_a_restart(tmp_path: Path) -> None:
    first = accounts(tmp_path)
    await first.start(dict)
    first.accounting.record(EndedRequest(ended_at=time.time(), request_id="r", key="ann", prompt_tokens=300))
    assert spent(first) == 300
    first.accounting.record(EndedRequest(ended_at=time.time(), request_id="r", key="ann", output_tokens=40))
    await first.stop()
    second = accounts(tmp_path)
    second.budgets.follow({"ann": "1000-tokens/month"})
    await second.start(dict)
    assert spent(second) == 340
    assert spent(second, "1000-tokens/day") == 340
    await second.stop()


async def test_a_broken_ledger_does_not_open_a_budget(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    first = accounts(tmp_path)
    await first.start(dict)
    first.accounting.record(EndedRequest(ended_at=time.time(), request_id="r", key="ann", prompt_tokens=300))
    await first.stop()
    (folder / "usage.db").write_bytes(b"broken" * 1000)
    second = accounts(tmp_path)
    await second.start(dict)
    assert spent(second) is None
    await second.stop()
    assert list(folder.glob("usage.db.broken-*"))
    third = accounts(tmp_path)  # the new ledger is whole, but is no proof
    await third.start(dict)
    assert spent(third) is None
    await third.stop()


def change(path: Path, script: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


async def test_a_ledger_that_could_not_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.05)
    path = tmp_path / "usage" / "usage.db"
    first = accounts(tmp_path)
    await first.start(dict)
    before = EndedRequest(
        ended_at=time.time(), request_id="r", key="ann", prompt_tokens=300, overflow="cloud", picos=2 * PICOS
    )
    first.accounting.record(before)
    await first.stop()
    with closing(sqlite3.connect(path)) as connection:
        [version] = connection.execute("PRAGMA user_version").fetchone()
    # One of a newer version cannot be read.
    change(path, "CREATE TABLE tomorrow (x); PRAGMA user_version = 99")
    second = accounts(tmp_path, proxy={"overflow": (CLOUD,)})
    await second.start(dict)
    assert spent(second) is None
    assert not second.accounting.caps["cloud"].known
    second.accounting.record(EndedRequest(ended_at=time.time(), request_id="r", key="ann", output_tokens=40))
    change(path, f"DROP TABLE tomorrow; PRAGMA user_version = {version}")
    await until(lambda: spent(second) == 340)
    await until(lambda: second.accounting.caps["cloud"].known)
    assert second.accounting.caps["cloud"].settled == 2 * PICOS
    await second.stop()
    third = accounts(tmp_path)
    third.budgets.follow({"ann": "1000-tokens/month"})
    await third.start(dict)
    assert spent(third) == 340
    await third.stop()


async def test_a_daemon_ends_while_it_waits_for_its_ledger(tmp_path: Path) -> None:
    path = tmp_path / "usage" / "usage.db"
    path.parent.mkdir()
    # One of a newer version cannot be read.
    change(path, "CREATE TABLE tomorrow (x); PRAGMA user_version = 99")
    found = accounts(tmp_path)
    await found.start(dict)
    await found.stop()
    assert len(asyncio.all_tasks()) == 1


async def test_what_waits_is_written_at_the_end_though_all_threads_of_the_loop_hang(tmp_path: Path) -> None:
    found, goes_on = accounts(tmp_path), threading.Event()
    await found.start(dict)
    threads = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(goes_on.wait, 60)
    try:
        found.accounting.record(ENTRY)
        async with asyncio.timeout(30):
            await found.stop()
    finally:
        goes_on.set()
    with closing(open_reader(tmp_path / "usage" / "usage.db")) as reader:
        assert list(entries(reader, 0, 3e9)) == [ENTRY]


async def test_a_disk_that_hangs_delays_the_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Budgets and caps are unknown until it answers; what ended meanwhile counts then, too."""
    first = accounts(tmp_path)
    await first.start(dict)
    first.accounting.record(EndedRequest(ended_at=time.time(), request_id="r", key="ann", prompt_tokens=300))
    await first.stop()
    goes_on, load = threading.Event(), module.load_reading

    def hang(*_: object) -> Any:
        goes_on.wait(60)
        return load(*_)

    class Hanging(ledger.LedgerFile):
        def __init__(self, *given: Any) -> None:
            goes_on.wait(60)
            super().__init__(*given)

    monkeypatch.setattr(module, "READ_AGAIN_S", 0.05)
    monkeypatch.setattr(writer, "DISK_S", 0.05)
    monkeypatch.setattr(module, "LOOK_S", 0.05)
    monkeypatch.setattr(module, "DISK_S", 0.2)
    monkeypatch.setattr(module, "load_reading", hang)
    monkeypatch.setattr(ledger, "LedgerFile", Hanging)
    second = accounts(tmp_path, proxy={"overflow": (CLOUD,)})
    await second.start(dict)
    assert not goes_on.is_set()
    assert spent(second) is None
    assert not second.accounting.caps["cloud"].known
    second.accounting.record(EndedRequest(ended_at=time.time(), request_id="r", key="ann", output_tokens=40))
    await until(lambda: any("a write takes longer than 0.05 s" in text for text in second.warnings()))
    await until(lambda: "a write takes longer than 0.05 s" in caplog.text)  # said while it hangs
    goes_on.set()
    await until(lambda: spent(second) == 340)
    await until(lambda: second.accounting.caps["cloud"].known)
    await until(lambda: second.warnings() == ())
    await second.stop()


def spent_before(path: Path) -> None:
    """As a killed daemon leaves it: 300 tokens entered, 411 counted; 1 settled at the endpoint, and 3 reserved."""
    now = time.time()
    day = int(now // 86_400 * 86_400)
    month = int(dt.datetime.fromtimestamp(now, dt.UTC).replace(day=1, hour=0, minute=0, second=0).timestamp())
    sums = SpentSums()
    sums.slot("key", "ann", "tokens/month").store(month, 411)
    sums.slot("key", "bob", "tokens/month").store(month, 5)
    sums.slot("overflow", "cloud", "day").store(day, 4 * PICOS)
    with closing(LedgerFile(path, "UTC", partial(hour_begin, zone=UTC), now, [sums])) as file:
        file.write(
            [
                EndedRequest(ended_at=now, request_id="r", key="ann", prompt_tokens=300),
                EndedRequest(ended_at=now, request_id="r", overflow="cloud", picos=PICOS),
            ],
            {},
        )


def counted(found: Accounts) -> tuple[int | str | None, int]:
    found.budgets.follow({"ann": "1000-tokens/month"})
    [state] = found.budgets.states()
    return state.spent, found.accounting.caps["cloud"].settled


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "UPDATE spent SET amount = 6 WHERE name = 'bob'",
        "UPDATE hourly SET requests = -1",
        "PRAGMA user_version = 0",
        "DROP TABLE metered",
    ],
)
async def test_stored_sums_count_whatever_else_is_damaged(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "usage" / "usage.db"
    spent_before(path)
    change(path, damage)
    found = accounts(tmp_path, proxy={"overflow": (CLOUD,)}, zone="UTC")
    await found.start(dict)
    try:
        assert counted(found) == (411, 4 * PICOS)
    finally:
        await found.stop()
    again = accounts(tmp_path, proxy={"overflow": (CLOUD,)}, zone="UTC")
    await again.start(dict)
    try:
        assert counted(again) == (411, 4 * PICOS)
    finally:
        await again.stop()


async def test_stored_sums_count_while_another_process_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.05)
    path = tmp_path / "usage" / "usage.db"
    spent_before(path)
    found = accounts(tmp_path, proxy={"overflow": (CLOUD,)}, zone="UTC")
    with locked(LEDGER, path):
        await found.start(dict)
        assert counted(found) == (411, 4 * PICOS)
    assert found.ledger is not None
    assert await asyncio.to_thread(found.ledger.flush, 60)
    await found.stop()
    sums = SpentSums()
    sums.read(path)
    assert {name.name: sum_.amount for name, sum_ in sums.found.items()} == {
        "ann": 411,
        "bob": 5,
        "cloud": 4 * PICOS,
    }
