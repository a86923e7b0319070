"""The resident memory of real llama-servers against the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import engine_of

from launcher.base.text import MIB
from launcher.engines.llama_cpp import tiny_gguf
from launcher.engines.llama_cpp.tiny_gguf import Tensor, float32

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 1024, 2816, 8, 16, 8
REQUESTS, CONTEXT = 4, 2048
# More than one ubatch, so that the compute buffers are used whole.
PROMPT_TOKENS = 600
# The plan counts the wheel's process, an extension of Python; llama-server itself needs less (planning.py, demand_of).
PYTHON_BYTES = 20 * MIB
F16, Q4_0 = 1, 2


def matrix(name: str, rows: int, columns: int, kind: int) -> Tensor:
    """Random weights; a block of Q4_0 is a scale in float16 and 32 numbers of four bits."""
    random = np.random.default_rng(0)
    if kind == F16:
        values = (random.standard_normal((rows, columns), dtype=np.float32) / 32).astype("<f2")
        return Tensor(name, (rows, columns), kind, values.nbytes, values.tobytes)
    blocks = np.empty(rows * columns // 32, dtype=[("scale", "<f2"), ("numbers", "u1", 16)])
    blocks["scale"] = 1 / 128
    blocks["numbers"] = random.integers(0, 256, blocks["numbers"].shape, dtype=np.uint8)
    return Tensor(name, (rows, columns), kind, blocks.nbytes, blocks.tobytes)


def write(file: Path, kind: int) -> None:
    """A Llama of 94 million parameters with the tiny model's tokenizer."""
    tokens, merges = tiny_gguf.vocabulary()
    key_width = WIDTH // HEADS * KV_HEADS
    shapes = {
        "attn_q": (WIDTH, WIDTH), "attn_k": (key_width, WIDTH), "attn_v": (key_width, WIDTH), "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER),
    }  # fmt: skip
    ones = np.ones(WIDTH, dtype=np.float32)
    tensors = [matrix(f"{name}.weight", len(tokens), WIDTH, F16) for name in ("token_embd", "output")]
    tensors.append(float32("output_norm.weight", ones))
    for layer in range(LAYERS):
        tensors += [matrix(f"blk.{layer}.{name}.weight", *shape, kind) for name, shape in shapes.items()]
        tensors += [float32(f"blk.{layer}.{name}.weight", ones) for name in ("attn_norm", "ffn_norm")]
    shape = {
        "llama.block_count": LAYERS, "llama.embedding_length": WIDTH, "llama.feed_forward_length": INNER,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": WIDTH // HEADS,
    }  # fmt: skip
    tiny_gguf.write_gguf(file, tiny_gguf._metadata(tokens, merges) | shape, tensors)


def fill(daemon: DaemonProcess, slot: int) -> None:
    """One long prompt in each context of an instance, all at once."""
    prompts = np.random.default_rng(1).integers(10, 300, (REQUESTS, PROMPT_TOKENS)).tolist()

    def ask(prompt: list[int]) -> int:
        answer = daemon.post(slot, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        return int(answer["usage"]["prompt_tokens"])

    with ThreadPoolExecutor(REQUESTS) as pool:
        assert list(pool.map(ask, prompts)) == [PROMPT_TOKENS] * REQUESTS


@pytest.mark.parametrize("kind", [F16, Q4_0], ids=["f16", "repacked"])
def test_two_instances_use_the_memory_that_is_planned(
    start_by_kind: Callable[..., DaemonProcess], tmp_path: Path, kind: int
) -> None:
    file = tmp_path / "m.gguf"
    write(file, kind)
    limits = f"max_num_seqs = {REQUESTS}\nmax_model_len = {CONTEXT}"
    # The prompt cache is planned full, and is empty at first.
    daemon = start_by_kind("--cache-ram", "0", file=file, limits=limits)
    command = [sys.executable, "-m", "launcher", "plan", "-c", str(daemon.config), "--json"]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    lines = [line for node in plan["ledger"] for line in node["lines"]]
    for slot in daemon.status()["slots"]:
        fill(daemon, slot["slot"])
        size = sum(line["size_bytes"] for line in lines if line["slot"] == slot["slot"])
        used = engine_of(slot).memory_info().rss
        assert 0.94 * size - PYTHON_BYTES <= used <= 1.06 * size, (used / MIB, size / MIB)
