"""Supervision survives the daemon's own shortages, and detects engines with false health."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import resource
import termios
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.daemon_process import DaemonProcess, eventually, fake_config

from launcher.base.cpuset import CpuSet
from launcher.control.client import ControlClient
from launcher.instances.watch import SAMPLE_S

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., DaemonProcess]
QUICK = (
    "[supervision]\nbackoff_initial_s = 0.2\nbackoff_max_s = 0.5\nprobe_interval_s = 0.3\n"
    "probe_timeout_s = 1\nverify_interval_s = 1"
)
SHORT = "Too many open files"


@contextlib.contextmanager
def no_descriptors(daemon: DaemonProcess) -> Iterator[None]:
    """The daemon cannot open files; its open ones stay open."""
    process = psutil.Process(daemon.process.pid)
    soft, hard = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, (soft, hard))


def said(daemon: DaemonProcess, *words: str) -> list[str]:
    """Lines of the daemon's log that contain all of these."""
    return [line for line in daemon.log.read_text().splitlines() if all(word in line for word in words)]


@pytest.mark.parametrize("fault", ["unhealthy", pytest.param("hang", marks=pytest.mark.long)])
def test_an_engine_is_watched_after_a_shortage_of_descriptors(start: Start, fault: str) -> None:
    daemon = start(more=QUICK + "\nstall_timeout_s = 8\ncanary_interval_s = 1")
    daemon.wait_ready(2)
    with no_descriptors(daemon):
        eventually(lambda: len(said(daemon, SHORT)) > 1, what="looks that fail")
        time.sleep(1.5 * SAMPLE_S)  # each kind of look has failed now
    assert daemon.process.poll() is None
    daemon.post(0, "/fault", {"kind": fault})
    eventually(lambda: (s := daemon.slot(0))["generation"] == 2 and s["state"] == "ready", what="slot 0 back")
    assert daemon.slot(0)["last_cause"]["name"] in {"unhealthy", "hung"}
    assert daemon.slot(1)["generation"] == 1
    assert len(said(daemon, "slot 1: watch failed")) == 1, "once in a row of failures"
    assert len(said(daemon, "slot 1: watch works again")) == 1


def test_an_exit_during_a_shortage_of_descriptors_is_noticed(start: Start) -> None:
    """The shim is killed; its descendants are found in /proc."""
    daemon = start("--children", "2", more=QUICK)
    daemon.wait_ready(2)
    shim = psutil.Process(daemon.slot(0)["pid"]).parent()
    assert shim is not None
    with no_descriptors(daemon):
        before = len(said(daemon, SHORT))
        shim.kill()
        eventually(lambda: len(said(daemon, SHORT)) > before, what="a search that fails")
    eventually(lambda: (s := daemon.slot(0))["generation"] == 2 and s["state"] == "ready", what="slot 0 back")


# An instance that a busy machine holds up does not hang: it is given this long.
LYING = QUICK + "\nstall_timeout_s = 8\ncanary_interval_s = 600"
TOLD_S = {"NUMA_LAUNCHER_PROXY__HUNG_TIMEOUT_S": "6"}


def ask(daemon: DaemonProcess, tokens: int = 2) -> int:
    """The status of one completion without streaming."""
    return daemon.ask("/v1/completions", {"model": "fake", "prompt": "x", "max_tokens": tokens})[0]


@pytest.mark.parametrize("max_num_seqs", [64, pytest.param(2, marks=pytest.mark.long)])
def test_false_health_is_detected_without_streams(start: Start, max_num_seqs: int) -> None:
    """The engine has no counters and reports health; with two sequences it is full. Every request is answered."""
    daemon = start(more=LYING, environ=TOLD_S, max_num_seqs=max_num_seqs)
    daemon.wait_ready(2)
    daemon.post(0, "/fault", {"kind": "lie"})
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(ask, daemon) for _ in range(16)]
        assert [answer.result() for answer in answers] == [200] * 16
    eventually(lambda: (s := daemon.slot(0))["generation"] == 2 and s["state"] == "ready", what="slot 0 back")
    assert daemon.slot(0)["last_cause"]["name"] == "hung"
    assert daemon.slot(1)["generation"] == 1


@pytest.mark.long
def test_a_stopped_engine_is_detected_without_streams(start: Start) -> None:
    """The engine has no counters and its health path hangs. The other instance answers its requests."""
    daemon = start("--token-s", "0.1", more=LYING, environ=TOLD_S)
    daemon.wait_ready(2)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, daemon, 20) for _ in range(8)]
        eventually(lambda: daemon.slot(0)["in_flight"] > 0, what="work on slot 0")
        for process in (engine := psutil.Process(daemon.slot(0)["pid"]), *engine.children(recursive=True)):
            process.suspend()
        assert [answer.result() for answer in answers] == [200] * 8
    eventually(lambda: (s := daemon.slot(0))["generation"] == 2 and s["state"] == "ready", what="slot 0 back")
    assert daemon.slot(0)["last_cause"]["name"] == "hung"
    assert daemon.slot(1)["generation"] == 1


def test_a_long_response_of_an_engine_without_counters_is_waited_for(start: Start) -> None:
    daemon = start("--token-s", "0.1", more=LYING, environ=TOLD_S)
    daemon.wait_ready(2)
    assert ask(daemon, tokens=120) == 200
    assert [slot["generation"] for slot in daemon.status()["slots"]] == [1, 1]
    assert daemon.status()["requests"]["retried"] == 0


def test_a_thread_that_leaves_its_cpus_is_shown_everywhere(start: Start) -> None:
    """/v1/machine, `status` and the events agree, and again when it has come back."""
    daemon = start(more=QUICK)
    daemon.wait_ready(2)
    slot = daemon.slot(0)
    planned = CpuSet.parse(slot["cpus"])
    others = CpuSet(os.sched_getaffinity(0)) - planned
    assert others, "the other slot has cpus"
    client = ControlClient(str(daemon.socket))

    def places() -> dict[str, Any]:
        return client.get("/machine")["slots"][0]

    assert (places()["misplaced"], places()["misplaced_threads"]) == ([], 0)
    os.sched_setaffinity(slot["pid"], others)
    (found,) = eventually(lambda: places()["misplaced"], what="misplaced")
    assert (found["thread"], found["cpus"], found["planned"]) == (slot["pid"], str(others), str(planned))
    eventually(lambda: not daemon.slot(0)["verified"]["ok"], what="verified")
    assert daemon.slot(0)["verified"]["misplaced_threads"] == 1
    events = client.get("/events")["events"]
    (event,) = [event for event in events if "placement differs from the plan" in event["message"]]
    assert (event["fields"]["slot"], event["fields"]["generation"]) == (0, 1)
    os.sched_setaffinity(slot["pid"], planned)
    eventually(lambda: daemon.slot(0)["verified"]["ok"] and not places()["misplaced"], what="in place again")


def test_a_stopped_reader_of_stderr_and_a_flood_of_lines_hold_up_nobody(tmp_path: Path) -> None:
    """Ctrl-S on the terminal, and an instance that prints 5-byte lines without end."""
    os.mkfifo(tmp_path / "daemon.log")
    reader = os.open(tmp_path / "daemon.log", os.O_RDONLY | os.O_NONBLOCK)
    flood = json.dumps(["sh", "-c", 'yes abcd & exec "$@"', "flood"])
    config = fake_config(instances=1).replace("command = [", f"command = {flood[:-1]}, ")
    daemon = DaemonProcess(tmp_path, config.replace("[layout]", "[layout]\nreserve_cores = 1"))
    try:
        daemon.wait_ready(1)
        pending = array.array("i", [0])
        eventually(
            lambda: not fcntl.ioctl(reader, termios.FIONREAD, pending) and pending[0] >= 40_000,
            what="a full pipe",
        )
        process = psutil.Process(daemon.process.pid)
        begun, used = time.monotonic(), sum(process.cpu_times()[:2])
        while time.monotonic() < begun + 1:
            assert daemon.ask("/health")[0] == 200
            time.sleep(0.02)
        assert (sum(process.cpu_times()[:2]) - used) / (time.monotonic() - begun) < 0.5
        lines = daemon.cli("logs", "0", "--lines", "2000").stdout
        assert "lines were left out here" in lines
        cpus = [os.sched_getaffinity(thread.id) for thread in process.threads()]
        assert all(len(each) == 1 for each in cpus), "reserved ones, also of threads that began early"
        daemon.end()
    finally:
        os.close(reader)
        daemon.process.kill()
        daemon.process.wait()
