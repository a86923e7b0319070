"""The daemon's history: what is read, when, and answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from support.fakes import SOON_S, until

from launcher.base.background import persist
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.config.schema import Proxy
from launcher.daemon.load_history import LoadHistory
from launcher.instances.progress import Observation, Progress
from launcher.instances.slot_state import SlotState, State
from launcher.machine.oom import NodeMemory
from launcher.proxy.server import ProxyServer
from launcher.telemetry.engine_metrics import EngineMetrics
from launcher.telemetry.history_columns import HOST
from launcher.telemetry.load_table import LoadTable

# Wall clocks run so much faster.
SPEED = 400
_BEGAN = time.monotonic()


def wall() -> float:
    return 1_800_000_000 + (time.monotonic() - _BEGAN) * SPEED


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds / SPEED)


def controller(slot: int, cpus: str, state: State = State.READY, progress: Progress | None = None) -> Any:
    return SimpleNamespace(
        slot=SimpleNamespace(id=slot, placement=SimpleNamespace(cpus=CpuSet.parse(cpus))),
        slot_state=SlotState(state=state, generation=1),
        instance=SimpleNamespace(progress=progress or Progress()),
    )


def probed(at: float, generated: int) -> Progress:
    counters = EngineMetrics(
        running=1, waiting=0, generated=generated, steps=1, kv_usage=0.25, kv_tokens=1000
    )
    return Progress(last=Observation(at, True, counters, 1, 1), counted=counters)


async def busy() -> Mapping[int, float]:
    return {0: 1.0, 1: 0.5, 2: 0.0, 3: 0.0}


def memory(_: Iterable[int]) -> tuple[NodeMemory, ...]:
    return (NodeMemory(None, 5 << 30, 8 << 30),)


def made(
    controllers: dict[int, Any],
    wall: Callable[[], float] = wall,
    sleep: Callable[[float], Awaitable[None]] = sleep,
    read_memory: Callable[[Iterable[int]], tuple[NodeMemory, ...]] = memory,
) -> LoadHistory:
    proxy = ProxyServer(Proxy(), models=(), on_idle=lambda *_: None, on_suspect=lambda *_: None)
    return LoadHistory(
        LoadTable(lambda: int(wall() * 1000)), proxy, lambda: controllers, busy, lambda: 0.79,
        read_memory=read_memory, clock=wall, wall=wall, sleep=sleep,
    )  # fmt: skip


@asynccontextmanager
async def running(history: LoadHistory) -> AsyncIterator[LoadHistory]:
    task = asyncio.create_task(persist(history.run, history.failures))
    try:
        yield history
    finally:
        task.cancel()
        await asyncio.wait({task})


async def rows(history: LoadHistory) -> list[Any]:
    return list(json.loads(await history.answer("1h", 0, "none"))["rows"])


async def until_rows(history: LoadHistory, fit: Callable[[list[Any]], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not fit(await rows(history)):  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.01)


async def until_more(history: LoadHistory, count: int) -> None:
    await until_rows(history, lambda found: len(found) >= count)


async def test_a_row_of_a_daemon() -> None:
    controllers = {0: controller(0, "0-1", progress=probed(10, 100)), 3: controller(3, "2-3", State.FAILED)}
    async with running(made(controllers)) as history:
        await until_more(history, 1)
        reply = json.loads(await history.answer("1h", 0, "all"))
        assert history.warnings() == ()
    row = dict(zip(reply["columns"], reply["rows"][0][1:], strict=True))
    assert {name: row[name] for name in HOST if row[name] is not None} == {
        **dict.fromkeys(("requests_per_s", "failed_per_s", "prompt_tokens_per_s", "output_tokens_per_s"), 0),
        **dict.fromkeys(("queued", "oldest_queued_s", "in_flight", "overflow_per_s", "queue_rejected_per_s"), 0),
        "ready": 1, "kv_usage": 0.25, "cpu_busy": 0.375, "memory_free_bytes": 5368700000.0, "cost_per_hour": 0.79,
    }  # fmt: skip
    assert [row[f"slot.0.{name}"] for name in ("in_flight", "kv_usage", "cpu_busy", "state")] == [
        0,
        0.25,
        0.75,
        "ready",
    ]
    assert [row[f"slot.3.{name}"] for name in ("in_flight", "kv_usage", "cpu_busy", "state")] == [
        0,
        None,
        0,
        "failed",
    ]


async def test_a_row_for_every_step() -> None:
    async with running(made({})) as history:
        await until_more(history, 5)
        found = await rows(history)
    assert all(line[0] % 2000 == 0 for line in found)
    assert len({line[0] for line in found}) == len(found)


async def test_a_failed_reading_is_a_gap_and_the_next_one_is_recorded(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.base.background.RETRY_S", 0.01)
    troubles: list[OSError] = []

    def troubled(nodes: Iterable[int]) -> tuple[NodeMemory, ...]:
        if troubles:
            raise troubles[0]
        return memory(nodes)

    async with running(made({}, read_memory=troubled)) as history:
        await until_more(history, 2)
        troubles.append(OSError("no such file"))
        await until(lambda: history.failures.count >= 3)
        assert history.warnings() == ("the history is not recorded: no such file",)
        troubles.clear()
        before = len(await rows(history))
        await until_more(history, before + 2)
        assert history.warnings() == ()
    assert sum("no such file" in line for line in caplog.messages) == 1


async def test_a_clock_that_is_set_back_does_not_stop_it() -> None:
    offset = 0.0

    async with running(made({}, lambda: wall() + offset)) as history:
        await until_more(history, 3)
        newest = (await rows(history))[-1][0]
        offset = -7200.0
        await until_rows(history, lambda found: len(found) >= 2 and found[-1][0] < newest - 3_600_000)


async def test_a_sleep_that_ends_early_is_no_second_reading_of_a_step() -> None:
    now, slept = 1_800_000_000.3, []

    async def early(seconds: float) -> None:
        nonlocal now
        slept.append(round(seconds, 3))
        now += seconds - 0.001
        await asyncio.sleep(0)

    async with running(made({}, lambda: now, early)):
        await until(lambda: len(slept) > 4)
    assert slept[:4] == [1.7, 2.001, 2.001, 2.001]


async def test_it_can_be_off() -> None:
    proxy = ProxyServer(Proxy(), models=(), on_idle=lambda *_: None, on_suspect=lambda *_: None)
    history = LoadHistory(None, proxy, dict, busy, lambda: None)
    await history.run()
    with pytest.raises(LauncherError, match="it is off") as caught:
        await history.answer("1h", 0, "all")
    assert "history = true" in caught.value.remedy
