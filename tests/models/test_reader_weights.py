"""Weight files as people publish them: what their headers say, down to the bytes."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.gguf_headers import entry, text, write_gguf
from support.model_folders import LLAMA, model, write_safetensors

from launcher.base.errors import LauncherError
from launcher.models.gguf import read_gguf
from launcher.models.layers import LayerKind
from launcher.models.reader import read_profile, read_weights


def write_bin(file: Path, *storages: int) -> None:
    """An archive as torch.save writes it."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}))
        archive.writestr("archive/byteorder", "little")
        for i, size in enumerate(storages):
            archive.writestr(f"archive/data/{i}", b"\0" * size)
        archive.writestr("archive/version", "3\n")


def test_storages_of_an_archive_are_the_tensors(tmp_path: Path) -> None:
    path = model(tmp_path, {**LLAMA, "torch_dtype": "float32"})
    (tmp_path / "model.safetensors").unlink()
    write_bin(tmp_path / "pytorch_model-1.bin", 400, 1200)
    write_bin(tmp_path / "pytorch_model-2.bin", 800)
    profile = read_profile(path, "bfloat16")
    assert profile.weights_bytes == 1200
    assert profile.head_bytes == 600
    assert profile.weights_source == "storages of 2 .bin files, float32 as bfloat16"
    assert profile.unmapped_bytes == profile.file_bytes == (tmp_path / "pytorch_model-1.bin").stat().st_size
    assert profile.file_format == "bin"


def test_packed_storages_stay_as_they_are(tmp_path: Path) -> None:
    path = model(tmp_path, {**LLAMA, "quantization_config": {"quant_method": "gptq"}})
    (tmp_path / "model.safetensors").unlink()
    write_bin(tmp_path / "pytorch_model.bin", 400)
    profile = read_profile(path, "float32")
    assert profile.weights_bytes == 400
    assert profile.weights_source == "storages of pytorch_model.bin, as stored"


def test_a_broken_archive_is_an_error(tmp_path: Path) -> None:
    path = model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    write_bin(tmp_path / "pytorch_model.bin", 400)
    raw = bytearray((tmp_path / "pytorch_model.bin").read_bytes())
    at = raw.rindex(b"PK\x01\x02")
    raw[at : at + 4] = b"XXXX"
    (tmp_path / "pytorch_model.bin").write_bytes(raw)
    with pytest.raises(LauncherError, match=r"pytorch_model\.bin is a broken archive"):
        read_profile(path)


@pytest.mark.parametrize(
    ("config", "has_head", "tied"),
    [
        ({"tie_word_embeddings": True}, True, True),
        ({"tie_word_embeddings": False}, True, False),
        ({"tie_word_embeddings": False}, False, False),
        # The class decides (Gemma ties, Llama does not), and a tied model's files have no head.
        ({}, False, True),
        ({}, True, False),
        ({"text_config": {**LLAMA, "tie_word_embeddings": True}}, True, True),
    ],
)
def test_tied_embeddings(config: dict[str, Any], has_head: bool, tied: bool, tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", [100, 8])}
    if has_head:
        tensors["lm_head.weight"] = ("BF16", [100, 8])
    profile = read_profile(model(tmp_path, {**LLAMA, **config}, **tensors), "bfloat16")
    assert profile.tied_embeddings is tied


def test_head_and_replicated_tensors(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": ("BF16", [100, 8]),
        "lm_head.weight": ("BF16", [100, 8]),
        "model.layers.0.input_layernorm.weight": ("BF16", [8]),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": ("BF16", [4, 8]),
        "model.layers.0.self_attn.q_proj.weight": ("BF16", [8, 8]),
    }
    untied = read_profile(model(tmp_path / "a", LLAMA, **tensors), "bfloat16")
    assert untied.head_bytes == 1600
    assert untied.replicated_bytes == 16 + 64
    assert untied.weights_bytes == 3200 + 80 + 128
    assert untied.weights_bytes_per_rank(1) == untied.weights_bytes
    assert untied.weights_bytes_per_rank(4) == 80 + (3200 + 128) // 4
    tied = read_profile(model(tmp_path / "b", {**LLAMA, "tie_word_embeddings": True}, **tensors), "float32")
    assert tied.weights_bytes == 3200 + 160 + 256
    assert tied.weights_source == "headers of model.safetensors, 5 tensors as float32, tied embeddings once"
    assert (untied.tied_embeddings, tied.tied_embeddings) == (False, True)
    del tensors["lm_head.weight"]
    absent = read_profile(model(tmp_path / "c", LLAMA, **tensors), "auto")
    assert absent.head_bytes == 1600, "a checkpoint without a head has its embedding for one"
    assert absent.weights_source == "headers of model.safetensors, 4 tensors as a 16-bit type"


def test_a_tensor_in_two_files_counts_once(tmp_path: Path) -> None:
    path = model(tmp_path)
    write_safetensors(tmp_path / "more.safetensors", w=("BF16", [4, 8]))
    assert read_profile(path).weights_bytes == 64


@pytest.mark.parametrize(
    ("kind", "said", "tied"),
    [
        ("gemma2", {}, True),
        ("gemma2", {"tie_word_embeddings": False}, False),
        ("llama", {}, False),
        ("nobodys", {}, False),
    ],
)
def test_the_class_ties_the_output_projection_where_the_file_is_silent(
    tmp_path: Path, kind: str, said: dict[str, bool], tied: bool
) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", [100, 8]), "lm_head.weight": ("BF16", [100, 8])}
    path = model(tmp_path / "both", {**LLAMA, "model_type": kind, **said}, **tensors)
    profile = read_profile(path)
    assert profile.tied_embeddings is tied
    assert profile.weights_bytes == (1 if tied else 2) * 1600
    alone = model(tmp_path / "one", {**LLAMA, "model_type": kind}, **dict(list(tensors.items())[:1]))
    assert read_profile(alone).tied_embeddings, "files without an output projection"


def test_gguf_alone_is_a_model(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf",
        ("token_embd.weight", (256, 1000), 12),
        ("blk.0.attn_q.weight", (256, 256), 14),
        ("output_norm.weight", (256,), 0),
    )
    profile = read_profile(str(tmp_path))
    assert profile.weights_bytes == 1000 * 144 + 256 * 210 + 1024
    assert profile.head_bytes == 144_000
    assert profile.weights_source == "headers of m.gguf, 3 tensors as stored"
    assert profile.file_format == "gguf"
    assert profile.max_model_len == 4096
    (layers,) = profile.layers
    assert (layers.kind, layers.count, layers.heads, layers.head_bytes) == (LayerKind.FULL, 2, 2, 256)


def test_gguf_of_several_files_is_described_by_the_language_models(tmp_path: Path) -> None:
    """An encoder of pictures, and the later parts of a split model, have other metadata."""
    write_gguf(
        tmp_path / "a-mmproj.gguf", ("v.blk.0.w", (32, 2), 8),
        entries=[entry("general.architecture", 8, text("clip")), entry("clip.vision.block_count", 4, struct.pack("<I", 27))],
    )  # fmt: skip
    write_gguf(tmp_path / "m-00001-of-00002.gguf", ("blk.0.w", (32, 2), 8))
    write_gguf(
        tmp_path / "m-00002-of-00002.gguf", ("blk.1.w", (32, 2), 8),
        entries=[entry("split.no", 2, struct.pack("<H", 1))],
    )  # fmt: skip
    profile = read_profile(str(tmp_path))
    assert profile.weights_bytes == 3 * 2 * 34
    assert (sum(its.count for its in profile.layers), profile.max_model_len) == (2, 4096)


def test_gguf_beside_a_config(tmp_path: Path) -> None:
    path = model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for i in (1, 2):
        write_gguf(tmp_path / f"m-{i}.gguf", (f"blk.{i}.w", (32, 2), 8))
    profile = read_profile(path)
    assert profile.weights_bytes == 2 * 2 * 34
    assert sum(its.count for its in profile.layers) == 32


def test_gguf_metadata_of_every_kind(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ2B", 0, 2, 1, 2)
    extra = (entry("a", 9, nested), entry("b", 7, b"\1"), entry("c", 6, struct.pack("<f", 0.5)))
    header = read_gguf(write_gguf(tmp_path / "m.gguf", extra=extra, version=2))
    assert header.metadata["a"] == 1
    assert header.metadata["b"] is True
    assert header.metadata["c"] == 0.5
    assert header.metadata["tokenizer.ggml.tokens"] == 2
    assert header.as_config()["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"GGML", "is not a GGUF file"),
        (b"GG", "ends within its header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "ends within its header"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40), "more than 512 MiB"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("a", 99, b""), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("a", 9, struct.pack("<IQ", 99, 1)), "unknown array type 99"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"\xff", "corrupt"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry("a", 9, struct.pack("<IQ", 9, 1) * 3000), "16 arrays within"),
        # Data that the file does not have: of float32, and of a type that is not known.
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") + struct.pack("<IIQ", 0, 0, 32), "49 of 100 bytes: it is trunc"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") + struct.pack("<IIQ", 0, 77, 32), "49 of 96 bytes: it is trunc"),
    ],
)  # fmt: skip
def test_broken_gguf(raw: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    with pytest.raises(ValueError, match=why):
        read_gguf(tmp_path / "m.gguf")
    with pytest.raises(LauncherError, match=why):
        read_profile(str(tmp_path))


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({}, "auto"),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8}}, "fp8"),
        ({"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "auto"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8"),
    ],
)
def test_a_checkpoint_may_ask_for_an_fp8_cache(
    quantization: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    path = model(tmp_path, {**LLAMA, "quantization_config": quantization})
    assert read_profile(path).kv_cache_dtype == expected


def test_nested_type_and_no_file(tmp_path: Path) -> None:
    config = {"text_config": {**LLAMA, "torch_dtype": "float16"}}
    write_bin(tmp_path / "pytorch_model.bin", 400)
    assert read_weights(tmp_path, config, "float32").total_bytes == 800
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match=r"no \*\.safetensors, \*\.bin, \*\.pt, \*\.gguf or"):
        read_weights(tmp_path, config, "float32")


def test_an_encoder_needs_a_width(tmp_path: Path) -> None:
    path = model(tmp_path, {"model_type": "bert", "hidden_size": 384, "num_attention_heads": 6})
    assert read_profile(path).kv_bytes_per_token == 0
    assert read_profile(path).kv_source == "config.json: an encoder keeps no tokens"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert read_profile(path).hidden_size == 768, "of its class"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gte-new"}))
    assert read_profile(path).unread == "config.json has no hidden_size"
