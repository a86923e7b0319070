"""A model's memory profile from its description. Pure; reader.py reads the files.

Key names and rules follow vLLM 0.32: transformers_utils/model_arch_config_convertor.py (heads, head
size, context length) and v1/kv_cache_interface.py (bytes of a KV page).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct, field

from launcher.models.cpu_backend import gap_of, kv_cache_dtype, method_of, quantization_of
from launcher.models.description import Description, class_gap, describe
from launcher.models.layer_state import are_proved, is_encoder, is_latent, layers_of, shape_of
from launcher.models.layers import (
    KvLayers,
    LayerKind,
    UnreadError,
    attention_heads,
    first,
    hidden_size,
    window_of,
)
from launcher.models.projections import Projections

Json = Mapping[str, Any]

DTYPE_BYTES: Final = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_MAX_LEN_KEYS: Final = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length",
    "max_target_positions", "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
# RoPE kinds whose max_position_embeddings is scaled already (vllm/config/model.py, _get_and_verify_max_len).
_SCALED_ROPE: Final = frozenset(
    {"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default", "mrope"}
)
# Lengths that vLLM takes at most unless it is told another (model_executor/models/config.py).
_SHORTENED: Final = {"embedding_gemma2": 8192}
# A description damaged in any way raises one of these, or UnreadError.
_DAMAGED: Final = (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, ValueError)


ENGINE: Final = "engine"
"""In `ModelProfile.sources`."""


class EngineRequest(Struct, frozen=True):
    """One request of full length, as the engine itself counts it, and the settings under which it holds."""

    tokens: int
    request_bytes: int
    """On one rank."""
    step_tokens: int
    element_bytes: int
    """Of one element of K and V."""


class AddedFiles(Struct, frozen=True):
    """Files beside the model that an instance loads, because engine.args name them."""

    size_bytes: int = 0
    names: tuple[str, ...] = ()
    token_bytes: int = 0
    """KV cache of one token of a draft model, in 16 bits."""
    unknown: tuple[str, ...] = ()
    """Options whose file is not here, or not a file of this host."""
    encoder: bool = False
    """One of them is an encoder of pictures or sound, which computes in buffers of its own."""


NO_ADDED_FILES: Final = AddedFiles()


class ModelProfile(Struct, frozen=True):
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
    output_copy_bytes: int = 0
    """The embedding as llama.cpp repacks it for the output projection, beside the embedding itself."""
    expert_size: int | None = None
    """Width of one expert, of a mixture of them."""
    experts_used: int = 0
    """Experts that compute each token."""
    recurrent_widths: tuple[int, int] = (0, 0)
    """Widths of a recurrent layer and of its convolution; zeros without one, or not known."""
    tokenizer_entries: int = 0
    """Words and merges; 0 when not known."""
    splits_inputs: bool = False
    """An embedding is made from the last token, so that an input may be computed in parts."""
    computed_whole: bool = False
    """An encoder, of which llama.cpp keeps no KV cache: each input is computed in one piece."""
    keeps_windows: bool = False
    """llama.cpp keeps the tokens of their windows alone for its sliding layers."""
    unknown_types: tuple[int, ...] = ()
    """Types of a GGUF file's tensors whose size is taken from the places of their data in the file."""
    added: AddedFiles = NO_ADDED_FILES
    file_bytes: int = 0
    """The largest weight file."""
    unmapped_bytes: int = 0
    """The largest weight file that is read, not mapped (*.bin)."""
    file_format: str | None = None
    """safetensors, bin, pt, gguf or tensors."""
    unread: str | None = None
    """The reason why the KV cache is not known, although the files are here."""
    assumed: tuple[str, ...] = ()
    """Keys that neither the file, its class nor the weights give: the plan took the usual value."""
    sources: tuple[str, ...] = ()
    """Origins of the figures: engine (asked once), config, defaults (of the class), headers (of the weights), assumed."""
    cpu_gap: str | None = None
    """The part that vLLM's CPU backend cannot build."""
    class_gap: str | None = None
    """The reason why only vLLM itself can tell whether it takes the model's class."""
    engine_request: EngineRequest | None = None
    """The engine's own figure for one request; None where it was not asked."""
    engine_refusal: str | None = None
    """The reason why the engine does not take the model or its arguments."""
    engine_trouble: str | None = None
    """The reason why the engine was asked and did not answer."""

    @property
    def known(self) -> bool:
        return self.weights_bytes is not None and self.kv_bytes_per_token is not None

    @property
    def asked(self) -> bool:
        """The engine was asked about it, whatever it said."""
        said = self.engine_refusal is not None or self.engine_trouble is not None
        return said or ENGINE in self.sources

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


class Beside(Struct, frozen=True):
    """The rest of a model's folder that the reading of its description needs."""

    encoder: Json | None = None
    """sentence_bert_config.json."""
    tokenizer: Json | None = None
    """tokenizer_config.json."""
    projections: Projections = field(default_factory=dict)
    """Output widths of attention's projections, from the headers of the weights."""


NOTHING_BESIDE: Final = Beside()


def profile_of(
    config: Json,
    dtype: str,
    *,
    weights_bytes: int | None,
    weights_source: str,
    beside: Beside = NOTHING_BESIDE,
) -> ModelProfile:
    """The profile in a parsed config.json.

    A description that cannot be read gives a profile with `unread`: the KV cache is not known."""
    try:
        return _read(describe(config), dtype, weights_bytes, weights_source, beside)
    except UnreadError as error:
        why = f"{error}"
    except _DAMAGED as error:
        why = f"config.json is not supported ({type(error).__name__}: {error})"
    return ModelProfile(weights_bytes, None, None, weights_source=weights_source, unread=why)


def _read(
    its: Description, dtype: str, weights_bytes: int | None, weights_source: str, beside: Beside
) -> ModelProfile:
    text, width = its.text, dtype_bytes(dtype)
    layers = layers_of(its, width, beside.projections)
    proved = are_proved(its, beside.projections)
    heads, hidden = attention_heads(text), hidden_size(text)
    if (layers or is_encoder(its)) and hidden is None:
        raise UnreadError("config.json has no hidden_size")
    latent = is_latent(its)
    quantization = quantization_of(its.config)
    length = max_model_len(its, beside)
    assumed = tuple(_assumed(its, length, layers, proved=proved))
    return ModelProfile(
        weights_bytes=weights_bytes,
        kv_bytes_per_token=sum(its.count * its.heads * its.head_bytes for its in layers),
        max_model_len=length,
        num_attention_heads=heads,
        num_kv_heads=_kv_heads(its, layers) if heads else None,
        architecture=its.architecture,
        quantization=method_of(quantization),
        sliding_window=window_of(text),
        mla=latent,
        weights_source=weights_source,
        layers=layers,
        kv_element_bytes=width,
        kv_source=_kv_source(layers, latent=latent),
        kv_cache_dtype=kv_cache_dtype(quantization),
        hidden_size=hidden,
        intermediate_size=first(text, "intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim")
        or (4 * hidden if hidden else None),
        vocab_size=first(text, "vocab_size"),
        assumed=assumed,
        sources=tuple(_sources(its, assumed, proved=proved)),
        cpu_gap=gap_of(its, method_of(quantization)),
        class_gap=class_gap(its),
    )


def _kv_heads(its: Description, layers: tuple[KvLayers, ...]) -> int | None:
    """Those of a full layer; where the weights show others, the most of any layer."""
    if is_encoder(its):
        return None
    found, said = {layer.heads for layer in layers if layer.head_bytes}, shape_of(its).heads
    return max(found) if found and said not in found else said


# Keys that decide the KV cache, each under the names that models give it.
_DECIDE: Final = (
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"),
    ("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "num_attention_groups"),
    ("head_dim", "kv_lora_rank"),
    _MAX_LEN_KEYS,
)


SHAPE_KEYS: Final = frozenset({"num_key_value_heads", "head_dim"})
"""Keys that `ModelProfile.assumed` may name and that decide the bytes of a token."""


def _assumed(
    its: Description, length: int | None, layers: tuple[KvLayers, ...], *, proved: bool
) -> Iterator[str]:
    if length is None and layers:
        yield _MAX_LEN_KEYS[0]
    if its.known or proved or not any(layer.head_bytes for layer in layers):
        return
    for names in _DECIDE[1:3]:
        if not its.given & set(names):
            yield names[0]


def _sources(its: Description, assumed: tuple[str, ...], *, proved: bool) -> Iterator[str]:
    yield "config"
    if proved:
        yield "headers"
    if any(not its.given & set(names) and its.text.keys() & set(names) for names in _DECIDE):
        yield "defaults"
    if assumed:
        yield "assumed"


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


def max_model_len(its: Description, beside: Beside = NOTHING_BESIDE) -> int | None:
    """The length that vLLM derives (config/model.py, _get_and_verify_max_len). None where it would take its default."""
    text = its.text
    found = first(text, "model_max_length") or min(
        (length for key in _MAX_LEN_KEYS if (length := first(text, key))), default=None
    )
    absolute = its.config.get("position_embedding_type", text.get("position_embedding_type")) == "absolute"
    if beside.tokenizer and absolute and is_encoder(its):
        own = first(beside.tokenizer, "model_max_length")
        found = min(found, own) if found and own else found or own
    ropes = list(_ropes(text))
    if found and "gemma3" not in its.model_type:
        for rope in ropes:
            factor = rope.get("factor")
            if _rope_kind(rope) not in _SCALED_ROPE and isinstance(factor, int | float):
                found = int(found * factor)
                break
    if beside.encoder and (most := first(beside.encoder, "max_seq_length")):
        found = most
    if any(_rope_kind(rope) == "longrope" for rope in ropes):
        found = first(text, "original_max_position_embeddings") or found
    most = _SHORTENED.get(str(its.config.get("model_type")))
    return min(found, most) if found and most else found


def _rope_kind(rope: Json) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _ropes(text: Json) -> Iterator[Json]:
    """RoPE parameters; newer descriptions have them for each kind of layers."""
    for key in ("rope_scaling", "rope_parameters"):
        found = text.get(key)
        if isinstance(found, dict) and found:
            inner = [its for its in found.values() if isinstance(its, dict)]
            yield from inner if len(inner) == len(found) else [found]
            return
