"""Runs a load generator for one point: pinned, watched, and ended with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import psutil
from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, reason
from launcher.base.processes import dies_with_parent
from launcher.measure.bench.load_generator import Command, DriverError, Job, Phase, VllmDriver
from launcher.measure.bench.result import ClientCost

POLL_S: Final = 0.1
# Between two looks at the endpoint's metrics.
OBSERVE_S: Final = 2.0
# Between two looks at its processes' CPU times.
USAGE_S: Final = 1.0
# Without a completed request for so long the point is given up.
NO_PROGRESS_S: Final = 1800.0
# A single-threaded client that runs or waits for a cpu so much of the time queues its own work, and that queue is no longer
# small against what it measures. On a shared core its CPU time alone can't reach this.
LIMITED_SHARE: Final = 0.8
# A client that waits for a cpu so long stamps its measurements late, however little it computes.
LIMITED_WAIT: Final = 0.3


class CpuTimes(Struct, frozen=True):
    """Of one process, in seconds since it started."""

    used: float
    waited: float
    """Runnable, but not running: the kernel's run_delay."""


Usage = Mapping[int, CpuTimes]
"""By pid."""


def cost_between(first: Usage, last: Usage, wall_s: float) -> ClientCost:
    """What the load generator's processes used between two readings."""
    zero = CpuTimes(0.0, 0.0)
    used = {pid: times.used - first.get(pid, zero).used for pid, times in last.items()}
    waited = {pid: times.waited - first.get(pid, zero).waited for pid, times in last.items()}
    busiest = max(used, key=lambda pid: used[pid], default=None)
    if busiest is None or wall_s <= 0:
        return ClientCost(cpu_s=0.0, share=0.0, wait_share=0.0, limited=False)
    share, wait_share = used[busiest] / wall_s, waited[busiest] / wall_s
    return ClientCost(
        cpu_s=sum(used.values()), share=share, wait_share=wait_share,
        limited=share + wait_share >= LIMITED_SHARE or wait_share >= LIMITED_WAIT,
    )  # fmt: skip


class Generator:
    """One running load generator."""

    def __init__(self, driver: VllmDriver, job: Job) -> None:
        """Starts it. Raises LauncherError."""
        self._driver = driver
        self._job = job
        command = driver.prepare(job)
        self._process = _start(command, job)
        self.unpinned = _pin(self._process.pid, job.target.client_cpus)
        """Why it is not on the cpus meant for it."""
        self._output = ""

    def watch(self, on_progress: Callable[[Phase], None], observe: Callable[[bool], None]) -> ClientCost:
        """Waits for its end. Raises DriverError when it fails; kills it when interrupted."""
        try:
            return self._watch(on_progress, observe)
        finally:
            self._kill()

    def _watch(self, on_progress: Callable[[Phase], None], observe: Callable[[bool], None]) -> ClientCost:
        window = _Window(self._process.pid)
        shown: Phase | None = None
        observed = changed = time.monotonic()
        while True:
            running = self._process.poll() is None
            phase = self._driver.progress(self._read_output())
            if not running:
                break
            now = time.monotonic()
            window.look(phase, now)
            if phase != shown or phase.done is None:
                changed = now
            if phase != shown:
                shown = phase
                on_progress(phase)
            self._refuse_standstill(now - changed)
            if not phase.ended and now - observed >= OBSERVE_S:
                observe(phase.measuring)
                observed = now
            time.sleep(POLL_S)
        if self._process.returncode != 0 or not self._job.result_file.is_file():
            raise self._failed()
        return window.cost()

    def _refuse_standstill(self, unchanged_s: float) -> None:
        if unchanged_s > NO_PROGRESS_S:
            raise DriverError(
                f"cannot measure {self._job.target.url}: no request completed within {NO_PROGRESS_S:g} s",
                "see whether the endpoint answers at all (`numa-launcher status`)",
            )

    def _read_output(self) -> str:
        with contextlib.suppress(OSError):
            self._output = self._job.log_file.read_text(encoding="utf-8", errors="replace")
        return self._output

    def _failed(self) -> DriverError:
        why, remedy = self._driver.explain(self._read_output())
        code = self._process.returncode
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        return DriverError(
            f"cannot measure {self._job.target.url}: {self._driver.name} failed ({ended}, {self._job.log_file}): {why}",
            remedy,
        )

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Window:
    """CPU times at the first request and at the last response."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._first: tuple[float, Usage] | None = None
        self._last: tuple[float, Usage] | None = None
        self._ended = False

    def look(self, phase: Phase, now: float) -> None:
        if phase.measuring and self._first is None:
            self._first = now, _usage(self._pid)
        if self._first is None or self._ended:
            return
        # Also before the end: the process may be gone when its last line is seen.
        if phase.ended or self._last is None or now - self._last[0] >= USAGE_S:
            self._last, self._ended = (now, _usage(self._pid)), phase.ended

    def cost(self) -> ClientCost:
        if self._first is None or self._last is None:
            return cost_between({}, {}, 0.0)
        (began, first), (ended, last) = self._first, self._last
        return cost_between(first, last, ended - began)


def _start(command: Command, job: Job) -> subprocess.Popen[bytes]:
    env = {
        name: value
        for name, value in {**os.environ, **command.env}.items()
        if value or name not in command.env
    }
    try:
        with job.log_file.open("wb") as log:
            # In a session of its own, a Ctrl-C in the terminal does not reach it: it is killed here.
            return subprocess.Popen(
                command.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env,
                start_new_session=True, preexec_fn=dies_with_parent(),  # noqa: PLW1509  there are no threads here
            )  # fmt: skip
    except OSError as error:
        raise LauncherError(
            f"cannot measure {job.target.url}: '{command.argv[0]}' cannot be started: {reason(error)}",
            "install the load generator, or choose another one with --driver",
        ) from None


def _pin(pid: int, cpus: CpuSet | None) -> str | None:
    """Pins the one thread that the process has so far; later ones inherit it."""
    if not cpus:
        return "no reserved cores"
    try:
        os.sched_setaffinity(pid, cpus)
    except OSError as error:
        return f"cpus {cpus}: {reason(error)}"
    return None


def _usage(pid: int) -> Usage:
    """CPU times of a process and its descendants."""
    found: dict[int, CpuTimes] = {}
    for process in _tree(pid):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = CpuTimes(times.user + times.system, _waited(process.pid))
    return found


def _tree(pid: int) -> Iterator[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        yield process
        yield from process.children(recursive=True)


def _waited(pid: int) -> float:
    """proc(5), /proc/PID/schedstat: nanoseconds waited for a cpu, of the main thread: the one that handles responses."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
