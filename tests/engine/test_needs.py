"""The plan's reading of a model's files against vLLM's own answer, without weights: another vLLM shows its differences."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from support import asked_many, published_models
from support.model_folders import write_safetensors

from launcher.config.schema import Config, Model
from launcher.engines.make import probe_stack
from launcher.engines.vllm import needs_program
from launcher.engines.vllm.demand import pool_for
from launcher.engines.vllm.needs import ENVIRONMENT, ask, question_of
from launcher.engines.vllm.settings import effective_config
from launcher.machine.topology import CpuInfo
from launcher.models.answer import Answer
from launcher.models.reader import read_profile

# Classes of every kind that vLLM 0.32 builds with what is installed here: dense, experts, windows, latents, states.
KINDS = (
    "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "exaone4", "falcon", "falcon_h1", "gemma2", "gemma3_text", "gpt2",
    "gpt_oss", "jamba", "mamba", "mamba2", "mixtral", "olmo3", "opt", "phi3", "qwen2_moe", "qwen3_moe", "qwen3_next",
    "zamba2",
)  # fmt: skip
FORMS = ("diff", "old")
STATES = ("falcon_h1", "jamba", "mamba", "mamba2", "qwen3_next", "zamba2")
# These need torchvision, which the CPU build of vLLM does not install.
PICTURES = frozenset({"gemma-3-4b-it", "gemma-3-12b-it"})
NAMES = (*published_models.CONFIGS, *(f"{kind}-{form}" for kind in KINDS for form in FORMS))
ZEN = CpuInfo("AuthenticAMD", "EPYC", 25, frozenset({"avx512f", "avx512_bf16"}))
ANSWER_S = 600
# kv_pool.py pads as vLLM does, but for blocks that a backend splits.
NEAR = 0.02


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The published models with the headers of their weights, and the defaults of classes with a single tensor."""
    root = tmp_path_factory.mktemp("models")
    for name in published_models.CONFIGS:
        published_models.write(name, root / name)
    subprocess.run(
        [sys.executable, "-P", asked_many.__file__, "describe", root, *KINDS], check=True, timeout=ANSWER_S
    )
    for kind in KINDS:
        for form in FORMS:
            tensor = {"model.norm.weight": ("BF16", [1024])}
            write_safetensors(root / f"{kind}-{form}" / "model.safetensors", **tensor)
    return {name: root / name for name in NAMES}


def asked(folders: Mapping[str, Path], names: tuple[str, ...], *instructions: str) -> Mapping[str, Answer]:
    questions = [
        {
            "folder": str(folders[name]), "arguments": ["--dtype", "bfloat16"], "instructions": instructions,
            "environment": ENVIRONMENT,
        }
        for name in names
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-P", asked_many.__file__, "ask", needs_program.__file__],
        input="\n".join(map(json.dumps, questions)), capture_output=True, text=True, check=True, timeout=ANSWER_S, cwd="/",
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == len(names), done.stderr[-2000:]
    return {name: msgspec.json.decode(line, type=Answer) for name, line in zip(names, lines, strict=True)}


@pytest.fixture(scope="module")
def answers(folders: Mapping[str, Path]) -> Mapping[str, Answer]:
    """Of an EPYC without AMX, whatever this processor is."""
    return asked(folders, NAMES, "avx512_bf16")


def differences(folder: Path, answer: Answer) -> Iterator[str]:
    profile = read_profile(str(folder))
    model = Model(name="m", path=str(folder), dtype="bfloat16")
    its = effective_config(model, Config(models=(model,)), profile, ZEN)
    pool = pool_for(profile, its, 1)
    figures = {
        "longest context": (its.planned_len, answer.max_model_len, 0.0),
        "KV bytes of a token": (
            profile.kv_bytes_per_token,
            sum(layers.count * layers.heads * layers.head_bytes for layers in answer.layers),
            0.0,
        ),
        "state bytes": (
            sum(layers.count * layers.state_bytes for layers in profile.layers),
            sum(layers.count * layers.state_bytes for layers in answer.layers),
            0.0,
        ),
        "bytes of a request": (pool.blocks(its.planned_len) * pool.block_bytes, answer.request_bytes, NEAR),
    }
    if folder.name in published_models.CONFIGS:
        figures["weights"] = (profile.weights_bytes, answer.weights_bytes, 0.001)
    for what, (ours, theirs, near) in figures.items():
        if ours is None or theirs is None or abs(ours - theirs) > near * theirs:
            yield f"{what}: {ours}, vLLM says {theirs}"


@pytest.mark.parametrize("name", NAMES)
def test_a_description_is_read_as_vllm_reads_it(
    name: str, folders: Mapping[str, Path], answers: Mapping[str, Answer]
) -> None:
    answer = answers[name]
    if name in PICTURES and answer.failed:
        assert "failed to be inspected" in answer.failed
        return
    assert answer.built, answer
    assert list(differences(folders[name], answer)) == []


def test_states_are_smaller_without_avx512_bf16_and_never_larger_than_planned(
    folders: Mapping[str, Path], answers: Mapping[str, Answer]
) -> None:
    """With AVX512-BF16 vLLM keeps recurrent states as float32 (platforms/cpu.py), without in the model's type. The plan
    takes the larger."""
    names = tuple(f"{kind}-old" for kind in STATES)
    smaller = 0
    for name, answer in asked(folders, names).items():
        without, with_bf16 = (
            sum(layers.count * layers.state_bytes for layers in its.layers) for its in (answer, answers[name])
        )
        assert 0 < without <= with_bf16, name
        smaller += without < with_bf16
    assert smaller


def test_one_model_is_asked_about_as_a_daemon_asks(folders: Mapping[str, Path], vllm: str) -> None:
    model = Model(name="m", path=str(folders["Qwen3-0.6B"]), dtype="bfloat16")
    config = Config(models=(model,))
    stack = probe_stack(msgspec.structs.replace(config.engine, command=(vllm,)))
    question = question_of(model, config, stack, ZEN.flags)
    assert question is not None
    answer = ask(question, limit_s=ANSWER_S)
    assert answer.built, answer
    assert (answer.max_model_len, answer.request_bytes) == (40960, 6039797760 * 28 // 36)


def test_arguments_decide_the_answer(folders: Mapping[str, Path], vllm: str) -> None:
    model = Model(name="m", path=str(folders["Qwen3-0.6B"]), dtype="bfloat16")
    overrides = ("--hf-overrides", '{"num_hidden_layers": 4, "max_position_embeddings": 1024}', "--nonsense")
    config = Config(
        models=(model,), engine=msgspec.structs.replace(Config(models=(model,)).engine, args=overrides)
    )
    stack = probe_stack(msgspec.structs.replace(config.engine, command=(vllm,)))
    question = question_of(model, config, stack, ZEN.flags)
    assert question is not None
    answer = ask(question, limit_s=ANSWER_S)
    assert (answer.max_model_len, answer.layers[0].count) == (1024, 4)
