"""Models with published results: read as vLLM 0.32 reads them, and placed on the machines of these results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import published_models
from support.published_models import CONFIGS

from launcher.cli import main
from launcher.measure.bench.published import published

# A virtual machine on an EPYC 9454: 24 cores, 96 GB.
CLOUD = "socket:1 node:1(memory=96GB) l3:3(size=32MiB) core:8"
AMD, RACKSPACE = (
    ("Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-3B", "Mixtral-8x7B", "Qwen2.5-3B", "Qwen2.5-7B", "gpt-j-6b", "phi-4",
     "Llama-3.3-70B"),
    ("Qwen3-8B", "Qwen3-4B", "Qwen3-1.7B", "Qwen3-0.6B", "Llama-3.2-1B", "Llama-3.2-3B", "gemma-3-1b-it", "gemma-3-4b-it",
     "gemma-3-12b-it", "phi-4", "Phi-4-mini-instruct"),
)  # fmt: skip
# Longest context, KV bytes of a token, bytes of one request, weights: as vLLM 0.32 says (tests/engine/test_needs.py).
SAID = {
    "Qwen3-8B": (40960, 147456, 6039797760, 16381470720),
    "Qwen3-4B": (40960, 147456, 6039797760, 8044936192),
    "Qwen3-1.7B": (40960, 114688, 4697620480, 3441149952),
    "Qwen3-0.6B": (40960, 114688, 4697620480, 1192099840),
    "Llama-3.2-1B": (131072, 32768, 4294967296, 2471628800),
    "Llama-3.2-3B": (131072, 114688, 15032385536, 6425499648),
    "Llama-3.1-8B": (131072, 131072, 17179869184, 16060522496),
    "Llama-3.3-70B": (131072, 327680, 42949672960, 141107412992),
    "gemma-3-1b-it": (32768, 26624, 200278016, 1999771904),
    "gemma-3-4b-it": (131072, 139264, None, None),
    "gemma-3-12b-it": (131072, 393216, None, None),
    "phi-4": (16384, 204800, 3355443200, 29319014400),
    "Phi-4-mini-instruct": (4096, 131072, 553648128, 7672043520),
    "Mixtral-8x7B": (32768, 131072, 4294967296, 93405585408),
    "Qwen2.5-3B": (32768, 36864, 1207959552, 6171877376),
    "Qwen2.5-7B": (131072, 57344, 7516192768, 15231233024),
    "gpt-j-6b": (2048, 458752, 939524096, 12102289920),
}


def plan(name: str, machine: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    main(["plan", "--machine", machine, "--model", str(published_models.write(name, folder)), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_tables_have_these_models() -> None:
    named = {result.model for source in published().sources for result in source.results}
    assert named == set(AMD) | set(RACKSPACE) == CONFIGS.keys() == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_figures_are_those_of_the_engine(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (its,) = plan(name, "epyc-9755-2p", tmp_path / "model", capsys)["models"]
    length, token, request, weights = SAID[name]
    assert (its["max_model_len"], its["kv_bytes_per_token"]) == (length, token)
    if request is not None:
        assert abs(its["request_bytes"] / request - 1) < 0.01
    if weights is not None:
        assert abs(its["weights_bytes"] / weights - 1) < 0.001
    assert "assumed" not in its["sources"]


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        *((name, CLOUD) for name in RACKSPACE),
        *((name, its) for name in AMD for its in ("epyc-9755-1p", "epyc-9755-2p")),
    ],
)
def test_each_fits_on_the_machine_of_its_results(
    name: str, machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan(name, machine, tmp_path / name, capsys)
    assert found["violations"] == []
    assert found["slots"]
    assert all(row["left_bytes"] >= 0 for row in found["ledger"])
    (its,) = found["models"]
    assert all(slot["kv_cache_bytes"] >= its["request_bytes"] for slot in found["slots"])
