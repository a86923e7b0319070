"""The tiny model of the quickstart: read back by our own reader, and made only where nothing else is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launcher.engines.llama_cpp.tiny_gguf import float32, main, vocabulary, write_gguf
from launcher.engines.tiny_model import CONTEXT, LAYERS, SPECIAL
from launcher.models.gguf import read_gguf
from launcher.models.gguf_model import read_gguf_profile


def test_it_is_a_model_that_can_be_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "tiny.gguf"
    assert main([str(file)]) == 0
    profile = read_gguf_profile(str(file))
    assert (profile.max_model_len, sum(its.count for its in profile.layers)) == (CONTEXT, LAYERS)
    assert [path.name for path in file.parent.iterdir()] == ["tiny.gguf"]
    assert file.stat().st_mode & 0o777 == 0o644
    before = file.read_bytes()
    assert main([str(file)]) == 0
    assert "already" in capsys.readouterr().out
    assert file.read_bytes() == before


def test_the_same_each_time(tmp_path: Path) -> None:
    files = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    for file in files:
        assert main([str(file)]) == 0
    assert files[0].read_bytes() == files[1].read_bytes()


def test_another_file_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.gguf"
    file.write_bytes(b"GGUF of mine")
    assert main([str(file)]) == 2
    assert f"cannot make the tiny model: '{file}' is another file" in capsys.readouterr().err
    assert file.read_bytes() == b"GGUF of mine"


def test_every_byte_has_a_token_and_every_merge_makes_one() -> None:
    tokens, merges = vocabulary()
    assert len(set(tokens)) == len(tokens)
    assert len(tokens) == len(SPECIAL) + 256 + len(merges)
    for merge in merges:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= set(tokens)


def test_a_written_file_is_read_back(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    values = {"a": True, "b": 3, "c": 0.5, "d": "text", "f": [1, -2]}
    write_gguf(file, values | {"e": ["x", "yz"]}, [float32("t", np.ones((2, 3), np.float32))])
    found = read_gguf(file)
    assert found.metadata == values | {"e": 2}
    (tensor,) = found.tensors
    assert (tensor.name, tensor.stored_bytes) == ("t", 24)
    assert file.read_bytes()[-32:-8] == np.ones(6, "<f4").tobytes()
