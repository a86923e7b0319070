"""Quantization of checkpoints, and gaps of the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.models.cpu_backend import gap_of, kv_cache_dtype, method_of, quantization_of
from launcher.models.description import describe

FP8_SCHEME = {"type": "float", "num_bits": 8, "dynamic": False}


@pytest.mark.parametrize(
    ("quantization", "method", "kv_type"),
    [
        ({"quant_method": "awq"}, "awq", "auto"),
        ({"quant_method": "compressed_tensors", "kv_cache_scheme": FP8_SCHEME}, "compressed-tensors", "fp8"),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8"}, "modelopt", "fp8"),
        ({"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, "modelopt", "fp8"),
        ({"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None}}, "modelopt_fp4", "auto"),
        # vLLM sees no method here, and loads it as not quantized.
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP8", "producer": {"name": "modelopt"}}, None, "auto"),
        ({"quant_method": 8, "kv_cache_scheme": [3], "quantization": "x"}, None, "auto"),
        ({}, None, "auto"),
    ],
)
def test_methods(quantization: dict[str, Any], method: str | None, kv_type: str) -> None:
    assert method_of(quantization) == method
    assert kv_cache_dtype(quantization) == kv_type


def test_places_of_the_quantization() -> None:
    its = {"quant_method": "gptq"}
    assert quantization_of({"quantization_config": its}) == its
    assert quantization_of({"text_config": {"quantization_config": its}}) == its
    assert quantization_of({"compression_config": its}) == its
    assert quantization_of({"quantization_config": "gptq", "text_config": None}) == {}


@pytest.mark.parametrize(
    ("config", "gap"),
    [
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "sparse attention"),
        ({"model_type": "glm_moe_dsa", "index_topk": 2048}, "sparse attention"),
        ({"model_type": "nemotron_h", "n_routed_experts": 128, "mlp_hidden_act": "relu2"}, "without a gate"),
        ({"model_type": "nemotron_h", "n_routed_experts": 0, "mlp_hidden_act": "relu2"}, None),
        ({"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 4}}, "cutlass"),
        ({"model_type": "llama", "quantization_config": {"quantization": {"quant_algo": "NVFP4"}}}, "NVFP4"),
        (
            {"quantization_config": {"config_groups": {"g": {"weights": {"type": "float", "num_bits": 4}}}}},
            "NVFP4",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, "8 bits"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None),
        ({"model_type": "deepseek_v3"}, None),
        ({"model_type": "llama", "index_topk": "x", "quantization_config": {"config_groups": 3}}, None),
    ],
)
def test_gaps(config: dict[str, Any], gap: str | None) -> None:
    its = describe(config)
    found = gap_of(its, method_of(quantization_of(its.config)))
    assert found is None if gap is None else found is not None and gap in found
