"""A changed configuration restarts both instances, one after the other, without a failed request."""

from __future__ import annotations

import psutil
import pytest
from integration.load import Load
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import READY_S

pytestmark = [pytest.mark.engine, pytest.mark.release, pytest.mark.timeout(3600)]


def test_reload_under_load_fails_no_request(daemon: DaemonProcess) -> None:
    before = daemon.status()
    text = daemon.config.read_text()
    old, new = '"--max-num-batched-tokens", "2048"', '"--max-num-batched-tokens", "1024"'
    assert old in text
    with Load(daemon.url, "tiny", workers=8, max_tokens=200, pause_s=0.5) as load:
        eventually(lambda: load.tally.completed > 8, READY_S, "the load to flow")
        daemon.config.write_text(text.replace(old, new))
        done = daemon.cli("reload", timeout=2 * READY_S)
        behind = load.tally.completed
        eventually(lambda: load.tally.completed > behind + 8, READY_S, "the load to flow on")
    assert done.returncode == 0, done.stdout + done.stderr + daemon.log.read_text()[-5000:]
    assert load.tally.failures == []
    after = daemon.wait_ready(2, READY_S)
    for was, now in zip(before["slots"], after["slots"], strict=True):
        assert now["generation"] == was["generation"] + 1
        assert not psutil.pid_exists(was["pid"])
        line = psutil.Process(now["pid"]).cmdline()
        assert line[line.index("--max-num-batched-tokens") + 1] == "1024"
    requests = after["requests"]
    assert requests["failed"] == requests["rejected"] == 0
    assert requests["accepted"] == requests["completed"] + requests["client_aborted"]
    print(
        f"{load.tally.completed} completed, {len(load.tally.text)} questions, "
        f"{[len(answers) for answers in load.tally.text.values()]} different answers to each"
    )
