"""Reports of the daemon's own ledger: what finds damage tells the writer."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from support.fakes import SOON_S, until
from support.written import written

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger import Ledger
from launcher.accounts.report_values import Question
from launcher.base.errors import LauncherError
from launcher.config.schema import Usage
from launcher.daemon.usage_reports import UsageReports


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.daemon.usage_reports.TODAY_S", 60.0)


@asynccontextmanager
async def served(path: Path) -> AsyncIterator[tuple[UsageReports, Ledger]]:
    with written(Ledger(Usage(), path), by_flush=True) as ledger:
        ledger.put(EndedRequest(time.time(), "r", "ann"))
        yield UsageReports(ledger, "USD"), ledger


async def test_today_and_a_report(tmp_path: Path) -> None:
    async with served(tmp_path / "usage.db") as (reports, _):
        assert (await reports.report(Question(since="2h"))).total.requests == 1
        today = await reports.today()
    assert today is not None


@pytest.mark.parametrize("by", ["today", "report"])
async def test_damage_is_moved_aside(tmp_path: Path, by: str) -> None:
    """The writer itself reads no sums of earlier hours, and no definitions again."""
    path = tmp_path / "usage.db"
    async with served(path) as (reports, ledger):
        assert await asyncio.to_thread(ledger.flush)
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            file.execute("DROP TABLE metered")
        if by == "today":
            assert await reports.today() is None
        else:
            with pytest.raises(LauncherError, match="cannot read the usage ledger"):
                await reports.report(Question(since="2h"))
        await asyncio.to_thread(ledger.flush)
        assert await asyncio.to_thread(ledger.flush)
        assert ledger.moved_to is not None


async def test_a_disk_that_hangs_takes_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where those who asked have left."""
    begun: list[None] = []
    goes_on = threading.Event()

    def hang(_: object) -> None:
        begun.append(None)
        goes_on.wait(SOON_S)

    async with served(tmp_path / "usage.db") as (reports, ledger):
        with monkeypatch.context() as hung:
            hung.setattr(ledger, "flush", hang)
            asked = [asyncio.create_task(reports.report(Question(since="2h"))) for _ in range(3)]
            await until(lambda: begun)
            for each in asked:
                each.cancel()
            await asyncio.wait(asked)
            late = asyncio.create_task(reports.report(Question(since="2h")))
            await asyncio.sleep(0.05)  # for what should not happen to happen
            assert len(begun) == 1
        goes_on.set()
        assert (await late).total.requests == 1


async def test_no_ledger() -> None:
    reports = UsageReports(None, "USD")
    assert await reports.today() is None
    with pytest.raises(LauncherError, match="the daemon keeps no usage ledger"):
        await reports.report(Question(since="2h"))
