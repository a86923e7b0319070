"""scripts/bench-rivals measures servers of one model in turn with one load, and the cost of a kill."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench-rivals"
sys.path.insert(0, str(SCRIPT.parent))

from bench import engine_servers  # noqa: E402
from bench.processes import FailedError  # noqa: E402

# `vllm serve` and llama-server; it puts the last two tokens into one event, as an engine that fell behind does.
STAND_IN = """#!{python}
import argparse, asyncio, json, sys
from aiohttp import web

async def health(_):
    return web.Response()

async def models(_):
    return web.json_response({{"object": "list", "data": [{{"id": "m", "object": "model"}}]}})

async def complete(request):
    body = await request.json()
    with open(sys.argv[0] + ".prompts", "a") as out:
        print(json.dumps(body["prompt"]), file=out)
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
parser.add_argument("--version", action="version", version="version: 1")
parser.add_argument("--uds")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int)
given, _ = parser.parse_known_args()
app = web.Application()
app.add_routes([web.get("/health", health), web.get("/v1/models", models), web.post("/v1/completions", complete)])
path = given.uds or (given.host if given.host.startswith("/") else None)
web.run_app(app, path=path, host=None if path else given.host, port=given.port, print=None)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, *arguments],
        env={**os.environ, "PYTHON": sys.executable, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.mark.budget
def test_a_short_run(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_text(STAND_IN.format(python=sys.executable))
    engine.chmod(0o755)
    kept = tmp_path / "run.jsonl"
    done = run(
        tmp_path,
        *(
            "--vllm",
            str(engine),
            "--llama-server",
            str(engine),
            "--pace",
            "no-such-program",
            "--shape",
            "tiny",
        ),
        *(
            "--servers",
            "vllm,nginx-vllm,llama,ours-vllm-1,ours-llama-1,pace",
            "--concurrency",
            "1,4",
            "--seconds",
            "2",
        ),
        *("--rounds", "2", "--warm-up", "0.5", "--kill", "3", "--output", "8", "--kv-cache", "1"),
        *("--json", str(kept)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "left out: pace, for no-such-program is not here\n"
    rows: list[dict[str, Any]] = [json.loads(line) for line in kept.read_text().splitlines()]
    servers = ["vllm", "nginx-vllm", "llama", "ours-vllm-1", "ours-llama-1"]
    # Every second round goes backwards.
    assert [row["server"] for row in rows if row["kind"] == "start"] == [*servers, *servers[::-1]]
    cells = [row for row in rows if row["kind"] == "cell"]
    assert [cell["clients"] for cell in cells] == [1, 4] * 10
    assert [cell["failures"] for cell in cells] == [[]] * 20
    assert all(0 < cell["ttft_p50_s"] <= cell["ttft_p99_s"] for cell in cells)
    assert all(0 < cell["gap_p50_s"] <= cell["gap_p99_s"] for cell in cells)
    assert all(cell["tokens"] > 10 and cell["completed"] > 1 for cell in cells)
    kills = {row["server"]: row for row in rows if row["kind"] == "kill"}
    assert list(kills) == servers
    # Nothing starts a server again that is alone; the launcher does.
    assert kills["vllm"]["whole_after_s"] is None
    assert kills["vllm"]["failed"] > 0
    assert kills["ours-vllm-1"]["whole_after_s"] > 0
    assert "| output tokens/s | 1 at once | 4 at once |" in done.stdout


@pytest.mark.long
def test_conversations(tmp_path: Path) -> None:
    """The workload `chat` has four turns behind one shared beginning; each repeats those before it."""
    engine = tmp_path / "engine"
    engine.write_text(STAND_IN.format(python=sys.executable))
    engine.chmod(0o755)
    done = run(
        tmp_path, "--llama-server", str(engine), "--shape", "tiny", "--servers", "llama", "--workload", "chat", "--rounds",
        "1", "--concurrency", "1", "--seconds", "3", "--warm-up", "0", "--kill", "0", "--output", "8",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    prompts: list[list[int]] = [
        json.loads(line) for line in Path(f"{engine}.prompts").read_text().splitlines()
    ]
    lengths = [300 + turn * 40 + (turn - 1) * 120 for turn in (1, 2, 3, 4)]
    assert [len(prompt) for prompt in prompts[:8]] == lengths * 2
    assert {tuple(prompt[:300]) for prompt in prompts} == {tuple(prompts[0][:300])}
    assert prompts[3][: lengths[2]] == prompts[2]
    assert prompts[4][300:] != prompts[0][300:]


TUNE = """#!{python}
import pathlib, sys
file = pathlib.Path(sys.argv[sys.argv.index("-c") + 1])
with file.with_name("asked").open("a") as out:
    print(*sys.argv[1:], file=out)
print("no layout gave a figure")
file.write_text(file.read_text() + "# tuned")
sys.exit({code})
"""


@pytest.mark.parametrize("code", [0, 1])
async def test_tuned(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tune` runs once, before the first round; each round then starts with its layout."""
    launcher = tmp_path / "launcher"
    launcher.write_text(TUNE.format(python=sys.executable, code=code))
    launcher.chmod(0o755)
    monkeypatch.setattr(engine_servers, "_LAUNCHER", (str(launcher),))
    args = argparse.Namespace(
        gguf="/m.gguf", llama_server="llama-server", max_model_len=512, max_num_seqs=64, set=["proxy.policy=round-robin"],
        stop_s=60.0, strategy="interleaved", tune=900.0, workload="chat",
    )  # fmt: skip
    folder = tmp_path / "run"
    for _ in range(2):
        server = engine_servers.Server("ours-llama-tuned", args, folder)
        try:
            # The stand-in of `serve` says nothing to a control socket, and ends.
            with pytest.raises(FailedError, match="tune: exit code 1: no layout" if code else "ended"):
                await server.start()
        finally:
            server.end()
    file = folder / "config.toml"
    tune = f"tune -c {file} --workload chat --budget 900s --apply --set proxy.policy=round-robin"
    serve = f"serve -c {file} --set proxy.policy=round-robin --set proxy.listen="
    asked = [line.partition("[")[0] for line in (folder / "asked").read_text().splitlines()]
    assert asked == ([tune, tune] if code else [tune, serve, serve])
    assert file.exists() is not code


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/none"], "cannot measure with one of --model and --gguf"),
        (["--model", "/none", "--gguf", "/none.gguf"], "cannot read '/none/config.json'"),
        (
            ["--shape", "tiny", "--servers", "ollama"],
            "cannot measure 'ollama': there is no server of that name",
        ),
        (["--shape", "tiny", "--servers", "llama", "--llama-server", "no-such"], "cannot measure anything"),
    ],
)
def test_unusable_arguments(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr
