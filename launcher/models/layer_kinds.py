"""Kinds of a model's layers: attention to all tokens, to the last ones, a recurrent state, or none. Pure.

Key names follow vLLM 0.32 (model_executor/models/) and transformers 5, whose configuration classes compute
`layer_types` where config.json has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from launcher.models.description import Description
from launcher.models.layers import MAX_LAYERS, LayerKind, UnreadError, first, layer_count, listed, window_of

Json = Mapping[str, Any]

_STATE_WORDS: Final = ("mamba", "linear", "recurrent", "conv", "ssm", "rwkv", "deltanet")
MAMBA_MODELS: Final = frozenset({"mamba", "mamba2", "falcon_mamba"})
_BOTH_MODELS: Final = frozenset({"falcon_h1"})

Kinds = tuple[LayerKind, ...]
"""Kinds of one layer: attention, a state, both, or none."""
_FULL: Final[Kinds] = (LayerKind.FULL,)
_STATE: Final[Kinds] = (LayerKind.STATE,)
_SLIDING: Final[Kinds] = (LayerKind.SLIDING,)
_BOTH: Final[Kinds] = (LayerKind.FULL, LayerKind.STATE)


LISTS: Final = frozenset({
    "layer_types", "layers_block_type", "hybrid_override_pattern", "block_configs", "attn_type_list", "hybrid_layer_pattern",
    "linear_attn_config", "attn_layer_indices", "full_attn_idxs", "attn_layer_period",
})  # fmt: skip
"""Keys that say which layers have attention."""


def kinds_of(its: Description) -> list[Kinds]:
    """The kinds of each layer, by the first of the keys that models use for it.

    Raises UnreadError without any, and without a number of layers."""
    text, count = its.text, layer_count(its.text)
    if count is None and its.layers is not None:
        count = its.layers.get("count")
    found = _named(its, count) or _by_pattern(text) or _by_list(text) or _by_index(text, count or 0)
    if found:
        return found
    if count is None:
        raise UnreadError("config.json has no num_hidden_layers")
    return _by_model(its, count) or _computed(its, count) or _windows(its, count)


def _named(its: Description, count: int | None) -> list[Kinds]:
    for key in ("layer_types", "layers_block_type"):
        if (named := listed(its.text, key)) and key in its.given:
            return [_kind(name, its) for name in named[: count or len(named)]]
    return []


def _by_pattern(text: Json) -> list[Kinds]:
    """Nemotron-H: M Mamba, * attention, - MLP, E experts."""
    pattern = text.get("hybrid_override_pattern")
    kept = {"M": _STATE, "*": _FULL}
    return [kept.get(letter, ()) for letter in pattern[:MAX_LAYERS]] if isinstance(pattern, str) else []


def _by_model(its: Description, count: int) -> list[Kinds]:
    if its.model_type in MAMBA_MODELS:
        return [_STATE] * count
    if its.model_type in _BOTH_MODELS:
        return [_BOTH] * count
    if period := first(its.text, "attn_layer_period"):  # Jamba
        offset = first(its.text, "attn_layer_offset") or 0
        return [_FULL if i % period == offset else _STATE for i in range(count)]
    return []


def _kind(name: object, its: Description) -> Kinds:
    """By a name in layer_types. Names without attention or state are those of MLPs."""
    text, word = its.text, str(name).lower()
    if word == "hybrid":
        return _BOTH
    if any(part in word for part in _STATE_WORDS):
        return _STATE
    if "sliding" in word:
        return _SLIDING if window_of(text) else _FULL
    if "chunked" in word:
        return (LayerKind.CHUNKED,) if first(text, "attention_chunk_size") else _FULL
    return _FULL if "attention" in word else ()


def block(text: Json, index: int) -> Json:
    """Attention's part in block_configs (nemotron-nas)."""
    blocks = text.get("block_configs")
    block = blocks[index] if isinstance(blocks, list) and index < len(blocks) else None
    attention = block.get("attention") if isinstance(block, dict) else None
    return attention if isinstance(attention, dict) else {}


def _by_list(text: Json) -> list[Kinds]:
    """Kinds by a list with an entry for each layer."""
    if blocks := listed(text, "block_configs"):
        if any(isinstance(block, dict) and "block_type" in block for block in blocks):
            kept = {"mamba": _STATE, "attention": _FULL}
            return [kept.get(str(block.get("block_type")), ()) for block in blocks if isinstance(block, dict)]
        attention = [block(text, index) for index in range(len(blocks))]
        none = [bool(its.get("no_op") or its.get("replace_with_linear")) for its in attention]
        return [() if skipped else _FULL for skipped in none]
    if kinds := listed(text, "attn_type_list"):  # MiniMax-Text-01: 1 attention, 0 linear
        return [_FULL if its == 1 else _STATE for its in kinds]
    if kinds := listed(text, "hybrid_layer_pattern"):  # MiMo-V2: 0 full, 1 sliding
        return [_SLIDING if its == 1 else _FULL for its in kinds]
    return []


def _by_index(text: Json, count: int) -> list[Kinds]:
    """Kinds by a list of the layers with attention; the others are recurrent."""
    linear = text.get("linear_attn_config")
    if isinstance(linear, dict) and listed(linear, "full_attn_layers"):  # Kimi Linear, numbered from 1
        full = {its - 1 for its in listed(linear, "full_attn_layers") if isinstance(its, int)}
    elif indices := (listed(text, "attn_layer_indices") or listed(text, "full_attn_idxs")):  # Bamba, LFM2
        full = {its for its in indices if isinstance(its, int)}
    else:
        return []
    return [_FULL if index in full else _STATE for index in range(count)]


def _computed(its: Description, count: int) -> list[Kinds]:
    """Kinds as the configuration class computes them."""
    if its.layers is None or its.given & {"max_window_layers"}:
        return []
    repeats = list(its.layers["repeats"])
    period = first(its.text, str(its.layers.get("period"))) or len(repeats)
    if period == len(repeats):
        names = [repeats[index % period] for index in range(count)]
    else:
        names = [repeats[0] if (index + 1) % period else repeats[-1] for index in range(count)]
    if names and "last" in its.layers:
        names[-1] = its.layers["last"]
    return [_kind(name, its) for name in names]


def _windows(its: Description, count: int) -> list[Kinds]:
    """Full and sliding layers of a model that has no layer_types."""
    text = its.text
    if not window_of(text):
        return [_FULL] * count
    pattern = first(text, "sliding_window_pattern")
    if pattern:
        return [_SLIDING if (i + 1) % pattern else _FULL for i in range(count)]
    full = first(text, "max_window_layers") if text.get("use_sliding_window") else None
    return [_FULL if i < (full or 0) else _SLIDING for i in range(count)]
