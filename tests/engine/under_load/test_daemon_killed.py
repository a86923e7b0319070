"""SIGKILL of the daemon and an immediate restart: its child instances end, and the new daemon starts its own.

In CI test_real_vllm.py kills a daemon over real vLLM, and tests/integration starts another one after it."""

from __future__ import annotations

import json
import os
import signal
import urllib.request

import psutil
import pytest
from integration.load import Load
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import READY_S

pytestmark = [pytest.mark.engine, pytest.mark.release, pytest.mark.timeout(3600)]


def test_a_new_daemon_starts_new_instances_and_no_old_process_is_left(
    daemon: DaemonProcess, two_instances: str
) -> None:
    eventually(lambda: daemon.slot(1)["state"] == "ready", READY_S, "an instance with streams")
    old = {pid: psutil.Process(pid).create_time() for pid in daemon.descendants() if psutil.pid_exists(pid)}
    assert len(old) >= 5
    with Load(daemon.url, "tiny", workers=8, max_tokens=400) as load:
        eventually(lambda: load.tally.completed > 8, READY_S, "the load to flow")
        os.kill(daemon.process.pid, signal.SIGKILL)
        daemon.process.wait()
    # Whoever had an open stream saw it break: none ended as if whole, and none got a word from nowhere.
    assert load.tally.failures
    assert load.tally.honest == 0, "a daemon that is gone says nothing"
    following = DaemonProcess(daemon.folder, two_instances)  # the same folder: its socket and state are found
    try:
        eventually(lambda: not [pid for pid in old if _lives(pid, old[pid])], what="the old instances to end")
        status = following.wait_ready(2, READY_S)
        assert [slot["generation"] for slot in status["slots"]] == [1, 1]
        assert not {slot["pid"] for slot in status["slots"]} & set(old)
        verified = json.loads(following.cli("verify", "--json").stdout)["slots"]
        assert [slot["verified"]["ok"] for slot in verified] == [True, True], verified
        asked = urllib.request.Request(
            f"{following.url}/v1/completions",
            json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 4}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked, timeout=READY_S) as answer:
            assert json.load(answer)["choices"]
    finally:
        following.end()


def _lives(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
