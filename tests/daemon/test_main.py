"""The composition root between fakes: how it wires, how it fails, how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.deployments import made
from support.fakes import SOON_S, FakeSpawner, until

from launcher.base import processes
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, PassingError
from launcher.daemon import main, process
from launcher.daemon.deployment import Deployment
from launcher.daemon.main import Daemon


@dataclass
class Spawner(FakeSpawner):
    """A fake whose daemon is stopped as `going_on` says, one answer after the other."""

    going_on: list[bool] = field(default_factory=lambda: [False])
    allowed: CpuSet = field(default_factory=CpuSet)
    """What the daemon says of the machine."""
    broken: LauncherError | None = None

    async def keeps_instances(self) -> bool:
        return self.going_on.pop(0)

    async def adopt(self, slots: Any) -> Any:
        if self.broken is not None:
            raise self.broken
        return await super().adopt(slots)


@dataclass
class Setup:
    """A daemon that has a fake spawner."""

    spawner: Spawner
    build: Callable[[Deployment], Daemon]


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setattr(process, "settle", lambda: None)  # it is for a process's whole life
    spawner = Spawner()

    def choose(_config: Any, _environ: Any, allowed: CpuSet, *_more: Any) -> Spawner:
        spawner.allowed = allowed
        return spawner

    monkeypatch.setattr(main, "choose_spawner", choose)
    return Setup(spawner, Daemon)


def at(folder: Path) -> Deployment:
    return made(
        proxy={"listen": ["127.0.0.1:0"]}, control={"socket": str(folder / "c.sock")},
        supervision={"drain_timeout_s": 1.0},
    )  # fmt: skip


async def test_an_error_for_a_person_arrives_as_one(setup: Setup, tmp_path: Path) -> None:
    """Not as a group with a traceback, though it ends tasks of a group."""
    setup.spawner.broken = LauncherError("cannot use systemd: no bus", "see `systemctl status dbus`")
    with pytest.raises(LauncherError, match="cannot use systemd: no bus"):
        async with asyncio.timeout(SOON_S):
            await setup.build(at(tmp_path)).run()


async def test_a_defect_stays_one(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    daemon = setup.build(at(tmp_path))
    monkeypatch.setattr(daemon.supervisor, "run", fails)
    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.timeout(SOON_S):
            await daemon.run()
    assert caught.group_contains(ZeroDivisionError)


async def test_a_report_that_fails_is_tried_again(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.base.background.RETRY_S", 0.0)
    tries = []

    def fails(_text: str) -> None:
        tries.append(1)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(process, "status", fails)
    running = asyncio.create_task(setup.build(at(tmp_path)).run())
    try:
        await until(lambda: len(tries) > 2)
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.wait({running})


@dataclass
class HeldReread:
    """The file as it is read again: each reading waits until it may end."""

    deployment: Deployment
    read: int = 0
    may_end: threading.Event = field(default_factory=threading.Event)

    def __call__(self, _overrides: Any) -> Deployment:
        self.read += 1
        assert self.may_end.wait(SOON_S)
        return self.deployment


@pytest.mark.usefixtures("setup")
async def test_signals_during_a_reload_are_one_more_after_it(tmp_path: Path) -> None:
    reread = HeldReread(at(tmp_path))
    daemon = Daemon(reread.deployment, reread)
    running = asyncio.create_task(daemon.run())
    try:
        await until((tmp_path / "c.sock").exists)
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: reread.read == 1)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
        reread.may_end.set()
        await until(lambda: reread.read == 2)
        await until(lambda: daemon.operations.reloading()["stage"] == "done" and not daemon._hangup.is_set())
        assert reread.read == 2, "the others are in it"
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.usefixtures("setup")
async def test_a_signal_that_came_before_the_event_loop_is_obeyed(tmp_path: Path) -> None:
    reread = HeldReread(at(tmp_path))
    reread.may_end.set()
    daemon = Daemon(reread.deployment, reread, hung_up=lambda: True)
    running = asyncio.create_task(daemon.run())
    try:
        await until(lambda: daemon.operations.reloading()["stage"] == "done")
        assert reread.read == 1
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.usefixtures("setup")
async def test_a_reload_by_signal_that_meets_a_passing_condition_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(main, "RELOAD_AGAIN_S", 0.001)
    reads = 0

    def reread(_overrides: Any) -> Deployment:
        nonlocal reads
        reads += 1
        if reads < 4:
            raise PassingError("cannot read model '/m': no such directory", "mount it")
        return at(tmp_path)

    daemon = Daemon(at(tmp_path), reread, hung_up=lambda: True)
    running = asyncio.create_task(daemon.run())
    try:
        await until(lambda: daemon.operations.reloading()["stage"] == "done")
        assert reads == 4
        told = [record for record in caplog.records if "no such directory" in record.getMessage()]
        assert len(told) == 1, "the same reason is logged once"
    finally:
        running.cancel()
        await asyncio.wait({running})


async def ends(setup: Setup, folder: Path, *going_on: bool) -> list[str]:
    """What has been done when systemd answers so, each time that it is asked whether the instances go on."""
    setup.spawner.going_on = list(going_on)
    one, done = setup.build(at(folder)), []

    async def door_stops(_grace: float) -> None:
        done.append(f"proxy, {len(setup.spawner.going_on)} answers left")

    async def slots_stop() -> None:
        done.append("slots")

    one.proxy.stop = door_stops  # type: ignore[method-assign]
    one.supervisor.stop = slots_stop  # type: ignore[method-assign]
    async with asyncio.timeout(SOON_S):
        await one._shut_down()
    return [*done, "for good" if one._for_good else "to come again"]


async def test_a_restart_leaves_the_instances(setup: Setup, tmp_path: Path) -> None:
    assert await ends(setup, tmp_path, True, True) == ["proxy, 1 answers left", "to come again"]


async def test_a_stop_takes_them_and_is_final(setup: Setup, tmp_path: Path) -> None:
    assert await ends(setup, tmp_path, False) == ["proxy, 0 answers left", "slots", "for good"]


async def test_a_stop_during_the_drain_of_a_restart_takes_them_too(setup: Setup, tmp_path: Path) -> None:
    assert await ends(setup, tmp_path, True, False) == ["proxy, 1 answers left", "slots", "for good"]


async def test_cpus_that_may_come_online_are_the_instances_too(setup: Setup, tmp_path: Path) -> None:
    """A reload may plan with them; numactl refuses what a start was not given."""
    deployment = at(tmp_path)
    topology = replace(deployment.topology, offline=CpuSet.parse("900-901"))
    setup.build(replace(deployment, topology=topology))
    assert setup.spawner.allowed == deployment.topology.allowed | CpuSet.parse("900-901")


async def test_clients_leave_descriptors_to_the_instances(
    setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "limit_now", lambda: 1026)
    deployment = at(tmp_path)
    assert deployment.connections == sum(slot.model.max_num_seqs for slot in deployment.plan.slots)
    proxy = setup.build(deployment).proxy
    assert proxy._clients._most == max(513 - deployment.connections, 256)
