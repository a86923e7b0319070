"""A model's memory profile from its config.json. Pure; model_profile.py reads the files.

Key names and rules follow vLLM 0.32: transformers_utils/model_arch_config_convertor.py (heads, head
size, context length) and v1/kv_cache_interface.py (bytes of a KV page).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from launcher.models.layers import (
    KvLayers,
    LayerKind,
    attention_heads,
    first,
    hidden_size,
    is_encoder,
    kv_heads,
    layers_of,
    window_of,
)

DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_MAX_LEN_KEYS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# RoPE kinds whose max_position_embeddings is scaled already (vllm/config/model.py, _get_and_verify_max_len).
_SCALED_ROPE: Final = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default", "mrope"}
)


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The facts about a model that the memory ledger needs. None: unknown, its files are not here."""

    weights_bytes: int | None
    """All parameters as the engine holds them (converted to its dtype), over all tensor-parallel ranks."""
    kv_bytes_per_token: int | None
    """K and V of one token in all attention layers, without tensor parallelism; of sliding layers too."""
    max_model_len: int | None
    """The longest context the model's own config allows, tokens."""
    num_attention_heads: int | None = None
    num_kv_heads: int | None = None
    """1 with multi-head latent attention: every rank keeps the whole latent."""
    num_layers: int | None = None
    """Layers with a KV cache."""
    architecture: str | None = None
    quantization: str | None = None
    """quant_method of the checkpoint; None when it is not quantized."""
    sliding_window: int | None = None
    """Window of the sliding layers, in tokens."""
    mla: bool = False
    weights_source: str = "unknown"
    """Source of `weights_bytes`, shown with the ledger."""
    layers: tuple[KvLayers, ...] = ()
    """State of each kind of layer; empty for models without (encoders)."""
    kv_element_bytes: int = 2
    """Of one element of K and V as `layers` and `kv_bytes_per_token` count it."""
    kv_source: str = "unknown"
    kv_cache_dtype: str = "auto"
    """What the checkpoint asks for its KV cache: "fp8", or "auto" for the model's own type."""
    hidden_size: int | None = None
    intermediate_size: int | None = None
    vocab_size: int | None = None
    replicated_bytes: int = 0
    """Weights that every rank holds whole."""
    head_bytes: int = 0
    """The output projection, which the CPU keeps twice: as loaded, and packed."""
    tied_embeddings: bool = False
    """The output projection is the embedding (tie_word_embeddings)."""
    file_bytes: int = 0
    """The largest weight file."""
    unmapped_bytes: int = 0
    """The largest weight file that is read, not mapped (*.bin)."""
    file_format: str | None = None
    """safetensors, bin or gguf."""

    @property
    def known(self) -> bool:
        return self.weights_bytes is not None and self.kv_bytes_per_token is not None

    @property
    def kv_layers(self) -> tuple[KvLayers, ...]:
        """`layers`; of a profile that only knows the sum, one layer that keeps it."""
        if self.layers or not self.kv_bytes_per_token:
            return self.layers
        heads = self.num_kv_heads or 1
        return (KvLayers(LayerKind.FULL, 1, heads, -(-self.kv_bytes_per_token // heads)),)

    def weights_bytes_per_rank(self, ranks: int) -> int:
        """Weights of one rank: matrices are split, norms and narrow projections are not."""
        total = self.weights_bytes or 0
        whole = min(self.replicated_bytes, total) if ranks > 1 else 0
        return whole + -(-(total - whole) // ranks)


UNKNOWN: Final = ModelProfile(weights_bytes=None, kv_bytes_per_token=None, max_model_len=None)


def profile_of(
    config: Mapping[str, Any], dtype: str, *, weights_bytes: int | None, weights_source: str
) -> ModelProfile:
    """The profile in a parsed config.json; multimodal models keep the language model in `text_config`.

    Raises ValueError naming what is missing."""
    text = text_of(config)
    layers = layers_of(config, text, dtype_bytes(dtype))
    heads = attention_heads(text)
    if (layers or is_encoder(config)) and hidden_size(text) is None:
        raise ValueError("config.json has no hidden_size")
    quantization = config.get("quantization_config") or text.get("quantization_config") or {}
    architectures = config.get("architectures") or [None]
    latent = first(text, "kv_lora_rank") is not None
    hidden = hidden_size(text)
    return ModelProfile(
        weights_bytes=weights_bytes,
        kv_bytes_per_token=sum(its.count * its.heads * its.head_bytes for its in layers),
        max_model_len=_max_model_len(text),
        num_attention_heads=heads,
        num_kv_heads=1 if latent else kv_heads(text, heads) if heads else None,
        num_layers=sum(its.count for its in layers),
        architecture=architectures[0],
        quantization=quantization.get("quant_method"),
        sliding_window=window_of(text),
        mla=latent,
        weights_source=weights_source,
        layers=layers,
        kv_element_bytes=dtype_bytes(dtype),
        kv_source=_kv_source(layers, latent=latent),
        hidden_size=hidden,
        intermediate_size=first(text, "intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim")
        or (4 * hidden if hidden else None),
        vocab_size=first(text, "vocab_size"),
    )


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(
        (part for key in ("text_config", "llm_config") if isinstance(part := config.get(key), dict)), config
    )


def kv_cache_dtype(config: Mapping[str, Any]) -> str:
    """What --kv-cache-dtype auto means for a checkpoint: "fp8" where its quantization sets it, else "auto".

    vllm/utils/torch_utils.py, get_kv_cache_quant_algo_string."""
    quantization = config.get("quantization_config") or {}
    scheme = quantization.get("kv_cache_scheme") or {}
    eight_bits = scheme.get("type") == "float" and scheme.get("num_bits") == 8
    return (
        "fp8" if eight_bits or str(quantization.get("kv_cache_quant_algo", "")).upper() == "FP8" else "auto"
    )


def dtype_bytes(dtype: str) -> int:
    """Bytes of one weight or KV element. "auto" is 2: vLLM takes float32 checkpoints as a 16-bit type too."""
    return DTYPE_BYTES.get(dtype, 2)


def _kv_source(layers: tuple[KvLayers, ...], *, latent: bool) -> str:
    said = []
    for its in layers:
        kept = f"{its.count} {its.kind} layers"
        if its.kind is LayerKind.STATE:
            said.append(f"{kept} x {its.state_bytes} B a request")
        elif latent:
            said.append(f"{kept} x {its.head_bytes} B latent (kv_lora_rank + qk_rope_head_dim)")
        else:
            window = f" of the last {its.window} tokens" if its.window else ""
            said.append(f"{kept} x {its.heads} KV heads x {its.head_bytes} B of K and V{window}")
    return "config.json: " + ("; ".join(said) or "an encoder keeps no tokens")


def _max_model_len(config: Mapping[str, Any]) -> int | None:
    lengths = [length for key in _MAX_LEN_KEYS if (length := first(config, key))]
    if not lengths:
        return None
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "longrope":
        return first(config, "original_max_position_embeddings") or min(lengths)
    factor = 1.0 if kind in _SCALED_ROPE else float(rope.get("factor") or 1.0)
    return int(min(lengths) * factor)
