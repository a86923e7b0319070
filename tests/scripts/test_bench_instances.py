"""scripts/bench-instances measures vLLM alone and numa-launcher's instances with one load, and what a kill costs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.model_folders import model

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench-instances"

# `vllm serve`, which puts the last two tokens into one event, as an engine that fell behind does.
STAND_IN = """#!{python}
import argparse, asyncio, json, sys
from aiohttp import web

async def health(_):
    return web.Response()

async def models(_):
    return web.json_response({{"object": "list", "data": [{{"id": "m", "object": "model"}}]}})

async def complete(request):
    body = await request.json()
    count = body.get("max_tokens", 16)
    if not body.get("stream"):
        usage = {{"prompt_tokens": 1, "completion_tokens": count, "total_tokens": count + 1}}
        choice = {{"index": 0, "text": "x" * count, "finish_reason": "length"}}
        return web.json_response({{"id": "c", "object": "text_completion", "choices": [choice], "usage": usage}})
    answer = web.StreamResponse(headers={{"Content-Type": "text/event-stream"}})
    await answer.prepare(request)
    for number in range(1, max(2, count)):
        await asyncio.sleep(0.005)
        choice = {{"index": 0, "text": "x", "finish_reason": "length" if number == max(1, count - 1) else None}}
        event = {{"id": "c", "object": "text_completion", "choices": [choice]}}
        await answer.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
    usage = {{"prompt_tokens": 128, "completion_tokens": count, "total_tokens": count + 128}}
    event = {{"id": "c", "object": "text_completion", "choices": [], "usage": usage}}
    await answer.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
    await answer.write(b"data: [DONE]\\n\\n")
    return answer

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--uds")
parser.add_argument("--port", type=int)
given, _ = parser.parse_known_args()
app = web.Application()
app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.post("/v1/completions", complete)])
web.run_app(app, path=given.uds, host=None if given.uds else "127.0.0.1", port=given.port, print=None)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.budget
def test_a_short_run(tmp_path: Path) -> None:
    vllm = tmp_path / "vllm"
    vllm.write_text(STAND_IN.format(python=sys.executable))
    vllm.chmod(0o755)
    folder = model(tmp_path / "model", {"architectures": ["LlamaForCausalLM"], "vocab_size": 1024})
    kept = tmp_path / "run.jsonl"
    done = run(
        *(folder, "--vllm", str(vllm), "--servers", "alone,1", "--concurrency", "1,4", "--seconds", "2"),
        *("--rounds", "2", "--warm-up", "0.5", "--output", "8", "--kv-cache", "1", "--json", str(kept)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["server"] for row in rows if row["kind"] == "start"] == ["alone", "1"]
    cells = [row for row in rows if row["kind"] == "cell"]
    # Each round begins with another server.
    assert [(cell["clients"], cell["server"]) for cell in cells] == [
        *((1, "alone"), (1, "1"), (4, "alone"), (4, "1")),
        *((1, "1"), (1, "alone"), (4, "1"), (4, "alone")),
    ]
    assert [cell["failures"] for cell in cells] == [[]] * 8
    assert all(0 < cell["ttft_p50_s"] <= cell["ttft_p99_s"] for cell in cells)
    assert all(0 < cell["gap_p50_s"] <= cell["gap_p99_s"] for cell in cells)
    assert all(cell["tokens"] > 10 and cell["completed"] > 1 for cell in cells)
    assert "| output tokens/s | 1 at once | 4 at once |" in done.stdout


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 2
    assert f"cannot read '{tmp_path}/config.json'" in done.stderr
