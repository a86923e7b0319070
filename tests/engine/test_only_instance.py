"""The only vLLM is killed, and the request that came meanwhile is answered by its successor."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import READY_S, Configure, chat

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def test_the_only_instance_is_killed_and_replaced(configure: Configure, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, configure(instances=1, max_model_len=512))
    try:
        daemon.wait_ready(1, READY_S)
        text = chat(daemon.url, stream=False)
        assert text
        assert chat(daemon.url, stream=True) == text
        slot = daemon.slot(0)
        engine = psutil.Process(slot["pid"])
        for process in [*engine.children(recursive=True), engine]:
            process.kill()
        eventually(lambda: daemon.slot(0)["state"] != "ready", what="the slot out of rotation")
        assert chat(daemon.url, stream=False) == text
        after = daemon.slot(0)
        assert after["state"] == "ready"
        assert after["generation"] == slot["generation"] + 1
        sums = daemon.status()["requests"]
        assert (sums["accepted"], sums["completed"], sums["failed"]) == (3, 3, 0)
    finally:
        daemon.end()
