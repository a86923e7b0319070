"""One real vLLM: it starts and answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import READY_S, Configure, chat

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def test_one_instance_starts_and_answers(configure: Configure, tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, configure(instances=1, max_model_len=512))
    try:
        daemon.wait_ready(1, READY_S)
        text = chat(daemon.url, stream=False)
        assert text
        assert chat(daemon.url, stream=True) == text
        sums = daemon.status()["requests"]
        assert (sums["accepted"], sums["completed"], sums["failed"]) == (2, 2, 0)
    finally:
        daemon.end()
