"""A profile that takes the figures of the engine's own answer."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from launcher.models.answer import Answer, AnsweredLayers, with_answer
from launcher.models.layers import KvLayers, LayerKind
from launcher.models.profile import ModelProfile

READ = ModelProfile(
    weights_bytes=100, kv_bytes_per_token=4096, max_model_len=None, num_attention_heads=8, num_kv_heads=8,
    layers=(KvLayers(LayerKind.FULL, 1, 8, 512, head_size=128),), sources=("config", "assumed"), quantization="awq",
    assumed=("max_position_embeddings", "head_dim"), cpu_gap="sparse attention", class_gap="no class",
)  # fmt: skip
BUILT = Answer(
    max_model_len=1000, heads=16, kv_heads=2, request_bytes=7, step_tokens=2048, element_bytes=2, weights_bytes=900,
    layers=(
        AnsweredLayers(kind=LayerKind.STATE, count=3, state_bytes=11, state_blocks=1),
        AnsweredLayers(kind=LayerKind.FULL, count=2, heads=2, head_bytes=1024, head_size=256),
    ),
)  # fmt: skip


def test_a_class_that_was_built_replaces_all_that_was_read_or_assumed() -> None:
    its = with_answer(READ, BUILT, "vLLM 9")
    assert its.layers == (
        KvLayers(LayerKind.FULL, 2, 2, 1024, head_size=256),
        KvLayers(LayerKind.STATE, 3, 1, 0, state_bytes=11, state_blocks=1),
    )
    assert (its.max_model_len, its.weights_bytes, its.kv_bytes_per_token) == (1000, 900, 4096)
    assert (its.num_attention_heads, its.num_kv_heads) == (16, 2)
    assert (its.sources, its.assumed, its.cpu_gap, its.class_gap) == (("engine",), (), None, None)
    assert its.asked
    assert not READ.asked
    assert its.quantization == "awq"
    assert its.engine_request is not None
    assert (its.engine_request.tokens, its.engine_request.request_bytes) == (1000, 7)


def test_a_description_that_could_not_be_read_is_known_now() -> None:
    unread = ModelProfile(100, None, None, unread="no num_hidden_layers")
    its = with_answer(unread, replace(BUILT, quantization="fp8"), "vLLM 9")
    assert its.known
    assert its.unread is None
    assert its.quantization == "fp8"


def test_an_encoder_keeps_nothing() -> None:
    its = with_answer(READ, Answer(max_model_len=512, heads=8, request_bytes=0, weights_bytes=9), "vLLM 9")
    assert its.known
    assert (its.layers, its.kv_bytes_per_token, its.num_kv_heads) == ((), 0, None)


def test_a_cache_of_eight_bits_counts_in_the_type_of_the_profile() -> None:
    layers = (AnsweredLayers(kind=LayerKind.FULL, count=1, heads=2, head_bytes=256, head_size=128),)
    its = with_answer(READ, replace(BUILT, element_bytes=1, layers=layers), "vLLM 9")
    assert its.layers[0].head_bytes == 512
    assert its.kv_cache_dtype == "fp8"
    assert with_answer(READ, BUILT, "vLLM 9").kv_cache_dtype == "auto"


@pytest.mark.parametrize("no_kernel", [True, False])
def test_a_class_that_was_not_built_changes_the_length_alone(no_kernel: bool) -> None:
    answer = Answer(max_model_len=1000, unbuilt="ValueError: x", no_kernel=no_kernel)
    its = with_answer(READ, answer, "vLLM 9")
    assert (its.max_model_len, its.layers, its.weights_bytes) == (1000, READ.layers, 100)
    assert its.sources == ("config", "assumed", "engine")
    assert its.assumed == ("head_dim",)
    gap, trouble = ("no kernel, as vLLM 9 says: ValueError: x", None), ("sparse attention", "ValueError: x")
    assert (its.cpu_gap, its.engine_trouble) == (gap if no_kernel else trouble)


def test_an_engine_that_refuses_or_was_not_heard_changes_no_figure() -> None:
    refused = with_answer(READ, Answer(refused="ValueError: y"), "vLLM 9")
    assert refused == replace(READ, engine_refusal="vLLM 9: ValueError: y")
    assert with_answer(READ, Answer(failed="late"), "vLLM 9") == replace(READ, engine_trouble="late")


@pytest.mark.parametrize(
    "text", [b'{"request_bytes": -1}', b'{"layers": [{"kind": "full", "count": 0}]}', b'{"heads": 1e30}']
)
def test_numbers_that_are_no_sizes_are_no_answer(text: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Answer)
