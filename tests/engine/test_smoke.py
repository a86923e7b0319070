"""One real vLLM: it starts and answers."""

from __future__ import annotations

import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import chat

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def test_one_instance_starts_and_answers(only: DaemonProcess) -> None:
    text = chat(only.url, stream=False)
    assert text
    assert chat(only.url, stream=True) == text
    sums = only.status()["requests"]
    assert (sums["accepted"], sums["completed"], sums["failed"]) == (2, 2, 0)
