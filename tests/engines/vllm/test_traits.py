"""A server's own sampling defaults and LoRA adapters, from its arguments and the model's folder, as vLLM 0.32 reads them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.config.schema import Model
from launcher.engines.vllm.traits import lora_adapters, sampling_defaults

NAMED = '{"name": "sum", "path": "/l/sum", "base_model_name": "a"}'
OWN = {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [2, 5], "do_sample": True, "max_new_tokens": 300}


def defaults(folder: Path, *args: str) -> dict[str, float]:
    return sampling_defaults(args, Model(name="m", path=str(folder)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(OWN))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "temperature": 0.1}))
    return tmp_path


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((), {"temperature": 0.6, "top_p": 0.95, "max_tokens": 300}),
        (("--generation-config", "auto"), {"temperature": 0.6, "top_p": 0.95, "max_tokens": 300}),
        (("--generation-config", "vllm"), {}),
        (("--generation_config=vllm", "--override-generation-config", '{"min_p": 0.5}'), {"min_p": 0.5}),
        (("--override-generation-config", '{"temperature": 0}'), {"temperature": 0, "top_p": 0.95, "max_tokens": 300}),
        (("--override-generation-config.frequency_penalty", "0.5", "--generation-config=vllm"), {"frequency_penalty": 0.5}),
        (
            ("--override-generation-config.max_new_tokens=64", "--generation-config=vllm"),
            {"max_tokens": 64, "most_tokens": 64},
        ),
        (("--override-generation-config", "no json", "--generation-config=vllm"), {}),
    ],
)  # fmt: skip
def test_arguments_and_the_models_own_file(
    model: Path, args: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert defaults(model, *args) == expected


def test_a_folder_of_its_own_caps_every_request(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"max_new_tokens": 32, "presence_penalty": 0.25}')
    found = defaults(model, "--generation-config", str(other))
    assert found == {"max_tokens": 32, "most_tokens": 32, "presence_penalty": 0.25}


def test_config_json_where_there_is_no_generation_config(model: Path) -> None:
    (model / "generation_config.json").unlink()
    assert defaults(model) == {"temperature": 0.1}


@pytest.mark.parametrize("text", ["[]", "{", '{"temperature": "hot", "top_k": null, "min_p": true}'])
def test_what_is_no_generation_config_counts_as_empty(model: Path, text: str) -> None:
    (model / "generation_config.json").write_text(text)
    assert defaults(model) == {}


def test_no_folder(tmp_path: Path) -> None:
    assert defaults(tmp_path / "gone") == {}


def test_a_pipe_or_an_endless_file_in_the_models_folder_is_not_waited_for(model: Path) -> None:
    """Instances may write to the folder of downloads; root reads it."""
    (model / "generation_config.json").unlink()
    os.mkfifo(model / "generation_config.json")
    assert defaults(model) == {}
    (model / "generation_config.json").unlink()
    (model / "generation_config.json").symlink_to("/dev/zero")
    assert defaults(model) == {}


@pytest.mark.parametrize(
    ("args", "of_a", "alone"),
    [
        ((), (), ()),
        (("--lora-modules", "sql=/l/sql", "tone=/l=t"), (), ("sql", "tone")),
        (("--enable-lora", "--lora_modules=sql=/l/sql", "--seed", "1"), (), ("sql",)),
        (("--lora-modules", NAMED, "sql=/l/sql"), ("sum",), ("sum", "sql")),
        (("--lora-modules", NAMED.replace('"a"', '"alias"')), ("sum",), ("sum",)),
        (("--lora-modules", NAMED.replace('"a"', '"b"')), (), ()),
        (
            ("--lora-modules", "x=/x", "--seed", "1", "--lora-modules", "y=/y"),
            (),
            ("y",),
        ),  # as argparse has it
        (("--lora-modules", "nonsense", "[1]", "{}", '{"name": "n"}'), (), ("n",)),
        (("--lora-modules",), (), ()),
    ],
)
def test_lora_adapters(args: tuple[str, ...], of_a: tuple[str, ...], alone: tuple[str, ...]) -> None:
    a, b = Model(name="a", path="/a", aliases=("alias",)), Model(name="b", path="/b")
    assert lora_adapters(args, (a, b), a) == of_a
    assert lora_adapters(args, (a,), a) == alone
