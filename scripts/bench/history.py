"""Measures the history: CPU time of a reading, memory, size of its rows, and the cost of an answer.

usage: scripts/bench-history [--slots N] [--cpus N] [--ticks N] [--json FILE]

The daemon's own history, ledger and proxy, with planted instances and a planted /proc/stat, on a clock that jumps from step
to step: what takes two hours in the daemon takes seconds, and each reading does the same work. CPU time is that of the whole
process. Not in it: the kernel's time to print /proc/stat, which a machine with many CPUs adds (here that of this machine is
printed beside).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import uvloop
from msgspec.structs import replace

from bench.pages import machine
from launcher.accounts.ledger import Ledger
from launcher.base.address import UnixAddress
from launcher.base.cpuset import CpuSet
from launcher.base.writer import Writer
from launcher.config.schema import Proxy, Usage
from launcher.daemon.load_history import LoadHistory
from launcher.instances.progress import Observation, Progress
from launcher.instances.slot_state import SlotState, State
from launcher.machine.load import CpuBusy, read_times
from launcher.proxy.server import ProxyServer
from launcher.telemetry.engine_metrics import EngineMetrics
from launcher.telemetry.history import HOUR, QUARTER, History, Key
from launcher.telemetry.history_columns import row_of, text_of
from launcher.telemetry.load_table import LoadTable

# Between two probes of an instance (supervision.probe_interval_s).
PROBE_S: Final = 5.0
STEP_S: Final = HOUR.step_ms / 1000
# Share of a core and bytes that the history may take.
MOST_SHARE: Final = 0.003
MOST_BYTES: Final = 16_000_000


class Clock:
    """Wall and monotonic; a sleep sets it, up to `stop`."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self._stop = 0.0
        self._stopped = asyncio.Event()
        self._goes_on = asyncio.Event()

    async def reach(self, seconds: float) -> None:
        """Let it run for so long."""
        self._stop = self.now + seconds
        self._stopped.clear()
        self._goes_on.set()
        await self._stopped.wait()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self._stop:
            self._goes_on.clear()
            self._stopped.set()
        await self._goes_on.wait()


def controllers(slots: int, cpus: int, clock: Clock) -> dict[int, Any]:
    """Slots with work; their counters rise with the clock."""

    class Instance:
        @property
        def progress(self) -> Progress:
            at = clock.now // PROBE_S * PROBE_S
            counted = EngineMetrics(
                running=9, waiting=1, generated=int(at * 100), steps=int(at), kv_usage=0.5, kv_tokens=400_000,
                prefix_queries=int(at * 500), prefix_hits=int(at * 250),
            )  # fmt: skip
            return Progress(last=Observation(at, True, counted, 9, int(at)), counted=counted)

    each = cpus // slots
    return {
        number: SimpleNamespace(
            slot=SimpleNamespace(
                id=number, placement=SimpleNamespace(cpus=CpuSet(range(number * each, (number + 1) * each)))
            ),
            slot_state=SlotState(state=State.READY, generation=1),
            instance=Instance(),
        )
        for number in range(slots)
    }


def planted_stat(file: Path, cpus: int) -> Callable[[], dict[int, tuple[int, int]]]:
    """A /proc/stat of so many CPUs; each reading is of a later time."""
    line = " ".join(["123456789"] * 10)
    texts = []
    for later in (0, 200):
        lines = [f"cpu{cpu} {123456789 + later} {line}" for cpu in range(cpus)]
        texts.append("\n".join([f"cpu  {line}", *lines, "intr 1 " + "0 " * 4 * cpus, "ctxt 1"]))
    count = 0

    def read() -> dict[int, tuple[int, int]]:
        nonlocal count
        count += 1
        file.write_text(texts[count % 2])  # counted, too: about what the kernel's copy costs
        return read_times(file.read_text(encoding="ascii"))

    return read


def rss_bytes() -> int:
    """Anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


async def measure(slots: int, cpus: int, ticks: int, folder: Path) -> dict[str, Any]:
    clock = Clock()
    busy = CpuBusy(planted_stat(folder / "stat", cpus), clock)
    proxy = ProxyServer(Proxy(), models=(), on_idle=lambda *_: None, on_suspect=lambda *_: None)
    found = controllers(slots, cpus, clock)
    for slot in found:
        proxy.add_upstream(slot, 1, "model", UnixAddress(f"/nowhere/{slot}"), 64)
    load = LoadTable(lambda: int(clock.now * 1000))
    ledger = Ledger(Usage(), folder / "usage.db", mirrored=[load])
    writer = Writer("usage ledger", ledger)
    writer.start()
    await asyncio.to_thread(ledger.flush)
    gc.collect()
    before = rss_bytes()

    async def sleep(seconds: float) -> None:
        if load.waiting:  # in the daemon there is time for it until the next reading
            await asyncio.to_thread(ledger.flush)
        await clock.sleep(seconds)

    history = LoadHistory(
        load, proxy, lambda: found, busy.shares, lambda: 1.0, clock=clock, wall=clock, sleep=sleep
    )
    task = asyncio.create_task(history.run())
    await clock.reach(60)
    cpu, began = time.process_time(), clock.now
    await clock.reach(ticks * STEP_S)
    cpu = time.process_time() - cpu
    count = (clock.now - began) / STEP_S
    task.cancel()
    await asyncio.wait({task})
    gc.collect()
    after = rss_bytes()
    answers = {f"{span}, {which}": await answer(history, span, which) for span, which in ASKED}
    gc.collect()
    after_answers = rss_bytes()
    found_later = long_rows(load)
    gc.collect()
    result = {
        "slots": slots, "cpus": cpus, "readings": int(count), "cpu_ms_per_reading": cpu / count * 1000,
        "share_of_a_core": cpu / count / STEP_S, "memory_bytes": after - before,
        "after_answers_bytes": after_answers - before, "after_90_days_bytes": rss_bytes() - before,
        "file_bytes": ledger.file_bytes, "answers": answers, "proc_stat_ms": proc_stat_ms(),
    }  # fmt: skip
    await asyncio.to_thread(writer.stop, 10)
    del found_later
    return result


def long_rows(load: LoadTable) -> History:
    """As many rows of 10 minutes as are kept, of which two hours have twelve."""
    [text, *_] = load.find(QUARTER.name, 0).rows
    row, full = row_of(text), History()
    times = range(row.ms, row.ms + QUARTER.length_ms, QUARTER.step_ms)
    full.take({Key(QUARTER.name, ms): text_of(replace(row, ms=ms)) for ms in times}, times[-1])
    full.changed()
    return full


ASKED: Final = (("1h", "all"), ("1h", "none"), ("1d", "all"), ("90d", "none"))


async def answer(history: LoadHistory, span: str, slots: str) -> dict[str, float]:
    """The event loop runs other tasks between two parts of an answer; how long a part keeps them from running."""
    waits: list[float] = []

    async def watch() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            waits.append(time.thread_time() - began)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    cpu = time.process_time()
    body = await history.answer(span, 0, slots)
    watcher.cancel()
    quiet = time.process_time()
    await history.answer(span, 0, slots)
    return {
        "bytes": len(body), "cpu_ms": (time.process_time() - quiet) * 1000, "watched_cpu_ms": (quiet - cpu) * 1000,
        "longest_part_ms": max(waits) * 1000,
    }  # fmt: skip


def proc_stat_ms() -> float:
    """Of this machine's own /proc/stat."""
    cpu = time.process_time()
    for _ in range(50):
        Path("/proc/stat").read_bytes()
    return (time.process_time() - cpu) / 50 * 1000


def text(result: dict[str, Any]) -> str:
    share, memory = result["share_of_a_core"], result["after_90_days_bytes"]
    lines = [machine()]
    lines.append(
        f"{result['slots']} slots, {result['cpus']} CPUs, {result['readings']} readings, one every 2 s in the daemon"
    )
    lines.append(
        f"CPU time of a reading: {result['cpu_ms_per_reading']:.2f} ms, {share:.2%} of a core "
        f"(at most {MOST_SHARE:.1%}: {'met' if share <= MOST_SHARE else 'missed'})"
    )
    lines.append(
        f"memory: {result['memory_bytes'] / 1e6:.1f} MB, {result['after_answers_bytes'] / 1e6:.1f} MB after the answers "
        f"below, {memory / 1e6:.1f} MB with the rows of 90 days "
        f"(at most {MOST_BYTES / 1e6:.0f} MB: {'met' if memory <= MOST_BYTES else 'missed'}); "
        f"the ledger's file: {result['file_bytes'] / 1e6:.1f} MB"
    )
    for asked, of in result["answers"].items():
        lines.append(
            f"answer {asked}: {of['bytes'] / 1000:,.0f} KB, {of['cpu_ms']:.0f} ms of CPU time, "
            f"{of['longest_part_ms']:.1f} ms of the event loop at a time"
        )
    lines.append(
        f"this machine's /proc/stat ({os.cpu_count()} CPUs): {result['proc_stat_ms']:.2f} ms a reading, not counted above"
    )
    return "\n".join(lines)


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench-history", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--cpus", type=int, default=512)
    parser.add_argument(
        "--ticks", type=int, default=3600, help="readings, 2 s of the daemon's time each (default: two hours)"
    )
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = uvloop.run(measure(asked.slots, asked.cpus, asked.ticks, Path(folder)))
    sys.stdout.write(text(result) + "\n")
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0
