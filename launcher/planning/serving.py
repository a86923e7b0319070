"""Effective serving parameters of a model: [[models]], overridden by engine.args and engine.env. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from launcher.config.schema import Config, Model
from launcher.engines.arguments import has_flag, value_of
from launcher.errors import LauncherError
from launcher.planning.layers import LayerKind
from launcher.planning.profile import ModelProfile
from launcher.sizes import GIB, parse_size
from launcher.topology.model import CpuInfo

KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
DEFAULT_MAX_MODEL_LEN: Final = 2048
"""vLLM's default when config.json has none (vllm/config/model.py)."""
DEFAULT_BLOCK_SIZE: Final = 128
"""vLLM's on CPU (vllm/platforms/cpu.py)."""
LATENT_BLOCK_SIZE: Final = 16
"""Block size of latent attention without AMX, regardless of configuration (vllm/platforms/cpu.py)."""
DEFAULT_STEP_TOKENS: Final = 2048
"""max_num_batched_tokens of the API server on CPU, for each rank (vllm/engine/arg_utils.py)."""
KV_ELEMENT_BYTES: Final = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4}
"""What the CPU's attention takes as --kv-cache-dtype (v1/attention/backends/cpu_attn.py); "auto" is the model's."""

# vLLM's own spelling of numbers: 1k is 1,000, 1K is 1,024 (vllm/engine/arg_utils.py, human_readable_int).
_NUMBER: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kKmMgGtT]?)", re.ASCII)
_UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
                 "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Serving:
    """vLLM's effective parameters."""

    max_model_len: int
    max_num_seqs: int
    step_tokens: int
    """Tokens of one engine step (max_num_batched_tokens)."""
    block_size: int
    """Tokens of a KV block, before the pool of a hybrid model raises it."""
    kv_element_bytes: int
    eager: bool
    """No compilation, so no frozen weights."""
    hybrid: bool
    """Sliding layers keep their window only."""
    kv_bytes: int | None
    """The explicit KV cache; None for "auto"."""
    kv_source: str


def serving_of(model: Model, config: Config, profile: ModelProfile, cpu: CpuInfo) -> Serving:
    """The operator's arguments replace the launcher's (engines/arguments.py).

    Raises LauncherError for a number or size that cannot be read."""
    args = config.engine.args
    length = context_of(model, config, profile) or DEFAULT_MAX_MODEL_LEN
    seqs = _number(args, "--max-num-seqs") or model.max_num_seqs
    latent = profile.mla and "amx_tile" not in cpu.flags
    step = _number(args, "--max-num-batched-tokens") or model.max_num_batched_tokens
    if latent:
        step = max(length, DEFAULT_STEP_TOKENS)  # no chunked prefill there (vllm/platforms/cpu.py)
    block = _number(args, "--block-size") or model.block_size or DEFAULT_BLOCK_SIZE
    kv_bytes, source = _explicit_kv(config)
    cache_type = value_of(args, "--kv-cache-dtype") or profile.kv_cache_dtype
    return Serving(
        max_model_len=length,
        max_num_seqs=seqs,
        step_tokens=step or min(DEFAULT_STEP_TOKENS * model.tensor_parallel_size, seqs * length),
        block_size=LATENT_BLOCK_SIZE if latent else block,
        kv_element_bytes=KV_ELEMENT_BYTES.get(cache_type, profile.kv_element_bytes),
        eager=has_flag(args, "--enforce-eager"),
        hybrid=not has_flag(args, "--disable-hybrid-kv-cache-manager"),
        kv_bytes=kv_bytes,
        kv_source=source,
    )


def context_of(model: Model, config: Config, profile: ModelProfile | None) -> int | None:
    """Tokens of the longest prompt and response together; None: not known. Raises LauncherError for a number that cannot
    be read. `profile`: None where the engine is no vLLM."""
    if profile is None:
        return model.max_model_len
    given = _number(config.engine.args, "--max-model-len")
    return given or model.max_model_len or profile.max_model_len


def kinds_of(profile: ModelProfile) -> frozenset[LayerKind]:
    return frozenset(its.kind for its in profile.kv_layers)


def size_of(key: str, text: str) -> int:
    """A size in [memory]. Raises LauncherError."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise LauncherError(
            f"cannot use memory.{key}: {error}", f'set memory.{key} to "auto" or a size'
        ) from None


def whole_gib(env: Mapping[str, str]) -> int | None:
    """VLLM_CPU_KVCACHE_SPACE in bytes; None when absent or not a whole number (which lint reports)."""
    text = env.get(KV_SPACE, "")
    return int(text) * GIB if text.isascii() and text.isdigit() else None


def _explicit_kv(config: Config) -> tuple[int | None, str]:
    """Precedence as in vLLM: the variable (vllm/platforms/cpu.py), then the argument, then memory.kv_cache."""
    asked = whole_gib(config.engine.env)
    if asked is not None:
        return asked, f"engine.env {KV_SPACE}"
    asked = _number(config.engine.args, "--kv-cache-memory-bytes")
    if asked is not None:
        return asked, "engine.args --kv-cache-memory-bytes"
    if config.memory.kv_cache != "auto":
        return size_of("kv_cache", config.memory.kv_cache), "memory.kv_cache"
    return None, "memory.kv_cache = auto"


def _number(args: tuple[str, ...], flag: str) -> int | None:
    text = value_of(args, flag)
    if text is None or text in {"-1", "auto"}:
        return None
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise LauncherError(
            f"cannot plan with {flag} {text!r} in engine.args: it is not a number",
            'write it as vLLM does: "4096", "4k" or "4K"',
        )
    return int(float(match["number"]) * _UNITS[match["unit"]])
