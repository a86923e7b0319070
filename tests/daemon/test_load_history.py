"""The daemon's history: what is read, and where it is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.config.schema import Proxy
from launcher.config.usage_schema import Telemetry
from launcher.daemon.load_history import LoadHistory
from launcher.instances.progress import Observation, Progress
from launcher.instances.slot_state import SlotState, State
from launcher.machine.oom import NodeMemory
from launcher.proxy.server import ProxyServer
from launcher.telemetry.engine_metrics import EngineMetrics
from launcher.telemetry.history_columns import HOST


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


def made(path: Path, controllers: dict[int, Any], **settings: Any) -> LoadHistory:
    proxy = ProxyServer(Proxy(), models=(), on_idle=lambda *_: None, on_suspect=lambda *_: None)
    telemetry = Telemetry(**{"history_path": str(path), **settings})
    return LoadHistory(
        telemetry, proxy, lambda: controllers, busy, lambda: 0.79,
        read_memory=lambda _: (NodeMemory(None, 5 << 30, 8 << 30),),
    )  # fmt: skip


async def first_row(history: LoadHistory) -> Any:
    while True:
        reply = json.loads(await history.answer("1h", 0, "all"))
        if reply["rows"]:
            return reply
        await asyncio.sleep(0.05)


async def test_a_row_of_a_daemon(tmp_path: Path) -> None:
    controllers = {0: controller(0, "0-1", progress=probed(10, 100)), 3: controller(3, "2-3", State.FAILED)}
    history = made(tmp_path / "h.bin", controllers)
    assert history.recorder is not None
    task = asyncio.create_task(history.recorder.run())
    try:
        async with asyncio.timeout(60):
            reply = await first_row(history)
    finally:
        task.cancel()
        await asyncio.wait({task})
        await history.close()
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
    assert (tmp_path / "h.bin").exists()
    assert history.warnings() == ()


async def test_it_can_be_off(tmp_path: Path) -> None:
    history = made(tmp_path / "h.bin", {}, history=False)
    assert history.recorder is None
    with pytest.raises(LauncherError, match="it is off") as caught:
        await history.answer("1h", 0, "all")
    assert "history = true" in caught.value.remedy
    await history.close()
    assert not (tmp_path / "h.bin").exists()


async def test_the_file_has_a_folder_of_its_own_in_the_state_folder(tmp_path: Path) -> None:
    proxy = ProxyServer(Proxy(), models=(), on_idle=lambda *_: None, on_suspect=lambda *_: None)
    environ = {"STATE_DIRECTORY": str(tmp_path)}
    history = LoadHistory(Telemetry(), proxy, dict, busy, lambda: None, environ=environ)
    assert json.loads(await history.answer("1h", 0, "all"))["rows"] == []
    assert (tmp_path / "history" / "history.bin").exists()
    await history.close()


async def test_a_file_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    history = made(tmp_path / "file" / "h.bin", {})
    await history.answer("1h", 0, "all")
    (warning,) = history.warnings()
    assert "cannot keep the history" in warning
    await history.close()
