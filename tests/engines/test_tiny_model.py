"""The tiny model is made once, whole, and never over somebody else's files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launcher.engines.tiny_model import (
    CONTEXT,
    FILES,
    LAYERS,
    RECIPE,
    RECIPE_FILE,
    VOCABULARY,
    bfloat16,
    is_complete,
    is_foreign,
    main,
    make,
)
from launcher.models.reader import read_profile


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_text("{}")
    (tmp_path / RECIPE_FILE).write_text(json.dumps({"recipe": RECIPE}))
    return tmp_path


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_a_model_that_can_be_planned(tied: bool, tmp_path: Path) -> None:
    make(tmp_path / "one", tied=tied)
    assert is_complete(tmp_path / "one")
    profile = read_profile(str(tmp_path / "one"))
    assert (profile.max_model_len, sum(its.count for its in profile.layers)) == (CONTEXT, LAYERS)
    (header,) = struct.unpack("<Q", (tmp_path / "one" / "model.safetensors").read_bytes()[:8])
    assert header % 8 == 0, "tensors are aligned"
    make(tmp_path / "other", tied=tied)
    for name in FILES:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()
    assert sorted(path.stat().st_mode & 0o777 for path in (tmp_path / "one").iterdir()) == [0o644] * len(
        FILES
    )


@pytest.mark.long
def test_torch_reads_the_weights_and_transformers_the_tokenizer(tmp_path: Path) -> None:
    """vLLM loads the model with both. They take seconds to import."""
    make(tmp_path / "tiny")
    look = """
import json, sys
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer
weights = load_file(sys.argv[1] + "/model.safetensors")
words = AutoTokenizer.from_pretrained(sys.argv[1])
chat = words.apply_chat_template([{"role": "user", "content": "héllo"}], add_generation_prompt=True, tokenize=False)
ids = words(chat, add_special_tokens=False)["input_ids"]
print(json.dumps({
    "head": [str(weights["lm_head.weight"].dtype), *weights["lm_head.weight"].shape], "back": words.decode(ids) == chat,
    "special": [words.pad_token_id, words.bos_token_id, words.eos_token_id], "chat": chat, "begins": ids[0],
    "layers": AutoConfig.from_pretrained(sys.argv[1]).num_hidden_layers,
}))
"""
    done = subprocess.run(
        [sys.executable, "-c", look, str(tmp_path / "tiny")],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["head"] == ["torch.bfloat16", VOCABULARY, 256]
    assert said["back"]
    assert said["special"] == [0, 1, 2]
    assert said["chat"].endswith("<|im_start|>user\nhéllo<|im_end|>\n<|im_start|>assistant\n")
    assert said["begins"] == 3, "a special token is one token"
    assert said["layers"] == LAYERS


def test_a_number_goes_to_the_nearest_of_16_bits() -> None:
    values = np.array([1.0, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, 0.0], np.float32)
    assert bfloat16(values).tolist() == [0x3F80, 0xC020, 0x3F80, 0x3F82, 0]


def test_a_whole_model_is_used_again(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_complete(model)
    assert main([str(model)]) == 0
    assert "there already" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["{}", "[]", "not json", '{"recipe": "older"}'])
def test_a_model_of_another_recipe_is_made_anew(model: Path, text: str) -> None:
    (model / RECIPE_FILE).write_text(text)
    assert not is_complete(model)
    assert not is_foreign(model)


def test_a_missing_file_means_incomplete(model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert not is_complete(model)


def test_other_folders_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_foreign(tmp_path)
    assert not is_foreign(tmp_path / "new")
    (tmp_path / "thesis.tex").write_text("")
    assert main([str(tmp_path)]) == 2
    assert "contains other files" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()
