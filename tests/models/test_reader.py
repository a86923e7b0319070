"""Model directories as people have them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from support.model_folders import LLAMA, model, write_safetensors

from launcher.base.errors import LauncherError
from launcher.models.profile import UNKNOWN
from launcher.models.reader import find_model, read_profile


def test_llama(tmp_path: Path) -> None:
    profile = read_profile(model(tmp_path), "bfloat16")
    assert profile.weights_bytes == 64
    assert profile.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert profile.max_model_len == 131072
    assert profile.num_kv_heads == 8
    assert profile.architecture == "LlamaForCausalLM"
    assert profile.known


@pytest.mark.parametrize(
    ("stored", "dtype", "size"), [("F32", "bfloat16", 64), ("BF16", "float32", 128), ("F32", "auto", 64)]
)
def test_weights_count_in_the_engines_dtype(stored: str, dtype: str, size: int, tmp_path: Path) -> None:
    assert read_profile(model(tmp_path, w=(stored, [4, 8])), dtype).weights_bytes == size


def test_packed_weights_count_as_they_are(tmp_path: Path) -> None:
    config = {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    profile = read_profile(model(tmp_path, config, q=("I32", [10]), s=("F16", [10]), f=("F8_E4M3", [10])))
    assert profile.weights_bytes == 40 + 20 + 10
    assert profile.quantization == "gptq"


def test_tied_head_counts_once(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": ("BF16", [8]), "lm_head.weight": ("BF16", [8])}
    assert read_profile(model(tmp_path / "a", LLAMA, **tensors)).weights_bytes == 32
    tied = {**LLAMA, "tie_word_embeddings": True}
    assert read_profile(model(tmp_path / "b", tied, **tensors)).weights_bytes == 16


def test_shards_by_index(tmp_path: Path) -> None:
    path = model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for i in (1, 2):
        write_safetensors(tmp_path / f"model-{i}.safetensors", **{f"w{i}": ("BF16", [10])})
    write_safetensors(tmp_path / "stray.safetensors", other=("BF16", [1000]))
    index = {"weight_map": {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_profile(path).weights_bytes == 40
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(LauncherError, match=r"model-2\.safetensors is missing"):
        read_profile(path)


def test_shards_without_index_and_another_layout(tmp_path: Path) -> None:
    path = model(tmp_path)
    write_safetensors(tmp_path / "more.safetensors", v=("BF16", [8]))
    write_safetensors(tmp_path / "consolidated.safetensors", x=("BF16", [1000]))
    assert read_profile(path).weights_bytes == 64 + 16


def test_bin_files_fall_back_to_sizes(tmp_path: Path) -> None:
    path = model(tmp_path, {**LLAMA, "torch_dtype": "float32"})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model-1.bin").write_bytes(b"x" * 400)
    (tmp_path / "training_args.bin").write_bytes(b"x" * 999)
    profile = read_profile(path, "bfloat16")
    assert profile.weights_bytes == 200
    assert profile.weights_source == "file sizes of pytorch_model-1.bin, float32 as bfloat16"


@pytest.mark.parametrize(
    ("config", "per_token"),
    [
        ({"num_key_value_heads": None}, 2 * 32 * 32 * 128 * 2),
        ({"head_dim": 64}, 2 * 32 * 8 * 64 * 2),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * (512 + 64) * 2),
        ({"layer_types": ["full_attention", "linear_attention", "sliding_attention"]}, 2 * 2 * 8 * 128 * 2),
        ({"multi_query": True}, 2 * 32 * 1 * 128 * 2),
    ],
    ids=["mha", "head_dim", "mla", "hybrid", "mqa"],
)
def test_kv_of_one_token(config: dict[str, Any], per_token: int, tmp_path: Path) -> None:
    assert read_profile(model(tmp_path, {**LLAMA, **config})).kv_bytes_per_token == per_token


def test_gpt_j_names_and_nested_text_config(tmp_path: Path) -> None:
    gptj = {"n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048}
    profile = read_profile(model(tmp_path / "a", gptj))
    assert profile.kv_bytes_per_token == 2 * 28 * 16 * 256 * 2
    assert profile.max_model_len == 2048
    nested = read_profile(model(tmp_path / "b", {"architectures": ["Vision"], "text_config": LLAMA}))
    assert [its.count for its in nested.layers] == [32]
    assert nested.architecture == "Vision"


@pytest.mark.parametrize(
    ("extra", "length"),
    [
        ({}, 131072),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, 131072),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 262144),
        ({"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_context_length(extra: dict[str, Any], length: int | None, tmp_path: Path) -> None:
    assert read_profile(model(tmp_path, {**LLAMA, **extra})).max_model_len == length


def test_sliding_window_is_noted(tmp_path: Path) -> None:
    assert read_profile(model(tmp_path, {**LLAMA, "sliding_window": 4096})).sliding_window == 4096
    off = {**LLAMA, "sliding_window": 4096, "use_sliding_window": False}
    assert read_profile(model(tmp_path, off)).sliding_window is None


def broken_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def list_json(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_heads(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def text_file(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0")


def list_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")


def with_config(**keys: Any) -> Any:
    """Spoils a directory by keys of its config.json."""

    def spoil(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(LLAMA | keys))

    return spoil


def with_header(text: str) -> Any:
    """Spoils a directory by the header of its weight file."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())

    return spoil


def with_index(text: str) -> Any:
    """Spoils a directory by an index of its weight files."""

    def spoil(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(text)

    return spoil


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (cut_short, r"model.safetensors has \d+ of \d+ bytes: it is truncated"),
        (with_header("{"), "model.safetensors has a broken header"),
        (with_header("[" * 9999), "model.safetensors has a broken header"),
        (with_header('{"w": {"dtype": "F32", "shape": [1]}}'), "a tensor without shape, type or offsets"),
        (with_header('{"w": 3}'), "a tensor without shape, type or offsets"),
        (with_index("{}"), "index.json is not an index of weight files"),
        (with_index("{"), "index.json is not an index of weight files"),
        (with_index('{"weight_map": {"w": "model-2.safetensors"}}'), "model-2.safetensors is missing, but"),
        (broken_json, "config.json"),
        (list_json, "not a JSON object"),
        (no_config, "no config.json"),
        (no_weights, r"no \*\.safetensors"),
        (text_file, "not a safetensors file"),
        (list_header, "not a safetensors file"),
    ],
)
def test_broken_directories(spoil: Any, why: str, tmp_path: Path) -> None:
    path = model(tmp_path)
    spoil(tmp_path)
    with pytest.raises(LauncherError, match=why) as caught:
        read_profile(path)
    assert caught.value.message.startswith(f"cannot read model {path!r}: ")
    assert "config.json" in caught.value.remedy


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (
            with_config(num_hidden_layers=10**30),
            "num_hidden_layers of config.json is 1e.30, which is no size",
        ),
        (with_config(num_hidden_layers=10**6), "claims 1000000 layers"),
        (with_config(hidden_size=float("nan"), head_dim=8), "hidden_size of config.json is nan"),
        (with_config(hidden_size=-64, head_dim=8), "hidden_size of config.json is -64, which is no size"),
        (
            with_config(rope_scaling={"type": "linear", "factor": 1e308}),
            r"config.json is not supported \(OverflowError",
        ),
        (no_heads, "no num_hidden_layers"),
    ],
)
def test_sizes_that_cannot_be_read_leave_the_weights(spoil: Any, why: str, tmp_path: Path) -> None:
    path = model(tmp_path)
    spoil(tmp_path)
    profile = read_profile(path)
    assert profile.weights_bytes == 64
    assert not profile.known
    assert re.search(why, str(profile.unread))


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="no such directory"):
        read_profile(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match="not a directory"):
        read_profile(str(tmp_path / "file"))


def test_repository_ids_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert read_profile("org/name") == UNKNOWN
    repo = tmp_path / "hub/models--org--name"
    model(repo / "snapshots/abc")
    assert read_profile("org/name").known
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("def")
    assert read_profile("org/name") == UNKNOWN, "main is not downloaded"
    (repo / "refs/main").write_text("abc\n")
    assert find_model("org/name") == repo / "snapshots/abc"


def test_places_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    model(tmp_path / "xdg/huggingface/hub/models--gpt2/snapshots/1")
    assert read_profile("gpt2").known
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    assert not read_profile("gpt2").known


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "pytorch_model.bin", "model.gguf"],
)
@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path, name: str, what: str) -> None:
    """Others may write there: a pipe waits for a writer, /dev/zero has no end."""
    if name not in {"config.json", "model.gguf"}:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    if what == "pipe":
        os.mkfifo(tmp_path / name)
    elif what == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(LauncherError, match="cannot read model"):
        read_profile(str(tmp_path))


@pytest.mark.parametrize("name", ["../../../other", "..", "a" * 300, "a\0b", "", "/etc", "x/" * 3000])
def test_a_reference_that_names_no_snapshot_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Instances may write to the folder of downloads; root reads it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(LLAMA))
    main = tmp_path / "models--org--m" / "refs" / "main"
    main.parent.mkdir(parents=True)
    main.write_text(name)
    with pytest.raises(LauncherError, match="refs/main: it names no snapshot"):
        find_model("org/m")
    main.unlink()
    main.symlink_to("/dev/null")
    assert find_model("org/m") is None


def test_a_config_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.models.weight_files.MAX_JSON_BYTES", 1 << 20)
    (tmp_path / "config.json").touch()
    os.truncate(tmp_path / "config.json", 1 << 40)
    with pytest.raises(LauncherError, match="has more than 1 MiB"):
        read_profile(str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--m" / "refs").mkdir(parents=True)
    (tmp_path / "config.json").rename(tmp_path / "models--org--m" / "refs" / "main")
    with pytest.raises(LauncherError, match="refs/main: main has more than 1 MiB"):
        read_profile("org/m")


PARAMS = {
    "dim": 4096, "n_layers": 36, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "n_kv_heads": 8,
    "vocab_size": 131072, "max_position_embeddings": 262144,
}  # fmt: skip


def mistral_model(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "params.json").write_text(json.dumps(PARAMS))
    write_safetensors(folder / "consolidated.safetensors", **{"tok_embeddings.weight": ("BF16", [4, 8])})
    return str(folder)


def test_mistrals_own_format(tmp_path: Path) -> None:
    profile = read_profile(mistral_model(tmp_path))
    assert profile.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert profile.max_model_len == 262144
    assert profile.weights_bytes == 64
    assert profile.assumed == ()


def test_mistrals_own_format_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    mistral_model(tmp_path / "models--org--name/snapshots/abc")
    assert read_profile("org/name").known
    (tmp_path / "models--org--name/refs").mkdir()
    (tmp_path / "models--org--name/refs/main").write_text("abc")
    assert read_profile("org/name").known


def test_params_json_beside_config_json(tmp_path: Path) -> None:
    """vLLM takes params.json where weights in Mistral's layout are beside it, with config.json for what it leaves out."""
    mistral_model(tmp_path)
    path = model(tmp_path, {**LLAMA, "sliding_window": None, "text_config": {"num_hidden_layers": 4}})
    assert [its.count for its in read_profile(path).layers] == [36]
    shorter = {key: value for key, value in PARAMS.items() if key != "max_position_embeddings"}
    (tmp_path / "params.json").write_text(json.dumps(shorter))
    assert read_profile(path).max_model_len == 131072
    (tmp_path / "consolidated.safetensors").unlink()
    assert [its.count for its in read_profile(model(tmp_path)).layers] == [32]


def test_quantization_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = model(tmp_path)
    its = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(its))
    profile = read_profile(path)
    assert (profile.quantization, profile.kv_cache_dtype) == ("modelopt", "fp8")
    (tmp_path / "hf_quant_config.json").write_text("{")
    assert read_profile(path).quantization is None


def test_lengths_beside_config_json(tmp_path: Path) -> None:
    config = {
        "model_type": "xlm-roberta", "hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 2,
        "max_position_embeddings": 514, "position_embedding_type": "absolute",
    }  # fmt: skip
    path = model(tmp_path, config)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    assert read_profile(path).max_model_len == 512
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 256}')
    assert read_profile(path).max_model_len == 256


def test_of_an_omni_model_only_the_thinker_is_loaded(tmp_path: Path) -> None:
    tensors = {
        "thinker.model.w": ("BF16", [8]),
        "talker.model.w": ("BF16", [800]),
        "token2wav.w": ("F32", [800]),
    }
    assert read_profile(model(tmp_path, LLAMA, **tensors)).weights_bytes == 16


def test_a_type_of_the_kv_cache_that_is_text(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "kv_cache_scheme": "FP8", "config_groups": None}
    profile = read_profile(model(tmp_path, {**LLAMA, "quantization_config": quantization}))
    assert profile.known
    assert profile.kv_cache_dtype == "auto"


def test_a_config_json_nested_too_deeply(tmp_path: Path) -> None:
    path = model(tmp_path)
    (tmp_path / "config.json").write_text('{"a":' * 99_999)
    with pytest.raises(LauncherError, match=r"config\.json"):
        read_profile(path)


def test_what_the_operator_overrides_is_read_as_vllm_applies_it(tmp_path: Path) -> None:
    """--hf-overrides: keys of the description, those of its parts one by one, other objects whole (config/model.py)."""
    path = model(tmp_path / "a", {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    assert read_profile(path).max_model_len == 4 * 131072
    longer = read_profile(
        path, overrides={"max_position_embeddings": 1000, "rope_scaling": {"factor": 2.0, "type": "linear"}}
    )
    assert longer.max_model_len == 2000
    nested = model(tmp_path / "b", {"architectures": ["Vision"], "text_config": LLAMA})
    its = read_profile(nested, overrides={"text_config": {"num_key_value_heads": 2}})
    assert (its.num_kv_heads, its.max_model_len) == (2, 131072)
    unread = read_profile(path, overrides={"num_hidden_layers": "x", "hidden_size": -5})
    assert unread.unread is not None


def test_states_of_a_training_are_no_weights(tmp_path: Path) -> None:
    path = Path(model(tmp_path, LLAMA))
    (path / "model.safetensors").rename(path / "optimizer.pt")
    with pytest.raises(LauncherError, match="it has no"):
        read_profile(str(path))


@pytest.mark.parametrize("name", ["model.pt", "model.tensors"])
def test_weights_in_another_format_count_with_the_size_of_their_files(tmp_path: Path, name: str) -> None:
    path = Path(model(tmp_path, LLAMA))
    (path / "model.safetensors").unlink()
    (path / name).write_bytes(b"x" * 1000)
    profile = read_profile(str(path), "bfloat16")
    assert profile.weights_bytes in {500, 1000}
    assert profile.file_format == name.partition(".")[2]
    assert "file sizes of" in profile.weights_source
    assert profile.known
