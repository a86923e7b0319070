"""Which units of an earlier daemon are adopted or stopped, with a fake systemd. See also test_spawner_contract.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.fakes import SOON_S, until

from launcher.base.address import TcpAddress
from launcher.engines.base import MARK, Launch
from launcher.instances import spawn_systemd
from launcher.instances.journal_reader import Limit, Line
from launcher.instances.spawn_systemd import SystemdSpawner
from launcher.instances.state_file import Record, digest
from launcher.instances.systemd_bus import BusError, UnitFacts
from launcher.instances.unit import Frame, mark

FRAME = Frame(
    daemon_unit="numa-launcher.service", slice="numa-launcher.slice", user=None, allowed_cpus=False,
    memory_max_bytes=None, stop_s=5.0,
)  # fmt: skip
GONE = UnitFacts("inactive", False, 0, "", 1, 0, "success", (), 0.0)


def launch(generation: int, word: str = "as planned") -> Launch:
    return Launch(("sh", word), {}, frozenset(), TcpAddress("127.0.0.1", 1))


@dataclass
class FakeSystemd:
    """Units by name. A stopped unit ends when the test says so."""

    units: dict[str, UnitFacts] = field(default_factory=dict)
    stopping: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    broken: bool = False

    async def list_units(self, _pattern: str) -> list[str]:
        return list(self.units)

    async def hold(self, unit: str) -> None:
        pass

    async def forget(self, unit: str) -> None:
        pass

    async def facts(self, unit: str) -> UnitFacts:
        return self.units.get(unit, GONE)

    async def stop(self, unit: str) -> None:
        if self.broken:
            raise BusError("unreachable", "no answer")
        self.stopping.append(unit)

    async def until(self, unit: str, reached: Callable[[UnitFacts], bool]) -> UnitFacts:
        await until(lambda: reached(self.units.get(unit, GONE)))
        return self.units.get(unit, GONE)

    async def start_transient(self, unit: str, _properties: Any) -> None:
        self.started.append(unit)
        self.units[unit] = running(FRAME.slot_of(unit) or 0, launch(2))

    async def kill(self, unit: str, *, whole: bool, signal: int) -> None:
        pass

    async def close(self) -> None:
        pass


class NoJournal:
    """No output."""

    since = 0.0

    def start(self) -> None:
        pass

    def listen(self, _unit: str, _hear: Callable[[Line], None], _limit: Limit) -> None:
        pass

    def ignore(self, _unit: str) -> None:
        pass

    async def catch_up(self, _seconds: float) -> None:
        pass

    async def close(self) -> None:
        pass


def running(slot: int, what: Launch) -> UnitFacts:
    environment = (f"{MARK}={mark(slot, 1, digest(what))}",)
    return UnitFacts("active", False, 70 + slot, "ab", 0, 0, "success", environment, 1.0)


@pytest.fixture
async def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SystemdSpawner]:
    """A spawner that finds slot 0 as planned, and slot 1 with another command than the plan's."""
    monkeypatch.setattr(spawn_systemd, "history", lambda *_: [])
    systemd = FakeSystemd()
    spawner = SystemdSpawner(
        {"PATH": "/bin:/usr/bin"}, tmp_path / "state", FRAME,
        systemd=systemd, make_follower=NoJournal,  # type: ignore[arg-type]
    )  # fmt: skip
    for slot, word in ((0, "as planned"), (1, "otherwise")):
        what = launch(1, word)
        systemd.units[FRAME.unit(slot)] = running(slot, what)
        await spawner._state.remember(
            Record(
                slot=slot, generation=1, unit=FRAME.unit(slot), digest=digest(what), port=1, invocation="ab"
            )
        )
    yield spawner
    await spawner.close(for_good=False)


def its_systemd(spawner: SystemdSpawner) -> FakeSystemd:
    assert isinstance(spawner._units.systemd, FakeSystemd)
    return spawner._units.systemd


async def test_only_the_slot_of_a_stopped_unit_waits_for_its_end(left: SystemdSpawner) -> None:
    systemd = its_systemd(left)
    async with asyncio.timeout(SOON_S):
        adopted = await left.adopt({0: launch, 1: launch})
    assert list(adopted) == [0]
    await until(lambda: systemd.stopping == [FRAME.unit(1)])

    spawning = asyncio.create_task(left.spawn(1, 2, launch(2), lambda _line: None))
    done, _ = await asyncio.wait({spawning}, timeout=0.1)
    assert not done, "its memory and cpus are not free yet"
    assert systemd.started == []
    systemd.units[FRAME.unit(1)] = replace(GONE, active="failed")
    async with asyncio.timeout(SOON_S):
        process = await spawning
    assert systemd.started == [FRAME.unit(1)]
    assert process.pid == 71
    assert left._state.records[1].generation == 2, "the record of the earlier instance was removed before"


async def test_a_cancelled_spawn_does_not_cancel_the_stop(left: SystemdSpawner) -> None:
    systemd = its_systemd(left)
    await left.adopt({0: launch, 1: launch})
    spawning = asyncio.create_task(left.spawn(1, 2, launch(2), lambda _line: None))
    await asyncio.sleep(0)
    spawning.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await spawning
    systemd.units[FRAME.unit(1)] = replace(GONE, active="failed")
    await until(lambda: 1 not in left._state.records)


async def test_a_refused_stop_is_logged(left: SystemdSpawner, caplog: pytest.LogCaptureFixture) -> None:
    systemd = its_systemd(left)
    systemd.broken = True
    assert list(await left.adopt({0: launch, 1: launch})) == [0]
    await until(lambda: any("cannot stop" in message for message in caplog.messages))
    systemd.units[FRAME.unit(1)] = replace(GONE, active="failed")
    async with asyncio.timeout(SOON_S):
        await left.spawn(1, 2, launch(2), lambda _line: None)
    assert systemd.started == [FRAME.unit(1)]
