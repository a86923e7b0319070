"""A model's description as the engine reads it: config.json or params.json, completed by what its class fills in. Pure.

A config.json may leave out whatever its configuration class has a default for, and may keep the language model in
a part of its own. `class_defaults.json` has the defaults of the classes of transformers and vLLM; scripts/model-defaults
writes it from the installed versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from launcher.base.text import quoted

Json = Mapping[str, Any]

_TABLE: Final = Path(__file__).with_name("class_defaults.json")
# Parts that hold the language model, in descriptions whose class is not in the table.
_PARTS: Final = (
    "text_config", "llm_config", "language_config", "thinker_config", "text_model", "decoder", "generator",
)  # fmt: skip
# A part with one of these is a language model's, not a processor's or a list of parts.
_SIZES: Final = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "decoder_layers",
    "num_attention_heads",
)
_MAX_DEPTH: Final = 4
# Names that a class takes beside the usual one, without an attribute map (BloomConfig).
_FURTHER: Final = {"n_embed": "hidden_size"}


class Description(Struct, frozen=True):
    """One model's configuration, with its language model's part completed."""

    config: Json
    """As in the file."""
    text: Json
    """The language model's part: keys of the file, then the class's defaults."""
    given: frozenset[str] = frozenset()
    """Keys of `text` that the file has."""
    known: bool = False
    """The class is in the table: a key that is absent from `text` has no default, so that the engine derives it."""
    layers: Json | None = None
    """Kinds of layers that the class computes: {"repeats": [kind, …], "last": kind, "period": key}."""

    @property
    def model_type(self) -> str:
        return str(self.text.get("model_type") or self.config.get("model_type") or "")

    @property
    def has_encoder(self) -> bool:
        """It attends to the output of an encoder: the file says so, or its class."""
        return bool(self.config.get("is_encoder_decoder", self.text.get("is_encoder_decoder")))

    @property
    def architecture(self) -> str | None:
        named = self.config.get("architectures")
        found = named[0] if isinstance(named, list) and named else None
        return found if isinstance(found, str) else None


class Versions(Struct, frozen=True):
    """The software whose classes the table describes."""

    transformers: str
    vllm: str


def versions() -> Versions:
    table = _table()
    return Versions(table["transformers"], table["vllm"])


@cache
def _table() -> Json:
    table: Json = json.loads(_TABLE.read_text(encoding="utf-8"))
    return table


def describe(config: Json) -> Description:
    """The description in a parsed config.json (or params.json in the form of `from_mistral`).

    1. The class of `model_type` says where the language model is; otherwise the usual names are tried.
    2. Its part is completed by the defaults of its own class (`model_type` of the part).
    3. A file that keeps the language model's keys at the top although the class has a part for them is read as
       that part, as transformers does."""
    kind = _kind_of(config)
    row = _row(kind, top=True)
    part: Json = config
    usual: Json = {}
    ours = False
    for step in row.get("text", ()):
        inner = _inner(part, step["key"])
        if inner is None and _has_sizes(part):
            kind, ours = step["type"], step.get("own", False)
            continue
        part = inner if inner is not None else {}
        own = "" if step.get("fixed") else _kind_of(part)
        kind, usual, ours = own or step["type"], step.get("keys", {}), not own and step.get("own", False)
    if not row:
        part = next(_search(config), config)
        ours = part is config
        kind = _kind_of(part) or kind
    its = row if part is config and not row.get("text") else _row(kind, top=ours)
    text = _completed(part, kind, its, {} if part else usual)
    return Description(config, text, frozenset(part), bool(its), its.get("layers"))


def _kind_of(part: Json) -> str:
    kind = part.get("model_type")
    return kind if isinstance(kind, str) else ""


def _row(kind: str, *, top: bool = False) -> Json:
    """The class's row. At the top of a file vLLM's own classes come first, in most parts those of transformers."""
    table = _table()
    parts = (table["own"], table["classes"]) if top else (table["classes"], table["own"])
    found: Json = next((part[kind] for part in parts if kind in part), {})
    return found


def _inner(part: Json, key: str) -> Json | None:
    for name in (key, *_PARTS[:3]):
        inner = part.get(name)
        if isinstance(inner, dict):
            return inner
    return None


def _has_sizes(part: Json) -> bool:
    return any(key in part for key in _SIZES)


def _search(part: Json, depth: int = _MAX_DEPTH) -> Iterator[Json]:
    """Parts that describe a language model, the innermost first."""
    for name in _PARTS:
        inner = part.get(name)
        if isinstance(inner, dict) and depth:
            yield from _search(inner, depth - 1)
            if _has_sizes(inner):
                yield inner


def _completed(part: Json, kind: str, row: Json, usual: Json) -> Json:
    """`part` with defaults, and each value under both of its names."""
    text: dict[str, Any] = row.get("keys", {}) | usual | dict(part) | {"model_type": kind}
    for usual_name, own_name in row.get("alias", {}).items():
        if own_name in part or usual_name not in part:
            if own_name in text:
                text[usual_name] = text[own_name]
        else:
            text[own_name] = text[usual_name]
    text.update({usual_name: part[own_name] for own_name, usual_name in _FURTHER.items() if own_name in part})
    return text


# --- Classes that vLLM may not have. ---

# Endings that vLLM exchanges to find a model's class (vllm/config/model.py, _SUFFIX_TO_DEFAULTS, 0.32).
_ENDINGS: Final = (
    "ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding", "EmbeddingModel",
    "ForSequenceClassification", "ForTokenClassification", "ForAudioClassification", "ForImageClassification",
    "ForVideoClassification", "ClassificationModel", "ForRewardModeling", "RewardModel", "Model",
)  # fmt: skip
_MISTRAL: Final = "transformer"
_MAX_NAME: Final = 60


def class_gap(its: Description) -> str | None:
    """The reason why only vLLM itself can tell whether it takes the model; None where it has the model's class."""
    kind, named = _kind_of(its.config), its.architecture
    if not kind:
        return "config.json has no model_type"
    if kind != _MISTRAL and not _row(kind, top=True):
        return f"its model_type, {quoted(kind, _MAX_NAME)}, has no class in vLLM {versions().vllm} or its transformers"
    if named is not None and not _has_class(named):
        return f"vLLM {versions().vllm} has no model of its own for {quoted(named, _MAX_NAME)}"
    return None


def _has_class(architecture: str) -> bool:
    known = _architectures()
    ending = next((each for each in _ENDINGS if architecture.endswith(each)), None)
    stem = architecture if ending is None else architecture.removesuffix(ending)
    return architecture in known or (
        ending is not None and any(f"{stem}{other}" in known for other in _ENDINGS)
    )


@cache
def _architectures() -> frozenset[str]:
    return frozenset(_table()["architectures"])


# --- params.json, Mistral's own format. ---

_MISTRAL_KEYS: Final = {
    "dim": "hidden_size", "n_kv_heads": "num_key_value_heads", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "hidden_dim": "intermediate_size", "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
_MISTRAL_LENGTH: Final = 128_000


def from_mistral(params: Json, beside: Json | None = None) -> dict[str, Any]:
    """A params.json under config.json's keys (vllm/transformers_utils/configs/mistral.py, 0.32).

    `beside` is the config.json in the same folder: its keys count where params.json has none.

    Raises ValueError for a sliding_window that vLLM does not take."""
    config = {_MISTRAL_KEYS.get(key, key): value for key, value in params.items()}
    usual = {key: value for key, value in (beside or {}).items() if key not in _PARTS}
    length = next((part["max_position_embeddings"] for part in _with_length(beside or {})), _MISTRAL_LENGTH)
    if config.get("max_position_embeddings") is None:
        config["max_position_embeddings"] = length
    config.setdefault("tie_word_embeddings", False)
    _windows(config)
    moe = config.get("moe")
    shared = moe.get("num_shared_experts") if isinstance(moe, dict) else None
    kind, architecture = config.get("model_type", _MISTRAL), "MistralForCausalLM"
    if config.get("qk_nope_head_dim") or shared:
        kind, architecture = "deepseek_v3", "MistralLarge3ForCausalLM"
    elif moe:
        architecture = "MixtralForCausalLM"
    elif kind == "mamba":
        kind, architecture = "mamba2", "Mamba2ForCausalLM"
    if isinstance(yarn := config.get("yarn"), dict):
        config["rope_parameters"] = {"rope_type": "yarn", "factor": yarn.get("factor")}
    if isinstance(quantization := config.get("quantization"), dict):
        config["quantization_config"] = _mistral_quantization(quantization)
    return usual | config | {"model_type": kind, "architectures": [architecture]}


def _with_length(beside: Json) -> Iterator[Json]:
    for part in (beside, *_search(beside)):
        if part.get("max_position_embeddings") is not None:
            yield part


def _windows(config: dict[str, Any]) -> None:
    window, count = config.get("sliding_window"), config.get("num_hidden_layers")
    if isinstance(window, list) and window and isinstance(count, int):
        kinds = ["full_attention" if its is None else "sliding_attention" for its in window]
        config["layer_types"] = kinds * (min(count, 2**16) // len(window))
        config["sliding_window"] = next((its for its in window if its is not None), None)
    elif window and not isinstance(window, int):
        raise ValueError(f"sliding_window of params.json is {window!r:.40}")


def _mistral_quantization(its: Json) -> dict[str, Any]:
    if its.get("qformat_weight") == "fp8_e4m3":
        return {"quant_method": "fp8"}
    return dict(its)
