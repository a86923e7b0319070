"""Configurations as models have them, down to the layers that keep something."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.models.layers import KvLayers, LayerKind, first, layers_of

BASE = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
WINDOW = BASE | {"sliding_window": 128}


def counts(config: dict[str, Any]) -> dict[str, int]:
    return {its.kind.value: its.count for its in layers_of(config, config, 2)}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BASE, {"full": 4}),
        (WINDOW, {"sliding": 4}),
        (WINDOW | {"sliding_window": 0}, {"full": 4}),
        (WINDOW | {"use_sliding_window": False}, {"full": 4}),
        (WINDOW | {"use_sliding_window": True, "max_window_layers": 3}, {"full": 3, "sliding": 1}),
        (WINDOW | {"model_type": "gemma2"}, {"full": 2, "sliding": 2}),
        (WINDOW | {"sliding_window_pattern": 4}, {"full": 1, "sliding": 3}),
        (WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}, {"full": 1, "sliding": 1}),
        (BASE | {"layer_types": ["sliding_attention", "full_attention"]}, {"full": 2}),
        (BASE | {"layer_types": ["chunked_attention", "full_attention"]}, {"full": 2}),
        (BASE | {"layer_types": ["linear_attention", "full_attention", "mlp"]}, {"full": 1, "state": 1}),
        (BASE | {"layers_block_type": ["mamba", "hybrid"]}, {"full": 1, "state": 1}),
        (BASE | {"hybrid_override_pattern": "M-M*-"}, {"full": 1, "state": 2}),
        (BASE | {"attn_layer_period": 4, "attn_layer_offset": 1}, {"full": 1, "state": 3}),
        (BASE | {"model_type": "mamba2"}, {"state": 4}),
        ({"model_type": "bert"} | BASE, {}),
        ({"model_type": "bert", "is_decoder": True} | BASE, {"full": 4}),
    ],
)  # fmt: skip
def test_kinds(config: dict[str, Any], expected: dict[str, int]) -> None:
    assert counts(config) == expected


@pytest.mark.parametrize(
    ("config", "heads", "head_bytes"),
    [
        (BASE, 4, 2 * 64 * 2),
        (BASE | {"num_key_value_heads": 2, "head_dim": 128}, 2, 2 * 128 * 2),
        (BASE | {"multi_query_group_num": 1}, 1, 2 * 64 * 2),
        (BASE | {"multi_query": True, "num_kv_heads": 4}, 1, 2 * 64 * 2),
        (BASE | {"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2, 2 * 64 * 2),
        (BASE | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 1, 576 * 2),
        (BASE | {"kv_lora_rank": 512}, 1, 512 * 2),
    ],
)
def test_heads(config: dict[str, Any], heads: int, head_bytes: int) -> None:
    assert layers_of(config, config, 2) == (KvLayers(LayerKind.FULL, 4, heads, head_bytes),)


def test_gemma_4_has_wider_full_layers() -> None:
    config = WINDOW | {
        "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 4,
        "global_head_dim": 512, "num_global_key_value_heads": 2,
    }  # fmt: skip
    full, sliding = layers_of(config, config, 2)
    assert (full.heads, full.head_bytes) == (2, 2 * 512 * 2)
    assert (sliding.heads, sliding.head_bytes, sliding.window) == (4, 2 * 64 * 2, 128)


@pytest.mark.parametrize(
    ("config", "state_bytes"),
    [
        # Qwen3-Next: MambaStateShapeCalculator.gated_delta_net_state_shape
        (
            {
                "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
                "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
            },
            (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 4,
        ),
        # Mamba 2: mamba2_state_shape
        (
            {"mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1},
            (48 * 64 + 2 * 128) * 3 * 2 + 48 * 64 * 128 * 4,
        ),
        # Mamba 1: mamba1_state_shape
        ({"mamba_d_state": 16, "mamba_expand": 2}, 512 * 3 * 2 + 512 * 16 * 4),
        ({"state_size": 16, "conv_kernel": 4, "intermediate_size": 1024}, 1024 * 3 * 2 + 1024 * 16 * 4),
        ({"state_size": 16, "expand": 3}, 768 * 3 * 2 + 768 * 16 * 4),
        ({}, 0),
    ],
)  # fmt: skip
def test_states(config: dict[str, Any], state_bytes: int) -> None:
    both = {"num_hidden_layers": 2, "hidden_size": 256, "layer_types": ["mamba", "mamba"]} | config
    assert layers_of(both, both, 2) == (KvLayers(LayerKind.STATE, 2, state_bytes=state_bytes),)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({}, "num_hidden_layers"),
        ({"num_hidden_layers": 2}, "num_attention_heads"),
        ({"num_hidden_layers": 2, "num_attention_heads": 2}, "hidden_size"),
        (
            {"is_encoder_decoder": True, "decoder_layers": 2},
            "decoder_layers, decoder_attention_heads or d_model",
        ),
    ],
)
def test_what_is_missing_is_named(config: dict[str, Any], missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        layers_of(config, config, 2)


def test_minus_one_says_none() -> None:
    assert first({"sliding_window": -1}, "sliding_window") is None
    assert first({"n_head": -1, "num_heads": 3}, "n_head", "num_heads") == 3
    assert counts(BASE | {"sliding_window": -1}) == {"full": 4}
