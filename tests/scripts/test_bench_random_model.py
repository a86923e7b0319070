"""The model of scripts/bench-rivals: the same weights as vLLM and as llama.cpp read them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench import random_model

from launcher.engines.llama_cpp.tiny_gguf import ALIGNMENT
from launcher.models.gguf_model import read_gguf_profile

SHAPE = random_model.SHAPES["tiny"]
PARAMETERS = sum(int(np.prod(size)) for size in SHAPE.tensors().values())


def test_bfloat16_rounds_to_the_nearest() -> None:
    values = np.array(
        [1.0, 1.00390625, 1.01171875, -2.5], np.float32
    )  # two of them half way between neighbours
    widened = random_model.bfloat16(values).astype(np.uint32) << 16
    assert widened.view(np.float32).tolist() == [1.0, 1.0, 1.015625, -2.5]


@pytest.mark.parametrize(("kind", "worst"), [("Q8_0", 0.0005), ("Q4_0", 0.008)])
def test_quantised_values_are_near(kind: str, worst: float) -> None:
    values = random_model.values_of("w", (8, 64))
    blocks = random_model.TYPES[kind][2](values)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if kind == "Q8_0":
        whole = blocks[:, 2:].view(np.int8).astype(np.float32)
    else:
        four = blocks[:, 2:]
        whole = np.concatenate([four & 15, four >> 4], axis=1).astype(np.float32) - 8
    assert np.abs((whole * scale).reshape(values.shape) - values).max() < worst


@pytest.mark.parametrize("kind", sorted(random_model.TYPES))
def test_a_gguf_file_has_the_shape(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    random_model.write_gguf(SHAPE, kind, file)
    profile = read_gguf_profile(str(file))
    assert (sum(its.count for its in profile.layers), profile.hidden_size, profile.vocab_size) == (
        SHAPE.layers,
        SHAPE.hidden,
        SHAPE.vocabulary,
    )
    assert file.stat().st_size % ALIGNMENT == 0


def test_a_folder_has_each_parameter(tmp_path: Path) -> None:
    random_model.write_folder(SHAPE, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    del header["__metadata__"]
    assert sum(int(np.prod(one["shape"])) for one in header.values()) == PARAMETERS
    assert len(data) == 8 + length + 2 * PARAMETERS
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == SHAPE.vocabulary
