"""`tune --stack vllm,llama.cpp` with both real engines on the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_vllm_and_llama_cpp_are_measured_with_the_same_layout(
    llama_server: str, model_folder: Path, gguf: Path, tmp_path: Path
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f"""
[[models]]
name = "tiny"
path = {json.dumps(str(model_folder))}
dtype = "float32"
max_model_len = 2048
max_num_seqs = 8
[layout]
instances_per_socket = 1
reserve_cores = 0
[memory]
kv_cache = "256MiB"
[engine]
args = ["--enforce-eager"]
[control]
socket = "{tmp_path}/c.sock"
""")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "launcher", "tune", "-c", str(config), "--stack", "vllm,llama.cpp"),
            *("--gguf", str(gguf), "--instances", "1", "--strategies", "interleaved", "--no-refine"),
            *("--repeats", "1", "--budget", "6m", "--state-dir", str(tmp_path / "state"), "--json"),
        ],
        env={**os.environ, "PATH": f"{Path(llama_server).parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False, timeout=3000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {each["layout"]["stack"]: each for each in json.loads(done.stdout)["candidates"]}
    assert set(found) == {"vllm", "llama.cpp"}, done.stderr
    # The same weights in float32: near-ties of random weights aside, the same tokens.
    answers = json.loads(done.stdout)["answers"]
    assert {len(texts) for texts in answers.values()} == {4}
    assert any(one == other for one, other in zip(answers["vllm"], answers["llama.cpp"], strict=True)), (
        answers
    )
    for each in found.values():
        assert each["output_tokens_per_s"], (each["left"], done.stderr)
    # Its software is that of the winner, so that it holds when that is configured.
    [best] = json.loads((tmp_path / "state/tuning/best.json").read_text())["layouts"]
    assert best["fingerprint"]["software"]["engine"] == best["layout"].get("stack", "vllm")
