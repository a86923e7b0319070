"""The engine's own statement of a model's needs, and a profile that takes its figures. Pure.

The engine says it once for each description, set of weight headers, version and arguments
(engines/vllm/needs.py). Its figures go before those of the files: they are what the start will find.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from launcher.models.layers import MAX_LAYERS, MAX_NUMBER, KvLayers, LayerKind
from launcher.models.profile import ENGINE, EngineRequest, ModelProfile

_FP8: Final = 1

Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Reason = Annotated[str, msgspec.Meta(max_length=400)]


class AnsweredLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with the same KV cache spec, as `KvLayers`."""

    kind: LayerKind
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_LAYERS)]
    heads: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)] = 1
    head_bytes: Number = 0
    head_size: Number = 0
    window: Number | None = None
    state_bytes: Number = 0
    state_blocks: Number = 2


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One of three: `failed`, `refused`, or the figures; these without layers where the class could not be built."""

    failed: Reason | None = None
    """The engine was not heard: it took too long, ended, or has other modules than the program that asks."""
    refused: Reason | None = None
    """The engine does not take the description or the arguments."""
    unbuilt: Reason | None = None
    """The class cannot be built."""
    no_kernel: bool = False
    """It cannot be built because the CPU backend lacks a kernel."""
    max_model_len: Number | None = None
    heads: Number | None = None
    kv_heads: Number | None = None
    latent: bool = False
    quantization: Annotated[str, msgspec.Meta(max_length=80)] | None = None
    layers: Annotated[tuple[AnsweredLayers, ...], msgspec.Meta(max_length=MAX_LAYERS)] = ()
    request_bytes: Size | None = None
    """KV cache of one request of `max_model_len`, on one rank; None where the class was not built."""
    step_tokens: Number | None = None
    element_bytes: Number | None = None
    """Of one element of K and V; None without a KV cache."""
    weights_bytes: Size | None = None

    @property
    def built(self) -> bool:
        return self.request_bytes is not None


def with_answer(profile: ModelProfile, answer: Answer, engine: str) -> ModelProfile:
    """`profile` with the engine's figures. `engine` names it with its version, for messages.

    1. An engine that was not heard, or refuses, changes no figure: the reason is kept for a warning.
    2. Where the class was not built, its configuration still gives the length; the reason is kept.
    3. Where it was built, its layers, weights and one request replace all that was read or assumed."""
    if answer.failed is not None:
        return replace(profile, engine_trouble=answer.failed)
    if answer.refused is not None:
        return replace(profile, engine_refusal=f"{engine}: {answer.refused}")
    sources = (*(its for its in profile.sources if its != ENGINE), ENGINE)
    length = answer.max_model_len or profile.max_model_len
    if not answer.built:
        gap = f"no kernel, as {engine} says: {answer.unbuilt}" if answer.no_kernel else profile.cpu_gap
        trouble = None if answer.no_kernel else answer.unbuilt
        return replace(
            profile, max_model_len=length, sources=sources, cpu_gap=gap, class_gap=None, engine_trouble=trouble,
            assumed=tuple(key for key in profile.assumed if key != "max_position_embeddings"),
        )  # fmt: skip
    layers = tuple(_layers(answer, profile.kv_element_bytes))
    return replace(
        profile, max_model_len=length, sources=(ENGINE,), cpu_gap=None, class_gap=None, unread=None, assumed=(),
        layers=layers,
        weights_bytes=answer.weights_bytes, weights_source=f"{engine}: parameters of its class",
        kv_bytes_per_token=sum(its.count * its.heads * its.head_bytes for its in layers),
        num_attention_heads=answer.heads or profile.num_attention_heads,
        num_kv_heads=answer.kv_heads if layers else None,
        # The checkpoint's own method goes before the engine's name for it, and before one that is asked for.
        quantization=answer.quantization if profile.unread else profile.quantization,
        mla=answer.latent, kv_source=f"{engine}: KV cache specs of its class",
        kv_cache_dtype="fp8" if answer.element_bytes == _FP8 else "auto",
        engine_request=EngineRequest(
            tokens=length or 0, request_bytes=answer.request_bytes or 0, step_tokens=answer.step_tokens or 0,
            element_bytes=answer.element_bytes or profile.kv_element_bytes,
        ),
    )  # fmt: skip


def _layers(answer: Answer, element_bytes: int) -> Iterator[KvLayers]:
    """In the type that profiles count in: the plan scales them to that of the KV cache."""
    width = answer.element_bytes or element_bytes
    order = list(LayerKind)
    for its in sorted(answer.layers, key=lambda layers: order.index(layers.kind)):
        yield KvLayers(
            its.kind, its.count, its.heads, its.head_bytes * element_bytes // width, its.window, its.state_bytes,
            its.state_blocks, its.head_size,
        )  # fmt: skip
