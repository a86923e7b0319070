"""The needs of each model, as JSON and text. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from launcher.base.text import format_size
from launcher.models.layers import KvLayers, LayerKind
from launcher.plan.plan import ModelNeeds

LATENT: Final = "latent"
"""The kind of full layers that keep one latent of a token instead of keys and values."""


def needs_json(its: ModelNeeds) -> dict[str, Any]:
    """An entry of `models` in `plan --json`."""
    return {
        "name": its.name, "heads": its.heads, "latent": its.latent, "quantization": its.quantization,
        "max_model_len": its.max_model_len, "kv_bytes_per_token": its.kv_bytes_per_token,
        "state_bytes": its.state_bytes, "request_bytes": its.request_bytes, "weights_bytes": its.weights_bytes,
        "layers": [_layer_json(layer, its) for layer in its.layers], "sources": list(its.sources),
    }  # fmt: skip


def _layer_json(layer: KvLayers, its: ModelNeeds) -> dict[str, Any]:
    kept = layer.kind is not LayerKind.STATE
    return {
        "kind": _kind(layer, its), "count": layer.count, "kv_heads": layer.heads if kept else None,
        "head_size": (layer.head_size or None) if kept else None, "window": layer.window,
    }  # fmt: skip


def _kind(layer: KvLayers, its: ModelNeeds) -> str:
    return LATENT if its.latent and layer.kind is LayerKind.FULL else layer.kind.value


def needs_text(its: ModelNeeds) -> list[str]:
    """Three lines for a terminal."""
    quantized = f", {its.quantization}" if its.quantization else ""
    layers = ", ".join(_layer_text(layer, its) for layer in its.layers) or "an encoder keeps no tokens"
    state = f", {format_size(its.state_bytes)} of states" if its.state_bytes else ""
    sources = ", ".join(its.sources) or "its profile"
    head = f"model {its.name}: {its.heads or 'unknown'} attention heads{quantized}, weights {format_size(its.weights_bytes)}"
    request = f"  one request of {its.max_model_len} tokens: {format_size(its.request_bytes)} of KV cache"
    return [
        f"{head}, by {sources}",
        f"  layers: {layers}",
        f"{request} ({its.kv_bytes_per_token} B a token{state})",
    ]


def _layer_text(layer: KvLayers, its: ModelNeeds) -> str:
    return " ".join(_words(layer, its))


def _words(layer: KvLayers, its: ModelNeeds) -> Iterator[str]:
    yield f"{layer.count} {_kind(layer, its)}"
    if layer.kind is not LayerKind.STATE and not its.latent:
        yield f"of {layer.heads} KV heads"
    if layer.kind is not LayerKind.STATE and layer.head_size:
        yield f"x {layer.head_size}"
    if layer.window:
        yield f"within {layer.window} tokens"
