"""The model in GGUF that a path names."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from support.gguf_headers import entry, text, write_gguf

from launcher.base.errors import LauncherError, PassingError
from launcher.models.gguf_model import gguf_files, read_gguf_profile

PARTS = ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf")


def test_a_files_header_is_its_profile(tmp_path: Path) -> None:
    """One matrix in Q8_0 (34 bytes for 32 elements), one in float16."""
    file = write_gguf(tmp_path / "m.gguf", ("token_embd.weight", (256, 2), 1), ("output.weight", (256, 2), 8))
    profile = read_gguf_profile(str(file))
    assert profile.weights_bytes == 2 * 512 + 512 // 32 * 34
    # K and V of 2 heads of 64 elements, 2 layers, 16 bits.
    assert profile.kv_bytes_per_token == 2 * 2 * 64 * 2 * 2
    assert (profile.max_model_len, profile.vocab_size, profile.known) == (4096, 2, True)
    assert profile.kv_source.startswith("header: ")


def test_all_parts_of_a_split_model_count(tmp_path: Path) -> None:
    write_gguf(tmp_path / PARTS[0], ("blk.0.w", (32, 2), 0))
    write_gguf(
        tmp_path / PARTS[1], ("blk.1.w", (32, 2), 0), entries=[entry("split.no", 2, struct.pack("<H", 1))]
    )
    write_gguf(tmp_path / "mmproj-m.gguf", ("v.w", (32, 2), 0))
    for path in (tmp_path, tmp_path / PARTS[0]):
        assert [file.name for file in gguf_files(str(path))] == list(PARTS)
        assert read_gguf_profile(str(path)).weights_bytes == 2 * 64 * 4


def test_a_later_part_is_no_model(tmp_path: Path) -> None:
    for name in PARTS:
        write_gguf(tmp_path / name)
    with pytest.raises(LauncherError, match="it is part 2 of 2") as refused:
        gguf_files(str(tmp_path / PARTS[1]))
    assert PARTS[0] in refused.value.remedy


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_missing_may_come(tmp_path: Path, name: str) -> None:
    write_gguf(tmp_path / name)
    missing = next(other for other in PARTS if other != name)
    with pytest.raises(PassingError, match=missing):
        gguf_files(str(tmp_path))


def test_a_directory_has_exactly_one_model(tmp_path: Path) -> None:
    with pytest.raises(PassingError, match="the directory is empty"):
        gguf_files(str(tmp_path))
    (tmp_path / "README.md").write_text("")
    with pytest.raises(LauncherError, match=r"no \*\.gguf file"):
        gguf_files(str(tmp_path))
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(LauncherError, match=r"2 models: a-Q4_0\.gguf, a-Q8_0\.gguf") as refused:
        gguf_files(str(tmp_path))
    assert "one of these files" in refused.value.remedy


@pytest.mark.parametrize(
    ("path", "passing"), [("m.gguf", True), ("/no/such/folder", True), ("org/model", False)]
)
def test_a_path_that_is_not_there(
    path: str, passing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository id never becomes a file."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LauncherError, match=f"cannot read model '{path}': no such file") as refused:
        read_gguf_profile(path)
    assert isinstance(refused.value, PassingError) is passing


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text("not one")
    with pytest.raises(LauncherError, match=r"m\.gguf is not a GGUF file") as refused:
        read_gguf_profile(str(tmp_path / "m.gguf"))
    assert "GGUF" in refused.value.remedy
    encoder = write_gguf(tmp_path / "e.gguf", entries=[entry("general.architecture", 8, text("clip"))])
    with pytest.raises(LauncherError, match=r"e\.gguf describes no language model .*'clip'"):
        read_gguf_profile(str(encoder))


def test_layers_without_attention_have_no_kv_cache(tmp_path: Path) -> None:
    """Of an architecture that no table knows, by the tensors."""
    entries = [
        entry("general.architecture", 8, text("qwen3next")),
        entry("qwen3next.block_count", 4, struct.pack("<I", 4)),
        entry("qwen3next.embedding_length", 4, struct.pack("<I", 256)),
        entry("qwen3next.attention.head_count", 4, struct.pack("<I", 4)),
        entry("qwen3next.attention.head_count_kv", 4, struct.pack("<I", 2)),
        entry("qwen3next.context_length", 4, struct.pack("<I", 4096)),
    ]
    attention = [(f"blk.3.attn_{which}.weight", (256, 128), 1) for which in ("k", "v")]
    others = [(f"blk.{layer}.ssm_out.weight", (256, 256), 1) for layer in range(3)]
    file = write_gguf(tmp_path / "m.gguf", *others, *attention, entries=entries)
    assert read_gguf_profile(str(file)).kv_bytes_per_token == 2 * 2 * 64 * 2


def test_a_remedy_names_what_it_reads(tmp_path: Path) -> None:
    with pytest.raises(PassingError, match="the directory is empty") as refused:
        gguf_files(str(tmp_path))
    assert refused.value.remedy.startswith("give models.path a model in GGUF")
