"""Rows of the key, value and latent projections of each layer, from headers of weight files. Pure.

They say how much a layer keeps of a token: keys and values are what these projections give. Packed weights do not
show it, and fused projections have queries in the same tensor.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from msgspec import Struct

from launcher.models.weight_files import Tensor

_NAME: Final = re.compile(
    r"(?P<prefix>.*?)\b(?:layers|blk|h|blocks)\.(?P<layer>\d{1,5})\.(?P<part>[\w.]{1,80})\.weight"
)
_KEYS: Final = frozenset({"self_attn.k_proj", "attn.k_proj", "attention.k_proj", "attention.wk", "attn_k"})
_VALUES: Final = frozenset({"self_attn.v_proj", "attn.v_proj", "attention.v_proj", "attention.wv", "attn_v"})
_LATENTS: Final = frozenset({"self_attn.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa", "attn_kv_a_mqa"})
_ENDS: Final = tuple(f"{name.rpartition('.')[2]}.weight" for name in (*_KEYS, *_VALUES, *_LATENTS))
# Parts of a model that are not its language model.
_OTHERS: Final = re.compile(r"vision|visual|audio|encoder|tower|vit|talker|speech|image|mtp")


class Projection(Struct, frozen=True):
    """Output widths of one layer's projections; None for a projection that is not there, or not readable."""

    key: int | None = None
    value: int | None = None
    latent: int | None = None


Projections = Mapping[int, Projection]
"""By the number of the layer."""


def projections_of(tensors: Iterable[Tensor]) -> Projections:
    """Those of the language model: of the prefix with the most layers."""
    found: dict[str, dict[int, dict[str, int]]] = defaultdict(lambda: defaultdict(dict))
    for tensor in tensors:
        # A large mixture of experts has 100,000 tensors.
        match = _NAME.fullmatch(tensor.name) if tensor.rows and tensor.name.endswith(_ENDS) else None
        if match is None or _OTHERS.search(match["prefix"]):
            continue
        kind = _kind(match["part"])
        if kind is not None:
            found[match["prefix"]][int(match["layer"])][kind] = tensor.rows
    most = max(found.values(), key=len, default={})
    return {layer: Projection(**rows) for layer, rows in most.items()}


def _kind(part: str) -> str | None:
    for kind, names in (("key", _KEYS), ("value", _VALUES), ("latent", _LATENTS)):
        if part in names:
            return kind
    return None
