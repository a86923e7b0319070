"""The longest context of a model, and descriptions damaged in any way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.models.description import describe
from launcher.models.profile import Beside, max_model_len, profile_of

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256}
LINEAR = {"type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"model_type": "gemma3_text"}, 131072),
        ({"model_type": "llama", "max_position_embeddings": None}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": LINEAR}, 32768),
        ({"model_type": "gemma3_text", "max_position_embeddings": 131072, "rope_scaling": LINEAR}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", "factor": 4}}, 4096),
        (
            {"max_position_embeddings": 4096, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": {}}},
            32768,
        ),
        ({"max_position_embeddings": 4096, "rope_scaling": LINEAR | {"factor": None}}, 4096),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope"},
          "original_max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({}, None),
    ],
)  # fmt: skip
def test_lengths(config: dict[str, Any], length: int | None) -> None:
    assert max_model_len(describe(SIZES | config)) == length


def test_lengths_of_embedding_models() -> None:
    roberta = {
        "model_type": "xlm-roberta",
        "max_position_embeddings": 514,
        "position_embedding_type": "absolute",
    }
    tokenizer = {"model_max_length": 512}
    assert max_model_len(describe(SIZES | roberta)) == 514
    assert max_model_len(describe(SIZES | roberta), Beside(tokenizer=tokenizer)) == 512
    assert max_model_len(describe(SIZES | roberta), Beside(encoder={"max_seq_length": 256})) == 256
    assert (
        max_model_len(describe(SIZES | {"max_position_embeddings": 514}), Beside(tokenizer=tokenizer)) == 514
    )


KEYS = st.sampled_from([
    "architectures", "model_type", "text_config", "thinker_config", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_size", "sliding_window", "layer_types", "rope_scaling", "rope_parameters",
    "quantization_config", "compression_config", "block_configs", "linear_attn_config", "per_layer_config",
    "attn_layer_indices", "full_attn_idxs", "hybrid_override_pattern", "hybrid_layer_pattern", "attn_type_list",
    "kv_lora_rank", "compress_ratios", "max_position_embeddings", "num_kv_shared_layers", "is_encoder_decoder",
    "attn_config", "full_attention_interval", "attn_layer_period", "vocab_size", "linear_num_value_heads",
])  # fmt: skip
KINDS = st.sampled_from(
    ["gemma3", "gemma4", "qwen3_next", "nemotron-nas", "kimi_linear", "bert", "x", "whisper", "mamba2"]
)
LEAVES = st.none() | st.booleans() | st.integers(-3, 10**13) | st.floats() | st.text(max_size=4) | KINDS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)


@given(st.dictionaries(KEYS, VALUES, max_size=6), KINDS)
def test_nothing_leaves_the_reading(damage: dict[str, Any], kind: str) -> None:
    """A damaged description gives a profile: of sizes, or with the reason why there are none."""
    config = SIZES | {"model_type": kind} | damage
    profile = profile_of(config, "bfloat16", weights_bytes=64, weights_source="w")
    assert profile.weights_bytes == 64
    assert profile.known == (profile.unread is None)
