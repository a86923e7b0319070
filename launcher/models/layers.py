"""The state that each layer keeps per token or sequence, from config.json. Pure.

Key names and rules follow vLLM 0.32 (transformers_utils/model_arch_config_convertor.py, config/model.py,
model_executor/models/, model_executor/layers/mamba/mamba_utils.py) and transformers 5, whose configuration
classes fill in `layer_types` where an older config.json has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

Json = Mapping[str, Any]

MAX_NUMBER: Final = 2**40
"""Beyond any width, context or vocabulary."""
MAX_LAYERS: Final = 100_000
STATE_BYTES: Final = 4
"""Recurrent states are float32 on CPU, or the model's type, which is smaller (platforms/cpu.py)."""

# Bidirectional models such as BERT keep nothing between steps (attention.py: ENCODER_ONLY).
_ENCODERS: Final = ("bert", "roberta", "modernbert", "nomic", "xlm-roberta", "distilbert", "electra", "gte")
_STATE_WORDS: Final = ("mamba", "linear", "recurrent", "conv", "ssm", "rwkv", "deltanet")
_MAMBA_MODELS: Final = frozenset({"mamba", "mamba2", "falcon_mamba"})
# transformers' patterns for configurations without layer_types: every n-th layer has full attention.
_PATTERNS: Final = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}


class LayerKind(StrEnum):
    FULL = "full"
    """K and V of every token; with multi-head latent attention one latent of every token."""
    SLIDING = "sliding"
    """K and V of the last tokens."""
    CROSS = "cross"
    """K and V of the encoder's output (Whisper)."""
    STATE = "state"
    """One state a sequence (Mamba, linear attention)."""


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers with the same state."""

    kind: LayerKind
    count: int
    heads: int = 1
    """KV heads of the whole model; 1 for a latent, which every rank keeps."""
    head_bytes: int = 0
    """K and V of one token and head; of a latent, all of it."""
    window: int | None = None
    state_bytes: int = 0
    """State of one sequence, over all ranks; 0 when config.json does not describe it."""

    def token_bytes(self, ranks: int) -> int:
        """Of one token on one rank: heads are split, and repeated where there are fewer than ranks."""
        return max(1, -(-self.heads // ranks)) * self.head_bytes


def layers_of(config: Json, text: Json, element_bytes: int) -> tuple[KvLayers, ...]:
    """The layers that keep state. `text` is the language model's part of `config`.

    1. Encoders keep nothing; decoders of encoder-decoder models keep their own tokens and the encoder's.
    2. `kv_lora_rank` means latent attention: kv_lora_rank + qk_rope_head_dim elements a token.
    3. Else 2 x KV heads x head size; layer_types tells sliding, linear and full layers apart.

    Raises ValueError naming the key that is missing."""
    if is_encoder(config):
        return ()
    if config.get("is_encoder_decoder"):
        return _decoder(text, element_bytes)
    kinds = _kinds(text)
    full = sum(kind is LayerKind.FULL for kind in kinds)
    sliding = sum(kind is LayerKind.SLIDING for kind in kinds)
    state = len(kinds) - full - sliding
    found: list[KvLayers] = []
    if full or sliding:
        heads, head_bytes = attention_shape(text, element_bytes)
        if full:
            # Gemma 4: the full layers have heads of their own.
            wide = first(text, "global_head_dim")
            few = first(text, "num_global_key_value_heads") if wide else None
            its_bytes = 2 * wide * element_bytes if wide and sliding else head_bytes
            found.append(KvLayers(LayerKind.FULL, full, few or heads, its_bytes))
        if sliding:
            window = first(text, "sliding_window", "attention_chunk_size")
            found.append(KvLayers(LayerKind.SLIDING, sliding, heads, head_bytes, window=window))
    if state:
        size = _state_bytes(text, element_bytes)
        found.append(KvLayers(LayerKind.STATE, state, state_bytes=size or 0))
    return tuple(found)


def is_encoder(config: Json) -> bool:
    """Whether the model only embeds or scores."""
    if config.get("is_decoder") or config.get("is_encoder_decoder"):
        return False
    kind = str(config.get("model_type", "")).lower()
    return any(kind.startswith(name) for name in _ENCODERS)


def attention_shape(text: Json, element_bytes: int) -> tuple[int, int]:
    """KV heads, and bytes of K and V of one head and token."""
    latent = first(text, "kv_lora_rank")
    if latent:
        return 1, (latent + (first(text, "qk_rope_head_dim") or 0)) * element_bytes
    heads, hidden = attention_heads(text), hidden_size(text)
    if not heads:
        raise ValueError("config.json has no num_attention_heads")
    size = first(text, "head_dim", "hidden_size_per_head")
    if not size and not hidden:
        raise ValueError("config.json has no hidden_size")
    return kv_heads(text, heads), 2 * (size or (hidden or 0) // heads) * element_bytes


def attention_heads(text: Json) -> int | None:
    return first(text, "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")


def hidden_size(text: Json) -> int | None:
    return first(text, "hidden_size", "n_embd", "d_model")


def kv_heads(text: Json, heads: int) -> int:
    """KV heads: grouped, one, or as many as query heads."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1  # Falcon, GPT-BigCode: one KV head whatever num_kv_heads says
    names = (
        "num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups",
    )  # fmt: skip
    return first(text, *names) or heads


def layer_count(text: Json) -> int | None:
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
    count = first(text, *names)
    if count is not None and count > MAX_LAYERS:
        raise ValueError(f"config.json claims {count} layers")
    return count


def first(config: Json, *keys: str) -> int | None:
    """The first of the keys that holds a number; some configurations say "none" with -1.

    Raises ValueError for a value that is not a size."""
    for key in keys:
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not -1 <= value <= MAX_NUMBER:  # also false for NaN
            raise ValueError(f"{key} of config.json is {value:g}, which is no size")
        if value >= 0:
            return int(value)
    return None


def _decoder(text: Json, element_bytes: int) -> tuple[KvLayers, ...]:
    count, heads, hidden = (
        first(text, "decoder_layers", "num_hidden_layers"),
        attention_heads(text),
        hidden_size(text),
    )
    if not count or not heads or not hidden:
        raise ValueError("config.json has no decoder_layers, decoder_attention_heads or d_model")
    own = KvLayers(LayerKind.FULL, count, heads, 2 * (hidden // heads) * element_bytes)
    return own, KvLayers(LayerKind.CROSS, count, heads, own.head_bytes)


def _kinds(text: Json) -> list[LayerKind]:
    named = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(named, list) and named:
        return [kind for name in named if (kind := _kind(str(name), text)) is not None]
    if isinstance(
        pattern := text.get("hybrid_override_pattern"), str
    ):  # Nemotron-H: M Mamba, * attention, - MLP
        kept = {"M": LayerKind.STATE, "*": LayerKind.FULL}
        return [kept[letter] for letter in pattern if letter in kept]
    count = layer_count(text)
    if count is None:
        raise ValueError("config.json has no num_hidden_layers")
    if text.get("model_type") in _MAMBA_MODELS:
        return [LayerKind.STATE] * count
    if period := first(text, "attn_layer_period"):  # Jamba
        offset = first(text, "attn_layer_offset") or 0
        return [LayerKind.FULL if i % period == offset else LayerKind.STATE for i in range(count)]
    return _windows(text, count)


def _kind(name: str, text: Json) -> LayerKind | None:
    name = name.lower()
    if any(word in name for word in _STATE_WORDS):
        return LayerKind.STATE
    if "sliding" in name:
        return LayerKind.SLIDING if window_of(text) else LayerKind.FULL
    # Chunked layers are kept in full: vLLM turns its hybrid manager off for them (config/vllm.py).
    return LayerKind.FULL if "attention" in name or name == "hybrid" else None


def _windows(text: Json, count: int) -> list[LayerKind]:
    """Full and sliding layers of a model that has no layer_types."""
    if not window_of(text):
        return [LayerKind.FULL] * count
    pattern = first(text, "sliding_window_pattern") or _PATTERNS.get(str(text.get("model_type")))
    if pattern:
        return [LayerKind.SLIDING if (i + 1) % pattern else LayerKind.FULL for i in range(count)]
    full = first(text, "max_window_layers") if text.get("use_sliding_window") else None
    return [LayerKind.FULL if i < (full or 0) else LayerKind.SLIDING for i in range(count)]


def window_of(text: Json) -> int | None:
    """Tokens that sliding layers look back; None when the model has none, or has them switched off."""
    return (first(text, "sliding_window") or None) if text.get("use_sliding_window", True) else None


def _state_bytes(text: Json, element_bytes: int) -> int | None:
    """Bytes of one layer's state of one sequence: a short convolution and a recurrent part."""
    hidden = hidden_size(text) or 0
    if value_heads := first(text, "linear_num_value_heads"):  # gated delta net: Qwen3-Next
        key_heads = first(text, "linear_num_key_heads") or value_heads
        key = first(text, "linear_key_head_dim") or 0
        value = first(text, "linear_value_head_dim") or key
        convolution = (2 * key_heads * key + value_heads * value) * (
            (first(text, "linear_conv_kernel_dim") or 1) - 1
        )
        return convolution * element_bytes + value_heads * value * key * STATE_BYTES
    size = first(text, "mamba_d_state", "ssm_state_size", "state_size")
    if size is None:
        return None
    kernel = (first(text, "mamba_d_conv", "conv_kernel") or 4) - 1
    heads = first(text, "mamba_n_heads", "mamba_num_heads", "num_heads")
    if heads and (head := first(text, "mamba_d_head", "mamba_head_dim", "head_dim")):  # Mamba 2
        groups = first(text, "mamba_n_groups", "n_groups") or 1
        return (heads * head + 2 * groups * size) * kernel * element_bytes + heads * head * size * STATE_BYTES
    inner = first(text, "mamba_d_ssm", "intermediate_size") if not first(text, "mamba_expand") else None
    inner = inner or hidden * (first(text, "mamba_expand", "expand") or 2)
    return inner * kernel * element_bytes + inner * size * STATE_BYTES
