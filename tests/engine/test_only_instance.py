"""The only vLLM is killed, and the request that came meanwhile is answered by its successor."""

from __future__ import annotations

import psutil
import pytest
from support.daemon_process import DaemonProcess, eventually
from support.engine_runs import chat

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def test_the_only_instance_is_killed_and_replaced(only: DaemonProcess) -> None:
    text = chat(only.url, stream=False)
    assert text
    assert chat(only.url, stream=True) == text
    slot = only.slot(0)
    engine = psutil.Process(slot["pid"])
    for process in [*engine.children(recursive=True), engine]:
        process.kill()
    eventually(lambda: only.slot(0)["state"] != "ready", what="the slot out of rotation")
    assert chat(only.url, stream=False) == text
    after = only.slot(0)
    assert after["state"] == "ready"
    assert after["generation"] == slot["generation"] + 1
    sums = only.status()["requests"]
    assert (sums["accepted"], sums["completed"], sums["failed"]) == (3, 3, 0)
