"""Configurations as models have them, down to the layers that keep something."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.models.description import describe
from launcher.models.layer_state import layers_of
from launcher.models.layers import LayerKind, first

BASE = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4}
LATENT = BASE | {"model_type": "deepseek_v2", "kv_lora_rank": 512}
WINDOW = BASE | {"sliding_window": 128}


def counts(config: dict[str, Any]) -> dict[str, int]:
    return {its.kind.value: its.count for its in layers_of(describe(config), 2)}


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
        (BASE | {"layers_block_type": ["mamba", "hybrid"]}, {"full": 1, "state": 2}),
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
        (LATENT | {"qk_rope_head_dim": 64}, 1, 576 * 2),
        (LATENT | {"qk_rope_head_dim": None}, 1, 512 * 2),
        # MiniCPM3: vLLM expands its latent to all heads
        (LATENT | {"model_type": "minicpm3", "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}, 4, 2 * 96 * 2),
        (BASE | {"attention_head_dim": 128}, 4, 2 * 128 * 2),
    ],
)
def test_heads(config: dict[str, Any], heads: int, head_bytes: int) -> None:
    (found,) = layers_of(describe(config), 2)
    assert (found.kind, found.count, found.heads, found.head_bytes) == (LayerKind.FULL, 4, heads, head_bytes)


def test_gemma_4_has_wider_full_layers() -> None:
    config = WINDOW | {
        "layer_types": ["sliding_attention", "full_attention"], "num_key_value_heads": 4,
        "global_head_dim": 512, "num_global_key_value_heads": 2,
    }  # fmt: skip
    full, sliding = layers_of(describe(config), 2)
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
    (found,) = layers_of(describe(both), 2)
    assert (found.kind, found.count, found.state_bytes) == (LayerKind.STATE, 2, state_bytes)


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
        layers_of(describe(config), 2)


def test_minus_one_says_none() -> None:
    assert first({"sliding_window": -1}, "sliding_window") is None
    assert first({"n_head": -1, "num_heads": 3}, "n_head", "num_heads") == 3
    assert counts(BASE | {"sliding_window": -1}) == {"full": 4}


@pytest.mark.parametrize(
    ("config", "blocks"),
    [
        ({"model_type": "mamba2"}, 1),
        ({"model_type": "falcon_h1"}, 3),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba"] * 4}, 3),
        ({"model_type": "qwen3_next"}, 2),
        ({"model_type": "lfm2", "full_attn_idxs": [1]}, 2),
    ],
)
def test_states_that_a_request_holds(config: dict[str, Any], blocks: int) -> None:
    (*_, state) = layers_of(describe(BASE | config), 2)
    assert state.kind is LayerKind.STATE
    assert state.state_blocks == blocks
    assert state.state_bytes > 0


def test_the_last_layers_use_the_cache_of_others() -> None:
    shared = {"model_type": "gemma4_text", "num_hidden_layers": 12, "num_kv_shared_layers": 6}
    full, sliding = layers_of(describe(BASE | shared), 2)
    assert (full.count, sliding.count) == (1, 5)


def test_per_layer_configurations() -> None:
    own = {"05": {"head_dim": 512, "num_key_value_heads": 2}}
    config = BASE | {
        "model_type": "gemma4_text",
        "num_hidden_layers": 6,
        "head_dim": 256,
        "per_layer_config": own,
    }
    full, sliding = layers_of(describe(config), 2)
    assert (full.heads, full.head_size) == (2, 512)
    assert (sliding.heads, sliding.head_size) == (4, 256)


def test_heads_of_pruned_layers() -> None:
    blocks = [{"attention": {"n_heads_in_group": group}} for group in (1, 4, 2, 4)]
    found = layers_of(describe(BASE | {"block_configs": blocks, "num_key_value_heads": None}), 2)
    assert {its.heads: its.count for its in found} == {4: 1, 1: 2, 2: 1}


def test_sliding_layers_with_heads_of_their_own() -> None:
    config = WINDOW | {
        "hybrid_layer_pattern": [0, 1, 1, 1], "num_key_value_heads": 2, "head_dim": 192, "v_head_dim": 128,
        "swa_num_key_value_heads": 4, "swa_head_dim": 192, "swa_v_head_dim": 128,
    }  # fmt: skip
    full, sliding = layers_of(describe(config), 2)
    assert (full.heads, full.head_bytes) == (2, 320 * 2)
    assert (sliding.heads, sliding.head_bytes) == (4, 320 * 2)


def test_chunked_layers() -> None:
    full, chunked = layers_of(describe(BASE | {"model_type": "llama4_text"}), 2)
    assert (full.count, chunked.count, chunked.kind, chunked.window) == (1, 3, LayerKind.CHUNKED, 8192)
