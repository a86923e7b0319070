"""`reload` as the daemon takes it: what is refused before anything happens, and one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.deployments import CHANGED, LIMITS, PROBES, TimedProber, lame, made
from support.fakes import SOON_S, FakeProcess, FakeSpawner, until

from launcher.base.errors import BusyError, LauncherError, RefusedError
from launcher.daemon.deployment import Deployment
from launcher.daemon.reload import Reloader
from launcher.engines.base import Launch
from launcher.instances.ports import Adopted, InstanceDraining, InstanceEvent
from launcher.instances.slot_state import HoldRequested, StartRequested, State
from launcher.instances.supervisor import Supervisor


@dataclass
class Setup:
    """A running daemon's part of it; `after` is what the file says now."""

    before: Deployment
    after: Deployment
    prober: TimedProber = field(default_factory=TimedProber)
    now: Deployment | None = None
    fails: Exception | None = None
    spawner: FakeSpawner = field(default_factory=FakeSpawner)
    ready_first: bool = True

    @asynccontextmanager
    async def play(self) -> AsyncIterator[Reloader]:
        self.now = self.before
        self.supervisor = Supervisor(
            self.before.plan, engine=self.before.engine, spawner=self.spawner, prober=self.prober, limits=LIMITS,
            probing=PROBES, announce=self.hear,
        )  # fmt: skip
        self.reloader = Reloader(self.supervisor, self.prober, self.reread, self.reloaded)
        task = asyncio.create_task(self.supervisor.run())
        controllers = self.supervisor.controllers.values()
        if self.ready_first:
            await until(lambda: all(controller.slot_state.state is State.READY for controller in controllers))
        async with asyncio.timeout(SOON_S):
            yield self.reloader
        await self.reloader.end()
        await self.supervisor.stop()
        task.cancel()
        await asyncio.wait({task})

    def hear(self, event: InstanceEvent) -> None:
        if isinstance(event, InstanceDraining):
            asyncio.get_running_loop().call_soon(self.supervisor.went_idle, event.slot, event.generation)

    def reread(self, overrides: Any) -> Deployment:
        if self.fails is not None:
            raise self.fails
        return self.after

    def reloaded(self, deployment: Deployment) -> None:
        self.now = deployment

    async def ask(self, *, dry_run: bool = False, force: bool = False) -> dict[str, Any]:
        return await self.reloader.reload(self.before, (), dry_run=dry_run, force=force)

    async def over(self) -> str:
        await until(lambda: self.reloader._rolling is None)
        return str(self.reloader.show()["stage"])


async def test_it_goes_there_and_is_the_configuration_then() -> None:
    setup = Setup(made(), made(engine=CHANGED))
    async with setup.play() as reloader:
        assert reloader.show() == {"stage": "none"}
        assert (await setup.ask(dry_run=True))["stage"] == "dry run"
        assert reloader.target is None
        begun = await setup.ask()
        assert begun["stage"] == "running"
        assert reloader.target is setup.after
        with pytest.raises(RefusedError, match="another reload is running"):
            await setup.ask()
        assert await setup.over() == "done"
        assert setup.now is setup.after
        assert all(
            controller.engine is setup.after.engine for controller in setup.supervisor.controllers.values()
        )


async def test_after_a_stuck_rollout_a_reload_of_the_old_file_restores_the_slot_that_was_left() -> None:
    once = {"crash_limit": 1}
    setup = Setup(made(supervision=once), made(supervision=once, engine=CHANGED))
    async with setup.play() as reloader:
        lame(setup.spawner, 1)
        await setup.ask()
        assert await setup.over() == "stuck"
        kept = setup.supervisor.controllers[0]
        assert kept.slot_state.state is State.READY
        assert reloader.target is setup.after
        assert kept.engine is setup.after.engine, "also when it exits and starts again"
        setup.spawner.spawn = FakeSpawner.spawn.__get__(setup.spawner)  # type: ignore[method-assign]
        setup.supervisor.post(1, StartRequested())
        await until(lambda: setup.supervisor.controllers[1].slot_state.state is State.READY)
        setup.after = made(supervision=once)
        assert [change.slot for change in (await setup.ask(dry_run=True))["changes"].steps] == [0]
        await setup.ask()
        assert await setup.over() == "done"
        launch = kept.instance.launch
        assert launch is not None
        assert "--changed" not in launch.argv


async def test_a_slot_that_goes_and_one_that_would_restart_after_it_is_refused_beforehand() -> None:
    setup = Setup(made(), made(layout={"instances_per_socket": 1}))
    async with setup.play() as reloader:
        with pytest.raises(
            RefusedError, match="cannot reload slot '0': 0 instances of 'm' would be left ready"
        ):
            await setup.ask()
        assert reloader.show() == {"stage": "none"}
        assert [controller.slot_state.generation for controller in setup.supervisor.controllers.values()] == [
            1,
            1,
        ]
        await setup.ask(force=True)
        assert await setup.over() == "done"
        assert sorted(setup.supervisor.controllers) == [0]


async def test_more_slots_need_no_spare_one_where_there_was_only_one() -> None:
    setup = Setup(made(layout={"instances_per_socket": 1}), made())
    async with setup.play():
        await setup.ask()
        assert await setup.over() == "done"
        assert sorted(setup.supervisor.controllers) == [0, 1]


async def test_one_that_is_held_is_no_spare_one() -> None:
    setup = Setup(made(), made(engine=CHANGED))
    async with setup.play():
        setup.supervisor.controllers[1].post(HoldRequested())
        await until(lambda: setup.supervisor.controllers[1].slot_state.state is State.HELD)
        with pytest.raises(RefusedError, match="would be left ready"):
            await setup.ask()
        await setup.ask(force=True)
        assert await setup.over() == "done"


async def test_a_file_that_cannot_be_used_changes_nothing() -> None:
    setup = Setup(made(), made(), fails=LauncherError("cannot use it: why", "mend it"))
    async with setup.play() as reloader:
        with pytest.raises(LauncherError, match="cannot use it"):
            await setup.ask()
        setup.fails, setup.after = None, made(systemd={"memory_max": "4GiB"})
        with pytest.raises(RefusedError, match=r"only a restart of the daemon applies systemd\.memory_max"):
            await setup.ask()
        assert reloader.show() == {"stage": "none"}


async def test_a_daemon_without_a_file_has_nothing_to_read_again() -> None:
    setup = Setup(made(), made())
    async with setup.play() as reloader:
        reloader._reread = None
        with pytest.raises(RefusedError, match="started without a file") as caught:
            await setup.ask()
        assert caught.value.remedy == "start it with serve -c FILE"


async def test_an_unexpected_error_is_reported_and_ends_the_rollout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = Setup(made(), made(engine=CHANGED))
    async with setup.play() as reloader:

        async def broken(*_: Any) -> bool:
            raise ZeroDivisionError

        monkeypatch.setattr(setup.prober, "canary", broken)
        await setup.ask()
        assert await setup.over() == "stuck"
        assert "ZeroDivisionError" in reloader.show()["error"]
        assert setup.now is setup.before


async def test_one_that_still_compares_when_the_daemon_ends_changes_nothing() -> None:
    setup = Setup(made(), made(engine=CHANGED))
    reading, ended = threading.Event(), threading.Event()

    def slow(_overrides: Any) -> Deployment:
        reading.set()
        assert ended.wait(SOON_S)
        return setup.after

    async with setup.play() as reloader:
        reloader._reread = slow
        asked = asyncio.create_task(setup.ask())
        await until(reading.is_set)
        await reloader.end()
        ended.set()
        with pytest.raises(RefusedError, match="the daemon is stopping"):
            await asked
        assert reloader.show() == {"stage": "none"}


@dataclass
class SlowSpawner(FakeSpawner):
    """systemd takes its time to say what an earlier daemon left: life 7 of each slot."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def adopt(self, slots: Mapping[int, Callable[[int], Launch]]) -> Mapping[int, Adopted]:
        await self.asked.wait()
        for slot in slots:
            self.started.append(FakeProcess(2000 + slot, slot, 7, print))
        return {
            process.slot: Adopted(7, slots[process.slot](7), process, lambda _tell: None)
            for process in self.started
        }


async def test_a_reload_waits_until_what_an_earlier_daemon_left_is_taken_over() -> None:
    spawner = SlowSpawner()
    setup = Setup(made(), made(engine=CHANGED), spawner=spawner, ready_first=False)
    async with setup.play():
        asked = asyncio.create_task(setup.ask(force=True))
        await asyncio.sleep(0.05)
        assert not asked.done()
        spawner.asked.set()
        await asked
        assert await setup.over() == "done"
        assert [controller.slot_state.generation for controller in setup.supervisor.controllers.values()] == [
            8,
            8,
        ]
        assert all(
            controller.engine is setup.after.engine for controller in setup.supervisor.controllers.values()
        )


async def test_a_reload_is_refused_while_an_adoption_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.daemon.reload.ADOPTION_S", 0.01)
    spawner = SlowSpawner()
    setup = Setup(made(), made(engine=CHANGED), spawner=spawner, ready_first=False)
    async with setup.play() as reloader:
        with pytest.raises(BusyError, match="still being adopted"):
            await setup.ask()
        assert reloader.show() == {"stage": "none"}
        spawner.asked.set()
        controllers = setup.supervisor.controllers.values()
        await until(lambda: all(controller.slot_state.state is State.READY for controller in controllers))
