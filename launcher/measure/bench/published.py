"""Results that others published, from published.toml: vLLM on AMD EPYC, each with its source."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

FILE: Final = Path(__file__).parent / "published.toml"


class PublishedResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model's row. None: not published."""

    model: str
    total_tokens_per_s: float
    """Prompt and output tokens."""
    output_tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    tpot_p50_s: float | None = None


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of one machine, stack and workload."""

    name: str
    reference: str
    machine: str
    cores: int
    core: str
    """What `cores` counts: "core" or "vCPU", which may be half a core."""
    stack: str
    workload: str
    driver: str
    results: list[PublishedResult]
    url: str = ""


class PublishedRatio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    ratio: float


class RatioSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratios whose throughputs were not published."""

    name: str
    reference: str
    machine: str
    results: list[PublishedRatio]


class Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: list[Source]
    ratios: list[RatioSource]


@cache
def published() -> Published:
    return msgspec.toml.decode(FILE.read_bytes(), type=Published)


def same_model(published_name: str, served_name: str) -> bool:
    """Whether a served model is of the published name: organisation, case and "Instruct" do not count."""
    return _plain(published_name) == _plain(served_name)


def size_in_billions(model: str) -> float:
    """Parameters by the model's name, for the order of rows; 0 where the name has none."""
    experts = re.search(r"(\d+)x(\d+(?:\.\d+)?)b\b", model, re.IGNORECASE)
    if experts:
        return float(experts[1]) * float(experts[2])
    size = re.search(r"(\d+(?:\.\d+)?)b\b", model, re.IGNORECASE)
    return float(size[1]) if size else _NAMED_SIZES.get(model.lower(), 0)


# Parameters that the name does not tell, as Rackspace's tables round them.
_NAMED_SIZES: Final = {"phi-4": 15.0, "phi-4-mini-instruct": 4.0}


def _plain(model: str) -> str:
    name = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return re.sub(r"[-_](instruct|it|hf|chat)$", "", name).replace("meta-", "")
