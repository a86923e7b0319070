"""Records every 2 s, and answers."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.base.background import persist
from launcher.telemetry import recorder as module
from launcher.telemetry.history_file import FILE_BYTES, HEADER_BYTES, HistoryFile
from launcher.telemetry.recorder import Recorder, Sample

# Clocks run so much faster.
SPEED = 400


class Source:
    """The daemon and the machine."""

    def __init__(self) -> None:
        self.sampled = 0
        self.error: Exception | None = None

    async def sample(self) -> Sample:
        if self.error is not None:
            raise self.error
        self.sampled += 1
        now = clock()
        return Sample(
            at=now, totals={"requests_per_s": now}, gauges={"queued": self.sampled}, spent=None,
            first_tokens=(), busy={}, slots=(),
        )  # fmt: skip


_BEGAN = time.monotonic()


def clock() -> float:
    return 1_800_000_000 + (time.monotonic() - _BEGAN) * SPEED


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds / SPEED)


@asynccontextmanager
async def running(path: Path | None, source: Source | None = None) -> AsyncIterator[Recorder]:
    source = source or Source()
    recorder = Recorder(path, source.sample, clock=clock, sleep=sleep)
    task = asyncio.create_task(persist(recorder.run, recorder.failures))
    try:
        yield recorder
    finally:
        task.cancel()
        await asyncio.wait({task})
        await recorder.close()


async def rows(recorder: Recorder) -> list[Any]:
    return list(json.loads(await recorder.answer("1h", 0, "none"))["rows"])


async def eventually(check: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while True:
            found = check()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)


async def test_a_row_for_every_step(tmp_path: Path) -> None:
    async with running(tmp_path / "h.bin") as recorder:
        await eventually(lambda: enough(recorder, 5))
        found = await rows(recorder)
        assert all(line[0] % 2000 == 0 for line in found)
        assert len({line[0] for line in found}) == len(found)
        assert [line[1] for line in found] == pytest.approx([1.0] * len(found), rel=0.05)
        assert recorder.problem == ""


async def enough(recorder: Recorder, count: int) -> bool:
    return len(await rows(recorder)) >= count


async def test_the_next_process_has_what_the_last_one_recorded(tmp_path: Path) -> None:
    async with running(tmp_path / "h.bin") as recorder:
        await eventually(lambda: enough(recorder, 3))
        before = await rows(recorder)
    async with running(tmp_path / "h.bin") as recorder:
        assert (await rows(recorder))[: len(before)] == before


async def test_a_file_that_cannot_be_used_is_said_once_and_taken_when_it_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    caplog.set_level(logging.INFO, "launcher.history")
    other = HistoryFile(tmp_path / "h.bin")
    async with running(tmp_path / "h.bin") as recorder:
        await eventually(lambda: enough(recorder, 5))
        assert "another daemon uses it" in recorder.problem
        assert sum("another daemon" in line for line in caplog.messages) == 1
        other.close()
        await eventually(lambda: not recorder.problem)
        assert len(await rows(recorder)) >= 5  # also those that were in memory
        assert "is written" in caplog.messages[-1]
    with_rows = HistoryFile(tmp_path / "h.bin")
    assert any(with_rows.read(HEADER_BYTES, FILE_BYTES))
    with_rows.close()


async def test_a_file_that_somebody_removes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    path = tmp_path / "h.bin"
    async with running(path) as recorder:
        await eventually(lambda: enough(recorder, 3))
        before = await rows(recorder)
        path.unlink()
        await eventually(path.exists)
        assert (await rows(recorder))[: len(before)] == before
        assert "was removed" in "".join(caplog.messages)


async def test_a_broken_file_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "h.bin").write_bytes(b"something else")
    async with running(tmp_path / "h.bin") as recorder:
        await eventually(lambda: enough(recorder, 2))
        assert recorder.problem == ""
    (line,) = caplog.messages
    assert "moved to" in line
    assert len(os.listdir(tmp_path)) == 2  # noqa: PTH208


async def test_without_a_path_the_history_is_in_memory() -> None:
    async with running(None) as recorder:
        await eventually(lambda: enough(recorder, 2))


async def test_a_failed_reading_is_a_gap_and_the_next_one_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.base.background.RETRY_S", 0.01)
    source = Source()
    async with running(tmp_path / "h.bin", source) as recorder:
        await eventually(lambda: enough(recorder, 2))
        source.error = OSError("no such file")
        await eventually(lambda: recorder.failures.count >= 3)
        assert recorder.warnings == ("the history is not recorded: no such file",)
        source.error = None
        before = len(await rows(recorder))
        await eventually(lambda: enough(recorder, before + 2))
        assert recorder.warnings == ()
    assert sum("no such file" in line for line in caplog.messages) == 1


async def test_a_file_that_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_file: HistoryFile, _offset: int, _size: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(HistoryFile, "read", broken)
    async with running(tmp_path / "h.bin") as recorder:
        await eventually(lambda: enough(recorder, 2))
        assert "input/output error" in recorder.warnings[0]
    assert sum("input/output error" in line for line in caplog.messages) == 1


async def test_a_clock_that_is_set_back_does_not_stop_it() -> None:
    offset = 0.0
    source = Source()
    recorder = Recorder(None, source.sample, clock=lambda: clock() + offset, sleep=sleep)
    task = asyncio.create_task(recorder.run())
    await eventually(lambda: enough(recorder, 3))
    newest = (await rows(recorder))[-1][0]
    offset = -7200.0
    await eventually(lambda: enough_before(recorder, newest))
    task.cancel()
    await asyncio.wait({task})
    await recorder.close()


async def enough_before(recorder: Recorder, newest: int) -> bool:
    found = await rows(recorder)
    return len(found) >= 2 and found[-1][0] < newest - 3_600_000


async def test_a_sleep_that_ends_early_is_no_second_reading_of_a_step() -> None:
    now, slept = 1_800_000_000.3, []

    async def early(seconds: float) -> None:
        nonlocal now
        slept.append(round(seconds, 3))
        now += seconds - 0.001
        await asyncio.sleep(0)

    source = Source()
    recorder = Recorder(None, source.sample, clock=lambda: now, sleep=early)
    task = asyncio.create_task(recorder.run())
    await eventually(lambda: len(slept) > 4)
    task.cancel()
    await asyncio.wait({task})
    await recorder.close()
    assert slept[:4] == [1.7, 2.001, 2.001, 2.001]
