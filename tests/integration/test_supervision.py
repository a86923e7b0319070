"""Supervision goes on after the daemon itself was short of something, and sees engines that lie."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from integration.conftest import DaemonProcess, eventually

from launcher.instances.watcher import LOOK_AROUND_S

pytestmark = pytest.mark.timeout(300)

Start = Callable[..., DaemonProcess]
QUICK = (
    "[supervision]\nbackoff_initial_s = 0.2\nbackoff_max_s = 0.5\nprobe_interval_s = 0.3\n"
    "probe_timeout_s = 1\nverify_interval_s = 1"
)
SHORT = "Too many open files"


@contextlib.contextmanager
def no_descriptors(daemon: DaemonProcess) -> Iterator[None]:
    """The daemon cannot open anything; what it has open stays open."""
    process = psutil.Process(daemon.process.pid)
    soft, hard = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        process.rlimit(resource.RLIMIT_NOFILE, (soft, hard))


def said(daemon: DaemonProcess, *words: str) -> list[str]:
    """Lines of the daemon's log that have all of these."""
    return [line for line in daemon.log.read_text().splitlines() if all(word in line for word in words)]


@pytest.mark.parametrize("fault", ["unhealthy", "hang"])
def test_an_engine_is_watched_after_a_shortage_of_descriptors(start: Start, fault: str) -> None:
    daemon = start(more=QUICK + "\nstall_timeout_s = 2\ncanary_interval_s = 1")
    daemon.wait_ready(2)
    with no_descriptors(daemon):
        eventually(lambda: len(said(daemon, SHORT)) > 1, what="looks that fail")
        time.sleep(1.5 * LOOK_AROUND_S)  # each kind of look has failed now
    assert daemon.process.poll() is None
    daemon.post(0, "/fault", {"kind": fault})
    eventually(lambda: (s := daemon.slot(0))["generation"] == 2 and s["state"] == "ready", what="slot 0 back")
    assert daemon.slot(0)["last_cause"]["name"] in {"unhealthy", "hung"}
    assert daemon.slot(1)["generation"] == 1
    assert len(said(daemon, "slot 1: watch failed")) == 1, "once in a row of failures"
    assert len(said(daemon, "slot 1: watch works again")) == 1


def test_an_exit_during_a_shortage_of_descriptors_is_noticed(start: Start) -> None:
    """The process that keeps the instance's tree is killed: what it left is looked for in /proc."""
    daemon = start("--children", "2", more=QUICK)
    daemon.wait_ready(2)
    keeper = psutil.Process(daemon.slot(0)["pid"]).parent()
    assert keeper is not None
    with no_descriptors(daemon):
        before = len(said(daemon, SHORT))
        keeper.kill()
        eventually(lambda: len(said(daemon, SHORT)) > before, what="a search that fails")
    eventually(lambda: (s := daemon.slot(0))["generation"] == 2 and s["state"] == "ready", what="slot 0 back")
