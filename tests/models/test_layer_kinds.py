"""Kinds of layers under all the keys that models use for them."""

from __future__ import annotations

from typing import Any

import pytest

from launcher.models.description import describe
from launcher.models.layer_kinds import kinds_of

SIZES = {"num_hidden_layers": 8, "num_attention_heads": 4, "hidden_size": 256}


def letters(config: dict[str, Any]) -> str:
    """One character for each layer: f full, w sliding, c chunked, s state, b attention and state, - none."""
    names = {"": "-", "full": "f", "sliding": "w", "chunked": "c", "state": "s", "full state": "b"}
    return "".join(names[" ".join(own)] for own in kinds_of(describe(config)))


NAS = [
    {"attention": {"no_op": i > 4, "n_heads_in_group": 2, "replace_with_linear": i == 0}} for i in range(8)
]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # computed by the configuration class
        ({"model_type": "gemma3_text"}, "wwwwwfww"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 4}, "wwwfwwwf"),
        ({"model_type": "gemma4_text"}, "wwwwwfwf"),
        ({"model_type": "qwen3_next"}, "sssfsssf"),
        ({"model_type": "qwen3_next", "full_attention_interval": 2}, "sfsfsfsf"),
        ({"model_type": "qwen3_next", "full_attention_interval": 2**40}, "ssssssss"),
        ({"model_type": "olmo3"}, "wwwfwwwf"),
        ({"model_type": "llama4_text"}, "cccfcccf"),
        ({"model_type": "falcon_h1"}, "bbbbbbbb"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, "ffffffff"),
        # named by the file
        ({"model_type": "llama4_text", "layer_types": ["full_attention"] * 8}, "ffffffff"),
        ({"layer_types": ["full_attention"] * 9}, "ffffffff"),
        ({"block_configs": NAS}, "-ffff---"),
        (
            {"block_configs": [{"block_type": "mamba"}, {"block_type": "moe"}, {"block_type": "attention"}]},
            "s-f",
        ),
        ({"model_type": "kimi_linear", "linear_attn_config": {"full_attn_layers": [4, 8]}}, "sssfsssf"),
        ({"attn_type_list": [0, 0, 1, 0, 0, 1]}, "ssfssf"),
        ({"attn_layer_indices": [2, 5]}, "ssfssfss"),
        ({"full_attn_idxs": [0]}, "fsssssss"),
        ({"hybrid_layer_pattern": [0, 1, 1, 0], "sliding_window_size": 128}, "fwwf"),
        ({"hybrid_override_pattern": "M-M*-"}, "s-sf-"),
        # broken lists
        ({"block_configs": [3, None, {"attention": 4}]}, "fff"),
        ({"layer_types": [None, 4]}, "--"),
        ({"linear_attn_config": "x", "attn_layer_indices": "y", "layer_types": {}}, "ffffffff"),
    ],
)
def test_kinds(config: dict[str, Any], expected: str) -> None:
    assert letters(SIZES | config) == expected
