"""SIGKILL at any moment: the file stays readable, and no row that was written is lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from launcher.telemetry.history import History
from launcher.telemetry.history_columns import KEPT, thin
from launcher.telemetry.history_file import HistoryFile

# The clock of the process runs a hundred times faster: a row every 20 ms, a minute of 0.6 s.
CHILD = """
import asyncio, sys, time
from pathlib import Path
from launcher.telemetry.recorder import Recorder
from launcher.telemetry.recorder import Sample, SlotSample

begin, count, began = float(sys.argv[2]), 0, time.monotonic()

def clock():
    return begin + (time.monotonic() - began) * 100

async def sample():
    global count
    count += 1
    slots = tuple(SlotSample(slot, "ready", 3, 0.5, None, (0,), None) for slot in range(32))
    return Sample(
        at=clock(), totals={}, gauges={"queued": count}, spent=None, first_tokens=(0.5,), busy={0: 0.5}, slots=slots
    )

async def sleep(seconds):
    # What was read before is written now.
    print(count, round(clock() * 1000), flush=True)
    await asyncio.sleep(seconds / 100)

asyncio.run(Recorder(Path(sys.argv[1]), sample, clock=clock, sleep=sleep).run())
"""
NOON = 1_800_000_000
QUEUED = list(KEPT).index("queued")


def killed(path: Path, begin: float, chance: random.Random) -> tuple[int, float]:
    """Runs until a random moment; the number of the last row that the process knew to be written, and the time then."""
    command = [sys.executable, "-c", CHILD, str(path), str(begin)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(chance.randrange(3, 6)):
            process.stdout.readline()
        time.sleep(chance.random() * 0.1)
        process.kill()
        whole = [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        process.wait()
    if not whole:
        return 0, begin + 60
    count, now = whole[-1].split()
    return int(count), int(now) / 1000


def rows_of(path: Path, now: float) -> Iterator[tuple[int, float | None]]:
    with closing(HistoryFile(path)) as file:
        assert file.moved_to is None
        history = History(file, int(now * 1000))
        hour = {row.ms: row for row in history.every("1h")}
        minutes = {row.ms: row for row in history.every("1d")}
        for end, minute in minutes.items():
            if end <= max(hour) - 3_480_000:
                continue  # its rows are being overwritten
            mine = [row for ms, row in sorted(hour.items()) if end - 60_000 < ms <= end]
            assert minute.host == pytest.approx(thin(mine, end).host)
        yield from ((ms, row.host[QUEUED]) for ms, row in sorted(hour.items()))


def run(path: Path, kills: int, seed: int) -> None:
    chance, now = random.Random(seed), float(NOON)  # noqa: S311 - seeded
    for _ in range(kills):
        begin = now + 20  # nothing was recorded meanwhile
        known, now = killed(path, begin, chance)
        # The first reading makes no row, a late reading makes several.
        found = {number for ms, number in rows_of(path, now + 120) if ms > begin * 1000}
        assert found >= set(range(2, known + 1)), (seed, known, sorted(found, key=str))


def test_kills_at_random_moments(tmp_path: Path) -> None:
    run(tmp_path / "history.bin", 3, int.from_bytes(os.urandom(4)))


@pytest.mark.release
def test_many_kills_at_random_moments(tmp_path: Path) -> None:
    run(tmp_path / "history.bin", 150, int.from_bytes(os.urandom(4)))
