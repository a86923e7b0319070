"""Values of a model's layers, and the numbers of its configuration under all the names that models give them. Pure.

Key names and rules follow vLLM 0.32 (transformers_utils/model_arch_config_convertor.py, config/model.py,
model_executor/models/, v1/kv_cache_interface.py) and transformers 5, whose configuration classes fill in `layer_types`
where an older config.json has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

Json = Mapping[str, Any]

MAX_NUMBER: Final = 2**40
"""Beyond any width, context or vocabulary."""
MAX_LAYERS: Final = 10_000


class LayerKind(StrEnum):
    FULL = "full"
    """K and V of every token; with multi-head latent attention one latent of every token."""
    SLIDING = "sliding"
    """K and V of the last tokens."""
    CHUNKED = "chunked"
    """K and V of the tokens since the last multiple of `window` (Llama 4)."""
    CROSS = "cross"
    """K and V of the encoder's output (Whisper)."""
    STATE = "state"
    """One state a sequence (Mamba, linear attention)."""


class KvLayers(Struct, frozen=True):
    """Layers with the same state."""

    kind: LayerKind
    count: int
    heads: int = 1
    """KV heads of the whole model; 1 for a latent, which every rank keeps."""
    head_bytes: int = 0
    """K and V of one token and head; of a latent, all of it."""
    window: int | None = None
    state_bytes: int = 0
    """State of one sequence, over all ranks; 0 when the description does not give it."""
    state_blocks: int = 2
    """States that one sequence holds at most (MambaSpec.max_memory_usage_bytes)."""
    head_size: int = 0
    """Elements of one key; 0 when not known."""

    def token_bytes(self, ranks: int) -> int:
        """Of one token on one rank: heads are split, and repeated where there are fewer than ranks."""
        return max(1, -(-self.heads // ranks)) * self.head_bytes


class UnreadError(ValueError):
    """A key that the description lacks, or has a value that is no size for."""


# --- Numbers of a configuration. ---


def first(config: Json, *keys: str) -> int | None:
    """The first of the keys that holds a number; some configurations say "none" with -1.

    Raises UnreadError for a value that is not a size."""
    for key in keys:
        value = config.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not -1 <= value <= MAX_NUMBER:  # also false for NaN
            raise UnreadError(f"{key} of config.json is {value:g}, which is no size")
        if value >= 0:
            return int(value)
    return None


def attention_heads(text: Json) -> int | None:
    return first(text, "num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")


def hidden_size(text: Json) -> int | None:
    return first(text, "hidden_size", "n_embd", "d_model")


def kv_heads(text: Json, heads: int) -> int:
    """KV heads: grouped, one, or as many as query heads."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1  # Falcon, GPT-BigCode: one KV head whatever num_kv_heads says
    inner = text.get("attn_config")
    names = (
        "num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups",
    )  # fmt: skip
    found = first(text, *names) or (first(inner, "kv_n_heads") if isinstance(inner, dict) else None)
    return found or heads


def layer_count(text: Json) -> int | None:
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
    count = first(text, *names)
    if count is not None and count > MAX_LAYERS:
        raise UnreadError(f"config.json claims {count} layers")
    return count


def window_of(text: Json) -> int | None:
    """Tokens that sliding layers look back; None when the model has none, or has them switched off."""
    return (first(text, "sliding_window") or None) if text.get("use_sliding_window", True) else None


def listed(text: Json, key: str) -> Sequence[Any]:
    found = text.get(key)
    return found[:MAX_LAYERS] if isinstance(found, list) else ()
