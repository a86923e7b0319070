"""Versions of vLLM, torch and zentorch that match, from compatibility.toml. Pure."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from launcher.doctor.report import Row, Tier, Verdict
from launcher.engines.software_versions import Version, parse_release, zentorch_mismatch


@dataclass(frozen=True, slots=True)
class VersionSet:
    """Versions published for each other."""

    vllm: tuple[str, ...]
    torch: str
    zentorch: str


@dataclass(frozen=True, slots=True)
class Matrix:
    sets: tuple[VersionSet, ...]
    plugin_from: Version
    plugin_to: Version

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError for a set without a known source."""
        raw: Mapping[str, Any] = tomllib.loads(text)
        sources = raw["sources"]
        for entry in (*raw["set"], raw["plugin"]):
            if entry["source"] not in sources:
                raise ValueError(f"compatibility.toml: no source named {entry['source']!r}")
        return cls(
            tuple(VersionSet(tuple(one["vllm"]), one["torch"], one["zentorch"]) for one in raw["set"]),
            parse_release(raw["plugin"]["from"]),
            parse_release(raw["plugin"]["to"]),
        )

    def set_for(self, vllm: str) -> VersionSet | None:
        """The set of a vLLM version; None when the table does not have it."""
        release = parse_release(vllm)
        return next((one for one in self.sets if release in map(parse_release, one.vllm)), None)


def versions_row(matrix: Matrix, vllm: str, torch: str | None, zentorch: str | None) -> Row:
    installed = ", ".join(
        f"{name} {version}"
        for name, version in (("vLLM", vllm), ("torch", torch), ("zentorch", zentorch))
        if version
    )
    if torch is None:
        return Row(
            "versions", Verdict.FAIL, f"{installed}: no torch", "reinstall vLLM with its torch", Tier.FALLBACK
        )
    known = matrix.set_for(vllm)
    mismatch = zentorch_mismatch(torch, zentorch)
    if mismatch is not None:
        remedy = (
            f"pip install zentorch=={known.zentorch}"
            if known
            else "install the zentorch with torch's version number"
        )
        return Row("versions", Verdict.WARN, mismatch, remedy, Tier.DEGRADED)
    if known is None:
        return _unknown(matrix, installed, vllm, zentorch)
    if parse_release(torch) != parse_release(known.torch):
        return Row(
            "versions", Verdict.WARN, f"{installed}: this vLLM was built against torch {known.torch}",
            f"pip install torch=={known.torch} (the CPU build)", Tier.DEGRADED,
        )  # fmt: skip
    if zentorch is not None and parse_release(zentorch) != parse_release(known.zentorch):
        return Row(
            "versions", Verdict.WARN, f"{installed}: published together with zentorch {known.zentorch}",
            f"pip install zentorch=={known.zentorch}",
        )  # fmt: skip
    return Row("versions", Verdict.OK, f"{installed}: compatible")


def _unknown(matrix: Matrix, installed: str, vllm: str, zentorch: str | None) -> Row:
    newest = matrix.sets[-1]
    if zentorch is not None and matrix.plugin_from <= parse_release(vllm)[:2] <= matrix.plugin_to:
        return Row(
            "versions", Verdict.WARN,
            f"{installed}: zentorch is a plugin of this old vLLM and lists its supported versions at start",
            f"read the instance's log for 'Plugin supports versions', or use vLLM {newest.vllm[-1]}",
        )  # fmt: skip
    return Row(
        "versions", Verdict.WARN, f"{installed}: not a known combination",
        f"if it does not start, use vLLM {newest.vllm[-1]} with torch {newest.torch} and zentorch {newest.zentorch}",
    )  # fmt: skip
