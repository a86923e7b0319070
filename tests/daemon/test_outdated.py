"""Whether a running instance is what its slot would start now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from support.fakes import FakeEngine, a_slot
from support.slots import Setup

from launcher.base.errors import LauncherError, PassingError
from launcher.daemon.outdated import OutdatedWatch
from launcher.engines.base import Launch
from launcher.instances.slot_state import StartRequested, State
from launcher.models.identity import ModelFiles
from launcher.plan.plan import Slot

V1, V2 = ModelFiles("/models/v1", "d1"), ModelFiles("/models/v2", "d2")


@dataclass
class Path:
    """What the model's path names."""

    now: ModelFiles | LauncherError = V1

    async def __call__(self, _path: str) -> ModelFiles:
        if isinstance(self.now, LauncherError):
            raise self.now
        return self.now


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[tuple[Setup, OutdatedWatch]]:
    setup = Setup(slot=replace(a_slot(), files=V1), identify=path)
    task = asyncio.create_task(setup.build().run(), name="controller")
    await setup.post(StartRequested())
    await setup.reach(State.READY, 1)
    yield setup, OutdatedWatch({0: setup.controller}, path)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_path_that_names_other_files_now(caplog: pytest.LogCaptureFixture) -> None:
    path = Path()
    async with running(path) as (setup, watch):
        await watch.check()
        assert watch.why(0, 1) is None
        path.now = V2
        with caplog.at_level(logging.WARNING, "launcher.daemon"):
            await watch.check()
            await watch.check()
        why = "runs other files than '/m' names now: started from /models/v1 (d1), now /models/v2 (d2)"
        assert watch.why(0, 1) == why
        assert [record.getMessage() for record in caplog.records] == [f"slot 0 {why}"], "once"
        setup.spawner.started[0].end(code=1)
        await setup.reach(State.READY, 2)
        assert watch.why(0, 2) is None
        await watch.check()
        assert watch.why(0, 2) is None


async def test_files_replaced_in_their_place() -> None:
    path = Path()
    async with running(path) as (_, watch):
        path.now = replace(V1, digest="other")
        await watch.check()
        assert watch.why(0, 1) == "runs files of '/models/v1' that have been changed since it started"


async def test_files_that_cannot_be_read_now_are_unknown() -> None:
    path = Path()
    async with running(path) as (_, watch):
        path.now = PassingError("away", "")
        await watch.check()
        assert watch.why(0, 1) is None


class OtherEngine(FakeEngine):
    def launch(self, slot: Slot, generation: int) -> Launch:
        return replace(super().launch(slot, generation), argv=("engine", "--more"))


async def test_a_configuration_that_waits_for_the_next_start() -> None:
    async with running(Path()) as (setup, watch):
        setup.controller.reconfigure(setup.slot, OtherEngine(), setup.limits, setup.probing)
        await watch.check()
        assert watch.why(0, 1) == "runs an earlier configuration: the one in force applies at its next start"
