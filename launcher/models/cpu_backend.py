"""Quantization of a checkpoint, and models that vLLM's CPU backend cannot build. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from launcher.models.description import Description

Json = Mapping[str, Any]

# ModelOpt's algorithms, to vLLM's method (model_arch_config_convertor.py, _normalize_quantization_config).
_MODELOPT: Final = {
    "FP8": "modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "modelopt", "FP8_PB_WO": "modelopt", "NVFP4": "modelopt_fp4",
    "MXFP8": "modelopt_mxfp8", "MIXED_PRECISION": "modelopt_mixed",
}  # fmt: skip
_FP8_BITS: Final = 8
_MODELOPT_METHOD: Final = "modelopt"


def quantization_of(config: Json) -> Json:
    """The quantization of a checkpoint, in the file's own keys; empty where it has none."""
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    for key in ("quantization_config", "compression_config"):
        for part in parts:
            if isinstance(found := part.get(key), dict) and found:
                return found
    return {}


def method_of(quantization: Json) -> str | None:
    """quant_method as vLLM names it; None where the checkpoint is not quantized, or vLLM does not see that it is."""
    named = quantization.get("quant_method")
    method = (
        named.lower().replace("compressed_tensors", "compressed-tensors") if isinstance(named, str) else ""
    )
    algorithm = str(_inner(quantization).get("quant_algo") or "").upper()
    if method in {"", _MODELOPT_METHOD}:
        return _MODELOPT.get(algorithm, method or None)
    return method


def kv_cache_dtype(quantization: Json) -> str:
    """The type that --kv-cache-dtype auto means for a checkpoint: "fp8" where its quantization sets it, else "auto".

    vllm/utils/torch_utils.py, get_kv_cache_quant_algo_string."""
    by_name = (method_of(quantization) or "").startswith(_MODELOPT_METHOD)
    for part in (_inner(quantization), quantization):
        scheme = part.get("kv_cache_scheme")
        if isinstance(scheme, dict) and scheme.get("type") == "float" and scheme.get("num_bits") == _FP8_BITS:
            return "fp8"
        algorithm = scheme if isinstance(scheme, str) and by_name else part.get("kv_cache_quant_algo")
        if str(algorithm).upper() == "FP8":
            return "fp8"
    return "auto"


def _inner(quantization: Json) -> Json:
    inner = quantization.get("quantization")
    return inner if isinstance(inner, dict) else {}


# --- Models that vLLM 0.32's CPU backend cannot build, by their description alone. ---

_UNGATED_ACTIVATIONS: Final = frozenset({"relu2", "relu_squared", "squared_relu"})
_TRITON_MODELS: Final = frozenset({"olmo_hybrid"})
_EXPERTS: Final = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
_PACKED_BITS: Final = 4
_PACKED_STEP: Final = 32


def gap_of(its: Description, method: str | None) -> str | None:
    """The part of the model that the CPU backend has no kernel for; None where none is known to be missing."""
    return next(_gaps(its, method), None)


def _gaps(its: Description, method: str | None) -> Iterator[str]:
    text = its.text
    if _number(text.get("index_topk")):
        yield "sparse attention (index_topk): v1/attention/backends has none for CPU"
    if method in {"modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"} or _is_float4(
        quantization_of(its.config)
    ):
        yield "NVFP4 or MXFP8 weights: model_executor/kernels/linear has no kernel for CPU"
    experts = any(_number(text.get(key)) for key in _EXPERTS)
    if experts and str(text.get("mlp_hidden_act", "")).lower() in _UNGATED_ACTIVATIONS:
        yield "experts without a gate (mlp_hidden_act): fused_moe has them for CUDA, ROCm and XPU only"
    if "linear_attn_config" in text:
        yield "Kimi delta attention (linear_attn_config): it needs cutlass"
    if its.model_type in _TRITON_MODELS:
        yield "layers that need triton"
    bits = _number(quantization_of(its.config).get("bits"))
    if method in {"awq", "gptq"}:
        # model_executor/kernels/linear/mixed_precision/cpu.py: widths of 4 bits, outputs in multiples of 32
        if bits and bits != _PACKED_BITS:
            yield f"packed weights of {bits} bits: the CPU has a kernel for {_PACKED_BITS}"
        if _number(text.get("linear_num_value_heads")) % _PACKED_STEP:
            yield "packed projections whose width (linear_num_value_heads) is no multiple of 32"


def _number(value: object) -> int:
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else 0


def _is_float4(quantization: Json) -> bool:
    """compressed-tensors with floating-point weights of 4 bits."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and weights.get("type") == "float" and weights.get("num_bits") == 4:
            return True
    return False
