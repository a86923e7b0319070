"""Runs of real engines: how long they take to start, a chat with one, a `bench` of one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
from support.daemon_process import DaemonProcess

from launcher.measure.bench.result import BenchResult
from launcher.measure.bench.store import load_all

# Two instances load side by side on two busy cores; the first start compiles.
READY_S = 600.0


Configure = Callable[..., str]


def bench(daemon: DaemonProcess, state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "launcher", "bench", "-c", str(daemon.config), "--state-dir", str(state), *words],
        check=False, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def stored(state: Path) -> BenchResult:
    (result,), broken = load_all(state / "bench")
    assert not broken
    return result


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
