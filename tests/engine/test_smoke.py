"""One real vLLM: it starts, answers, is killed, and the request that came meanwhile is answered by its successor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from engine.conftest import READY_S, Configure
from integration.conftest import DaemonProcess, eventually

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


def chat(url: str, *, stream: bool) -> str:
    question: Any = [{"role": "user", "content": "How many cores?"}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=READY_S) as client:
        if not stream:
            whole = client.chat.completions.create(
                model="tiny", messages=question, max_tokens=8, temperature=0
            )
            return whole.choices[0].message.content or ""
        chunks = client.chat.completions.create(
            model="tiny", messages=question, max_tokens=8, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_one_instance_starts_answers_and_survives_a_kill(configure: Configure, tmp_path: Path) -> None:
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
