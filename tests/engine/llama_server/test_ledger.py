"""The resident memory of real llama-servers against the plan."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.daemon_process import DaemonProcess
from support.engine_runs import engine_of

from launcher.base.text import MIB
from launcher.engines.llama_cpp import tiny_gguf
from launcher.engines.llama_cpp.build import WHEEL
from launcher.engines.llama_cpp.tiny_gguf import Tensor, float32

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 1024, 2816, 8, 16, 8
EXPERTS, EXPERTS_USED, EXPERT = 8, 2, 512
REQUESTS, CONTEXT = 4, 2048
# More than one ubatch, so that the compute buffers are used whole.
PROMPT_TOKENS = 600
# Measured with the wheel: 1.005, 1.010, 1.033 and 1.006 (planning.py, demand_of).
CLOSE = 0.05
# The plan counts the wheel's process, an extension of Python; llama-server itself needs less (planning.py, demand_of).
PYTHON_BYTES = 20 * MIB
F16, Q4_0, Q8_0 = 1, 2, 8
# A scale in float16 for 32 numbers, of four bits or of eight (ggml/src/ggml-common.h).
BLOCKS = {Q4_0: [("scale", "<f2"), ("numbers", "u1", 16)], Q8_0: [("scale", "<f2"), ("numbers", "u1", 32)]}


@dataclass(frozen=True)
class Shape:
    """A model of 1024 numbers a token, and the types of its KV cache."""

    type: int
    """Of the layers' weights."""
    experts: int = 0
    kv_type: str = "f16"
    window: int = 0
    """Of the sliding layers of a Gemma 3."""


def matrix(name: str, shape: tuple[int, ...], kind: int) -> Tensor:
    """Random weights."""
    random = np.random.default_rng(0)
    if kind == F16:
        values = (random.standard_normal(shape, dtype=np.float32) / 32).astype("<f2")
        return Tensor(name, shape, kind, values.nbytes, values.tobytes)
    blocks = np.empty(math.prod(shape) // 32, dtype=BLOCKS[kind])
    blocks["scale"] = 1 / 128
    blocks["numbers"] = random.integers(0, 256, blocks["numbers"].shape, dtype=np.uint8)
    return Tensor(name, shape, kind, blocks.nbytes, blocks.tobytes)


def feed_forward(experts: int) -> dict[str, tuple[int, ...]]:
    """Matrices of one layer; of a mixture, those of all experts are one tensor."""
    if not experts:
        return {"ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}
    return {
        "ffn_gate_exps": (experts, EXPERT, WIDTH), "ffn_up_exps": (experts, EXPERT, WIDTH),
        "ffn_down_exps": (experts, WIDTH, EXPERT),
    }  # fmt: skip


def write(file: Path, its: Shape) -> None:
    """A Llama, with experts a Mixtral, with a window a Gemma 3, with the tiny model's tokenizer."""
    tokens, merges = tiny_gguf.vocabulary()
    key_width = WIDTH // HEADS * KV_HEADS
    shapes = {
        "attn_q": (WIDTH, WIDTH), "attn_k": (key_width, WIDTH), "attn_v": (key_width, WIDTH), "attn_output": (WIDTH, WIDTH),
        **feed_forward(its.experts),
    }  # fmt: skip
    ones = np.ones(WIDTH, dtype=np.float32)
    head = np.ones(WIDTH // HEADS, dtype=np.float32)
    norms = {"attn_norm": ones, "ffn_norm": ones}
    if its.window:
        norms |= {
            "post_attention_norm": ones,
            "post_ffw_norm": ones,
            "attn_q_norm": head,
            "attn_k_norm": head,
        }
    tensors = [matrix(f"{name}.weight", (len(tokens), WIDTH), F16) for name in ("token_embd", "output")]
    tensors.append(float32("output_norm.weight", ones))
    for layer in range(LAYERS):
        tensors += [matrix(f"blk.{layer}.{name}.weight", shape, its.type) for name, shape in shapes.items()]
        tensors += [float32(f"blk.{layer}.{name}.weight", values) for name, values in norms.items()]
        if its.experts:
            router = np.random.default_rng(layer).standard_normal((its.experts, WIDTH), dtype=np.float32)
            tensors.append(float32(f"blk.{layer}.ffn_gate_inp.weight", router))
    shape = {
        "llama.block_count": LAYERS, "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": EXPERT if its.experts else INNER,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.dimension_count": WIDTH // HEADS,
    }  # fmt: skip
    if its.experts:
        shape |= {"llama.expert_count": its.experts, "llama.expert_used_count": EXPERTS_USED}
    pairs = tiny_gguf._metadata(tokens, merges) | shape
    if its.window:
        pairs = {name.replace("llama.", "gemma3."): value for name, value in pairs.items()}
        pairs |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": its.window}
    tiny_gguf.write_gguf(file, pairs, tensors)


def fill(daemon: DaemonProcess, slot: int) -> None:
    """One long prompt in each context of an instance, all at once."""
    prompts = np.random.default_rng(1).integers(10, 300, (REQUESTS, PROMPT_TOKENS)).tolist()

    def ask(prompt: list[int]) -> int:
        answer = daemon.post(slot, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
        return int(answer["usage"]["prompt_tokens"])

    with ThreadPoolExecutor(REQUESTS) as pool:
        assert list(pool.map(ask, prompts)) == [PROMPT_TOKENS] * REQUESTS


@pytest.mark.parametrize(
    "shape",
    [Shape(F16), Shape(Q4_0), Shape(Q8_0, EXPERTS, kv_type="q8_0"), Shape(Q4_0, window=256)],
    ids=["f16", "repacked", "experts", "windows"],
)
def test_two_instances_use_the_memory_that_is_planned(
    start_by_kind: Callable[..., DaemonProcess], tmp_path: Path, shape: Shape
) -> None:
    file = tmp_path / "m.gguf"
    write(file, shape)
    limits = f"max_num_seqs = {REQUESTS}\nmax_model_len = {CONTEXT}"
    types = ("--cache-type-k", shape.kv_type, "--cache-type-v", shape.kv_type)
    # The prompt cache and checkpoints are planned full, and are empty at first.
    empty = ("--cache-ram", "0", "--ctx-checkpoints", "0")
    daemon = start_by_kind(*empty, *types, file=file, limits=limits)
    command = [sys.executable, "-m", "launcher", "plan", "-c", str(daemon.config), "--json"]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    lines = [line for node in plan["ledger"] for line in node["lines"]]
    for slot in daemon.status()["slots"]:
        fill(daemon, slot["slot"])
        engine = engine_of(slot)
        size = sum(line["size_bytes"] for line in lines if line["slot"] == slot["slot"])
        used = engine.memory_info().rss
        print(f"planned {size / MIB:.1f} MiB, measured {used / MIB:.1f} MiB: {size / used:.3f}")
        more = 0 if WHEEL[-1] in engine.cmdline() else PYTHON_BYTES
        assert (1 - CLOSE) * used <= size <= (1 + CLOSE) * used + more, (size / MIB, used / MIB)
