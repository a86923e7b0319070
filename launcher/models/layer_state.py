"""The state that each layer keeps per token or sequence, from a model's description. Pure.

Rules follow vLLM 0.32: transformers_utils/model_arch_config_convertor.py, model_executor/models/,
model_executor/layers/mamba/mamba_utils.py, v1/kv_cache_interface.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.models.description import Description
from launcher.models.layer_kinds import LISTS, MAMBA_MODELS, Kinds, block, kinds_of
from launcher.models.layers import (
    MAX_LAYERS,
    KvLayers,
    LayerKind,
    UnreadError,
    attention_heads,
    first,
    hidden_size,
    kv_heads,
)
from launcher.models.projections import Projection, Projections

Json = Mapping[str, Any]

# Bidirectional models such as BERT keep nothing between steps (attention.py: ENCODER_ONLY).
_ENCODERS: Final = (
    "bert", "roberta", "modernbert", "nomic", "xlm-roberta", "distilbert", "electra", "gte", "siglip", "embedding_gemma",
)  # fmt: skip
# vLLM keeps a latent for these only (model_arch_config_convertor.py, is_deepseek_mla); others with kv_lora_rank expand
# it to keys and values of all heads.
_LATENT_MODELS: Final = frozenset({
    "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots3_note", "deepseek_mtp",
    "k3_dspark", "glm5_next", "glm5_next_text", "glm_moe_dsa", "glm4_moe_lite", "glm4_moe_lite_mtp", "kimi_k2",
    "kimi_linear", "longcat_flash", "pangu_ultra_moe", "pangu_ultra_moe_mtp", "bailing_hybrid", "bailing_hybrid_mtp",
    "bailing_hybrid_v3_mtp", "hy_v4", "hy_v4_mtp",
})  # fmt: skip
_GLOBAL_HEAD_MODELS: Final = ("gemma4", "diffusion_gemma")
_GLOBAL_HEAD: Final = 512
"""transformers' Gemma4TextConfig, where config.json has no global_head_dim."""


class Shape(Struct, frozen=True):
    """Attention of one layer: KV heads, and elements of a key and of a value of one head."""

    heads: int
    key: int
    value: int


def layers_of(
    its: Description, element_bytes: int, projections: Projections | None = None
) -> tuple[KvLayers, ...]:
    """The layers that keep state.

    1. Encoders keep nothing; decoders of encoder-decoder models keep their own tokens and the encoder's.
    2. Each layer has the kinds that `kinds_of` finds; the last `num_kv_shared_layers` use those of others.
    3. A layer with attention keeps 2 x KV heads x head size, or one latent; a recurrent layer one state. The widths of
       its projections go before those of the description.

    Raises UnreadError naming the key that is missing."""
    if is_encoder(its):
        return ()
    if its.has_encoder:
        return _decoder(its.text, element_bytes)
    widths = projections or {}
    kinds = _kept(its, widths)
    states = any(LayerKind.STATE in own for own in kinds)
    state = _state(its, element_bytes) if states else None
    found: dict[KvLayers, int] = {}
    for index, own in enumerate(kinds):
        for kind in own:
            attention = kind is not LayerKind.STATE
            one = _attention(its, index, kind, element_bytes, widths.get(index)) if attention else state
            if one is not None:
                found[one] = found.get(one, 0) + 1
    order = list(LayerKind)
    each = [replace(one, count=count) for one, count in found.items()]
    return tuple(sorted(each, key=lambda layers: order.index(layers.kind)))


def are_proved(its: Description, projections: Projections) -> bool:
    """Whether the weights show the widths of every layer that keeps tokens."""
    if not projections or is_encoder(its) or its.has_encoder:
        return False
    keep = [index for index, own in enumerate(_kept(its, projections)) if set(own) - {LayerKind.STATE}]
    latent = is_latent(its)
    shown = (projections.get(index, Projection()) for index in keep)
    return bool(keep) and all(one.latent if latent else one.key for one in shown)


def _kept(its: Description, projections: Projections) -> list[Kinds]:
    """Kinds of the layers that keep something of their own.

    Of a class that is not known, layers without projections beside others that have them keep no tokens."""
    kinds = kinds_of(its)
    kinds = kinds[: max(0, len(kinds) - (first(its.text, "num_kv_shared_layers") or 0))]
    if its.known or not projections or LISTS & its.given:
        return kinds
    return [own if index in projections else () for index, own in enumerate(kinds)]


def is_encoder(its: Description) -> bool:
    """Whether the model only embeds or scores."""
    if its.config.get("is_decoder") or its.has_encoder:
        return False
    kind = str(its.config.get("model_type", "")).lower()
    return any(kind.startswith(name) for name in _ENCODERS)


def is_latent(its: Description) -> bool:
    """Whether vLLM keeps one latent of a token instead of keys and values."""
    if its.model_type not in _LATENT_MODELS:
        return False
    key = "head_dim" if "compress_ratios" in its.text else "kv_lora_rank"
    return its.text.get(key) is not None


def shape_of(its: Description, index: int = 0, kind: LayerKind = LayerKind.FULL) -> Shape:
    """Attention of the layer with this index.

    Raises UnreadError naming the key that is missing."""
    text = its.text
    if is_latent(its):
        if "compress_ratios" in text:
            return Shape(1, first(text, "head_dim") or 0, 0)
        return Shape(1, (first(text, "kv_lora_rank") or 0) + (first(text, "qk_rope_head_dim") or 0), 0)
    heads, hidden = attention_heads(text), hidden_size(text)
    if not heads:
        raise UnreadError("config.json has no num_attention_heads")
    rope, nope = first(text, "qk_rope_head_dim"), first(text, "qk_nope_head_dim")
    if first(text, "kv_lora_rank") and rope and nope:
        return Shape(heads, rope + nope, rope + nope)
    size = first(text, "attention_head_dim", "head_dim", "hidden_size_per_head")
    if not size and not hidden:
        raise UnreadError("config.json has no hidden_size")
    size = size or (hidden or 0) // heads
    return _varied(its, index, kind, Shape(kv_heads(text, heads), size, size), heads)


def _varied(its: Description, index: int, kind: LayerKind, usual: Shape, heads: int) -> Shape:
    """The shape of one layer, in models whose layers differ."""
    text, key, few = its.text, usual.key, usual.heads
    value = key
    if its.model_type.startswith(_GLOBAL_HEAD_MODELS) or "global_head_dim" in text:
        if kind is LayerKind.FULL:
            key = value = first(text, "global_head_dim") or _GLOBAL_HEAD
            if text.get("attention_k_eq_v", True):
                few = first(text, "num_global_key_value_heads") or few
    elif "hybrid_layer_pattern" in text:
        sliding = kind is LayerKind.SLIDING
        value = first(text, *(("swa_v_head_dim",) if sliding else ()), "v_head_dim") or key
        if sliding:
            key, few = first(text, "swa_head_dim") or key, first(text, "swa_num_key_value_heads") or few
    elif (group := block(text, index).get("n_heads_in_group")) and isinstance(group, int):
        few = max(1, heads // group)
    if layer := _own(text, index):
        few = first(layer, "num_key_value_heads") or few
        key = value = first(layer, "head_dim") or key
    return Shape(few, key, value)


def _own(text: Json, index: int) -> Json:
    """The layer's entry in per_layer_config, whose keys are numbers, with zeros in front or without."""
    entries = text.get("per_layer_config")
    if not isinstance(entries, dict):
        return {}
    spelled = (f"{index:0{digits}}" for digits in range(1, len(str(MAX_LAYERS))))
    return next((own for key in spelled if isinstance(own := entries.get(key), dict)), {})


def _attention(
    its: Description, index: int, kind: LayerKind, element_bytes: int, widths: Projection | None
) -> KvLayers:
    shape = shape_of(its, index, kind)
    if widths is not None:
        shape = _shown(shape, widths, latent=is_latent(its))
    window = None
    if kind is LayerKind.SLIDING:
        window = first(its.text, "sliding_window", "sliding_window_size")
    elif kind is LayerKind.CHUNKED:
        window = first(its.text, "attention_chunk_size")
    return KvLayers(
        kind, 1, shape.heads, (shape.key + shape.value) * element_bytes, window, head_size=shape.key
    )


def _shown(shape: Shape, widths: Projection, *, latent: bool) -> Shape:
    """The shape that the projections have: other heads of the same size, else as many of another size."""
    if latent:
        return Shape(1, widths.latent, 0) if widths.latent else shape
    heads, key, value = shape.heads, shape.key, shape.value
    if widths.key and widths.key != heads * key:
        if widths.key % key == 0:
            heads = widths.key // key
        elif widths.key % heads == 0:
            key = widths.key // heads
    if widths.value and widths.value % heads == 0:
        value = widths.value // heads
    return Shape(heads, key, value)


def _decoder(text: Json, element_bytes: int) -> tuple[KvLayers, ...]:
    count, heads, hidden = (
        first(text, "decoder_layers", "num_hidden_layers"),
        first(text, "decoder_attention_heads") or attention_heads(text),
        hidden_size(text),
    )
    if not count or not heads or not hidden:
        raise UnreadError("config.json has no decoder_layers, decoder_attention_heads or d_model")
    size = hidden // heads
    own = KvLayers(LayerKind.FULL, count, heads, 2 * size * element_bytes, head_size=size)
    return own, KvLayers(LayerKind.CROSS, count, heads, own.head_bytes, head_size=size)


# --- Recurrent states. ---

STATE_BYTES: Final = 4
"""Recurrent states are float32 on CPU, or the model's type, which is smaller (platforms/cpu.py)."""
# States that a sequence holds at most: one without prefix caching, which models without attention do not have; with it
# two, and one more where the layers save states within a step (mamba_mixer2.py, num_prefill_checkpoint_blocks).
_ALONE, _CACHED, _CHECKPOINTED = 1, 2, 3


def _state(its: Description, element_bytes: int) -> KvLayers:
    size, second = _state_bytes(its.text, element_bytes)
    blocks = _ALONE if its.model_type in MAMBA_MODELS else _CHECKPOINTED if second else _CACHED
    return KvLayers(LayerKind.STATE, 1, state_bytes=size, state_blocks=blocks)


def _state_bytes(text: Json, element_bytes: int) -> tuple[int, bool]:
    """Bytes of one layer's state of one sequence (a short convolution and a recurrent part; 0 when not known), and
    whether it is Mamba 2's."""
    hidden = hidden_size(text) or 0
    if value_heads := first(text, "linear_num_value_heads"):  # gated delta net: Qwen3-Next
        key_heads = first(text, "linear_num_key_heads") or value_heads
        key = first(text, "linear_key_head_dim") or 0
        value = first(text, "linear_value_head_dim") or key
        convolution = (2 * key_heads * key + value_heads * value) * (
            (first(text, "linear_conv_kernel_dim") or 1) - 1
        )
        return convolution * element_bytes + value_heads * value * key * STATE_BYTES, False
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict):  # Kimi delta attention
        heads, head = first(linear, "num_heads") or 0, first(linear, "head_dim") or 0
        taps = (first(linear, "short_conv_kernel_size") or 4) - 1
        return heads * head * (3 * taps * element_bytes + head * STATE_BYTES), False
    if taken := first(text, "conv_L_cache"):  # LFM2
        return (first(text, "conv_dim") or hidden) * (taken - 1) * element_bytes, False
    return _mamba_bytes(text, hidden, element_bytes)


def _mamba_bytes(text: Json, hidden: int, element_bytes: int) -> tuple[int, bool]:
    size = first(text, "mamba_d_state", "ssm_state_size", "state_size")
    if size is None:
        return 0, False
    kernel = (first(text, "mamba_d_conv", "conv_kernel") or 4) - 1
    heads = first(text, "mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "num_heads")
    if heads:  # Mamba 2
        wide = hidden * (first(text, "mamba_expand", "expand") or 2)
        head = first(text, "mamba_d_head", "mamba_headdim", "mamba_head_dim", "head_dim") or wide // heads
        groups = first(text, "mamba_n_groups", "mamba_ngroups", "n_groups") or 1
        convolution = (heads * head + 2 * groups * size) * kernel * element_bytes
        return convolution + heads * head * size * STATE_BYTES, True
    inner = first(text, "mamba_d_ssm", "intermediate_size") if not first(text, "mamba_expand") else None
    inner = inner or hidden * (first(text, "mamba_expand", "expand") or 2)
    return inner * kernel * element_bytes + inner * size * STATE_BYTES, False
