"""The settings that a model's instances run with: [[models]], overridden by engine.args and engine.env. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from launcher.base.errors import LauncherError
from launcher.base.text import GIB
from launcher.config.schema import Config, Model
from launcher.engines.vllm.arguments import check_arguments, has_flag, value_given
from launcher.engines.vllm.software import KV_CACHE_BYTES_SINCE, is_since
from launcher.machine.topology import CpuInfo
from launcher.models.profile import UNKNOWN, ModelProfile
from launcher.plan.plan import DEFAULT_MAX_MODEL_LEN, EffectiveConfig, Facts

KV_SPACE: Final = "VLLM_CPU_KVCACHE_SPACE"
"""Whole GiB only; overrides --kv-cache-memory-bytes (vllm/platforms/cpu.py, 0.32)."""
WEIGHT_PREPACK: Final = "VLLM_ZENTORCH_WEIGHT_PREPACK"
DEFAULT_BLOCK_SIZE: Final = 128
"""vLLM's on CPU (vllm/platforms/cpu.py)."""
LATENT_BLOCK_SIZE: Final = 16
"""Block size of latent attention without AMX, regardless of configuration (vllm/platforms/cpu.py)."""
DEFAULT_STEP_TOKENS: Final = 2048
"""max_num_batched_tokens of the API server on CPU, for each rank (vllm/engine/arg_utils.py)."""
KV_ELEMENT_BYTES: Final = {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "bfloat16": 2, "float16": 2, "float32": 4}
"""What the CPU's attention takes as --kv-cache-dtype (v1/attention/backends/cpu_attn.py); "auto" is the model's."""

# vLLM's own spelling of numbers: 1k is 1,000, 1K is 1,024 (vllm/engine/arg_utils.py, human_readable_int).
# int() and float() have bounds of their own, far above these digits.
_NUMBER: Final = re.compile(r"(?P<number>\d{1,18}(?:\.\d{1,18})?)(?P<unit>[kKmMgGtT]?)", re.ASCII)
_GIB: Final = re.compile(r"\d{1,9}", re.ASCII)
# Fractions are taken with decimal units only.
_DECIMAL: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS: Final = {"": 1, **_DECIMAL, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# vLLM's names (vllm/config/model.py), to those of [[models]].
_DTYPES: Final = {
    "auto": "auto", "bfloat16": "bfloat16", "half": "float16", "float16": "float16", "float": "float32",
    "float32": "float32",
}  # fmt: skip


def effective_config(
    model: Model, config: Config, profile: ModelProfile = UNKNOWN, cpu: CpuInfo | None = None
) -> EffectiveConfig:
    """The one decision about what instances of `model` run with.

    The operator's arguments replace [[models]] (arguments.py); the last one wins. Where neither sets a value,
    it is the model's own or vLLM's default.

    Raises LauncherError for an argument that the launcher does not take, and for a value that vLLM would not."""
    args = _arguments(config)
    seqs = _count(args, "--max-num-seqs") or model.max_num_seqs
    length = _context(args, model, profile)
    assumes = length is None and profile.known
    asked_step = _count(args, "--max-num-batched-tokens", suffixes=True) or model.max_num_batched_tokens
    # "auto" is the planner's to choose: it asks again with each number.
    asked_ranks = 1 if model.tensor_parallel_size == "auto" else model.tensor_parallel_size
    ranks = _count(args, "--tensor-parallel-size") or asked_ranks
    planned = length or DEFAULT_MAX_MODEL_LEN
    # No chunked prefill there (vllm/platforms/cpu.py).
    latent = profile.mla and (cpu is None or "amx_tile" not in cpu.flags)
    step = max(planned, DEFAULT_STEP_TOKENS) if latent else asked_step
    block = _count(args, "--block-size") or model.block_size or DEFAULT_BLOCK_SIZE
    default_step = DEFAULT_STEP_TOKENS * ranks
    if _text(args, "--performance-mode") == "throughput":  # vllm/engine/arg_utils.py
        default_step *= 2
    kv_bytes, source = _explicit_kv(config, args)
    kv_type = _text(args, "--kv-cache-dtype")
    return EffectiveConfig(
        name=model.name,
        dtype=dtype_of(model, config),
        quantization=_text(args, "--quantization")
        if has_flag(args, "--quantization")
        else model.quantization,
        tensor_parallel_size=ranks,
        max_model_len=planned if assumes else length,
        max_num_seqs=seqs,
        max_num_batched_tokens=asked_step,
        step_tokens=step or min(default_step, seqs * planned),
        block_size=LATENT_BLOCK_SIZE if latent else block,
        kv_cache_dtype=kv_type,
        kv_element_bytes=KV_ELEMENT_BYTES.get(kv_type or profile.kv_cache_dtype, profile.kv_element_bytes),
        kv_bytes=kv_bytes,
        kv_source=source,
        eager=has_flag(args, "--enforce-eager"),
        hybrid=not has_flag(args, "--disable-hybrid-kv-cache-manager"),
        assumes_length=assumes,
    )


def lacks_kv_bytes(facts: Facts) -> bool:
    """This vLLM takes its KV cache in whole GiB only, by KV_SPACE."""
    return not is_since(facts.engine.get("vllm"), KV_CACHE_BYTES_SINCE)


def dtype_of(model: Model, config: Config) -> str:
    """`EffectiveConfig.dtype`, which is known before the model's files are read. Raises LauncherError."""
    asked = _text(_arguments(config), "--dtype")
    if asked is None:
        return model.dtype
    if asked not in _DTYPES:
        raise _unusable("--dtype", asked, f"vLLM takes {', '.join(sorted(_DTYPES))}")
    return _DTYPES[asked]


def _arguments(config: Config) -> tuple[str, ...]:
    check_arguments(config.engine.args)
    return config.engine.args


def _context(args: tuple[str, ...], model: Model, profile: ModelProfile) -> int | None:
    text = value_given(args, "--max-model-len")
    if text is None:
        return model.max_model_len or profile.max_model_len
    if text.strip() == "-1" or text.strip().lower() == "auto":
        # The most that fits in memory, at most the model's own: [[models]] does not count.
        return profile.max_model_len
    return _count(args, "--max-model-len", suffixes=True)


def whole_gib(env: Mapping[str, str]) -> int | None:
    """VLLM_CPU_KVCACHE_SPACE in bytes; None when absent or not a whole number (which lint reports)."""
    text = env.get(KV_SPACE, "")
    return int(text) * GIB if _GIB.fullmatch(text) else None


def _explicit_kv(config: Config, args: tuple[str, ...]) -> tuple[int | None, str]:
    """Precedence as in vLLM: the variable (vllm/platforms/cpu.py), then the argument, then memory.kv_cache."""
    asked = whole_gib(config.engine.env)
    if asked is not None:
        return asked, f"engine.env {KV_SPACE}"
    if _text(args, "--kv-cache-memory-bytes") is not None:
        return _count(args, "--kv-cache-memory-bytes", suffixes=True), "engine.args --kv-cache-memory-bytes"
    if config.memory.kv_cache != "auto":
        return config.memory.size_of("kv_cache"), "memory.kv_cache"
    return None, "memory.kv_cache = auto"


def _text(args: tuple[str, ...], flag: str) -> str | None:
    """A value as given; None without one. vLLM reads "" and "None" as none (vllm/engine/arg_utils.py, optional_type)."""
    text = value_given(args, flag)
    return None if text in {None, "", "None"} else text


def _count(args: tuple[str, ...], flag: str, *, suffixes: bool = False) -> int | None:
    """The positive number that `flag` gives; None without the flag. `suffixes`: vLLM takes 4k and 4K there.

    Raises LauncherError."""
    text = value_given(args, flag)
    if text is None:
        return None
    match = _NUMBER.fullmatch(text.strip())
    if (
        match is None
        or (match["unit"] and not suffixes)
        or ("." in match["number"] and match["unit"] not in _DECIMAL)
    ):
        raise _unusable(flag, text, "it is not a number", suffixes=suffixes)
    number = (
        int(float(match["number"]) * _DECIMAL[match["unit"]])
        if "." in match["number"]
        else (int(match["number"]) * _UNITS[match["unit"]])
    )
    if number < 1:
        raise _unusable(flag, text, "it is less than 1")
    return number


def _unusable(flag: str, text: str, why: str, *, suffixes: bool = False) -> LauncherError:
    return LauncherError(
        f"cannot use {flag} {text!r} in engine.args: {why}",
        'write it as vLLM does: "4096", "4k" or "4K"'
        if suffixes
        else f"correct {flag}, or remove it from engine.args",
    )
