"""Runs of real engines: how long they take to start, a chat with one, a `bench` of one."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
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


def engine_of(slot: dict[str, Any]) -> psutil.Process:
    """The llama-server of a slot."""
    root = psutil.Process(slot["pid"])
    return next(p for p in (root, *root.children(recursive=True)) if p.name() == "llama-server")


def ask(daemon: DaemonProcess, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Status and JSON of one request through the endpoint."""

    async def post() -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{daemon.url}{path}", json=body) as response,
        ):
            return response.status, await response.json()

    return asyncio.run(post())


def check_embeddings(url: str, model: str, width: int) -> None:
    """Two requests with the openai SDK: vectors of `width` numbers and length 1, the same for the same text."""
    texts = ["a core", "a socket", "a core"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for form in ("float", "base64"):
            answer = client.embeddings.create(model=model, input=texts, encoding_format=form)  # type: ignore[arg-type]
            vectors = [item.embedding for item in answer.data]
            assert [item.index for item in answer.data] == [0, 1, 2]
            assert answer.usage.prompt_tokens > 0
            if form == "base64":
                continue  # the SDK leaves to its caller what was asked for in so many words
            assert {len(vector) for vector in vectors} == {width}
            first, second, third = vectors
            assert math.isclose(sum(a * b for a, b in zip(first, third, strict=True)), 1.0, abs_tol=1e-3)
            assert sum(a * b for a, b in zip(first, second, strict=True)) < 0.999
