"""Questions to vLLM, their digests and answers; children are real processes of a Python that plays vLLM's part."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from support.model_folders import model, write_safetensors

from launcher.base.errors import LauncherError
from launcher.config.schema import Config, Engine, Model, Runtime
from launcher.engines.software import Stack
from launcher.engines.vllm.needs import Answers, Question, answers_folder, ask, can_be_asked, question_of
from launcher.models.answer import Answer

FLAGS = frozenset({"avx512f", "avx512_bf16"})


def console(folder: Path) -> str:
    """A console script as pip writes vLLM's."""
    script = folder / "vllm"
    script.write_text("#!/usr/bin/python3\nfrom vllm.entrypoints.cli.main import main\nmain()\n")
    return str(script)


def asked(
    folder: Path, *, flags: frozenset[str] = FLAGS, vllm: str = "0.32.0", **changed: object
) -> Question:
    """A question about the model in `folder`; keywords are those of Model and Engine."""
    engine = {name: changed.pop(name) for name in ("args", "env") if name in changed}
    model = Model(name="m", path=str(folder), **changed)  # type: ignore[arg-type]
    stack = Stack(command=(console(folder.parent), "serve"), python="/usr/bin/python3", vllm=vllm)
    question = question_of(model, Config(models=(model,), engine=Engine(**engine)), stack, flags)  # type: ignore[arg-type]
    assert question is not None
    return question


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(model(tmp_path / "model"))


def test_what_decides_layers_and_weights_is_part_of_the_question(folder: Path) -> None:
    digests = {
        asked(folder).digest,
        asked(folder, vllm="0.33.0").digest,
        asked(folder, flags=FLAGS | {"amx_tile"}).digest,
        asked(folder, dtype="float32").digest,
        asked(folder, quantization="awq").digest,
        asked(folder, block_size=64).digest,
        asked(folder, args=("--kv-cache-dtype", "fp8")).digest,
        asked(folder, env={"VLLM_MLA_DISABLE": "1"}).digest,
    }
    (folder / "config.json").write_text("{}")
    digests.add(asked(folder).digest)
    (folder / "configuration_m.py").write_text("x = 1")
    digests.add(asked(folder).digest)
    write_safetensors(folder / "model.safetensors", w=("BF16", [8, 8]))
    digests.add(asked(folder).digest)
    assert len(digests) == 11


def test_what_does_not_is_no_other_question(folder: Path) -> None:
    digest = asked(folder).digest
    assert asked(folder, max_model_len=100, tensor_parallel_size=2).digest == digest
    assert asked(folder, args=("--max-model-len", "100", "--seed", "1")).digest == digest
    assert asked(folder, flags=frozenset({"avx512_bf16", "sse2"})).digest == digest
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("x")
    assert asked(folder).digest == digest


def test_the_operators_arguments_go_before_those_of_the_model(folder: Path) -> None:
    arguments = asked(folder, dtype="bfloat16", args=("--dtype", "float32", "--hf-overrides", "{}")).arguments
    assert arguments == ("--max-num-seqs", "64", "--dtype", "float32", "--hf-overrides", "{}")


def test_only_a_vllm_of_this_host_is_asked(tmp_path: Path) -> None:
    config = Config(models=(Model(name="m", path="m"),), engine=Engine(runtime=Runtime.PODMAN, image="x"))
    assert not can_be_asked(config, Stack(command=(console(tmp_path),)))


def test_a_script_of_somebodys_is_not_asked(folder: Path) -> None:
    script = folder.parent / "mine"
    script.write_text("#!/usr/bin/python3\nprint('starts something else')\n")
    its = Model(name="m", path=str(folder))
    stack = Stack(command=(str(script),), python="/usr/bin/python3", vllm="0.32.0")
    assert question_of(its, Config(models=(its,)), stack, FLAGS) is None
    module = Stack(
        command=("python3", "-m", "vllm.entrypoints.openai.api_server"), python="python3", vllm="0.32.0"
    )
    assert question_of(its, Config(models=(its,)), module, FLAGS) is not None


def test_a_model_that_is_not_here_is_not_asked_about(folder: Path) -> None:
    its = Model(name="m", path="nobody/none")
    stack = Stack(command=(console(folder.parent),), python="python3", vllm="0.32.0")
    assert question_of(its, Config(models=(its,)), stack, FLAGS) is None


def test_weights_that_cannot_be_read_are_told(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 8)
    with pytest.raises(LauncherError, match="is not a safetensors file"):
        asked(folder)


def python(folder: Path, body: str) -> str:
    """An interpreter that does `body` instead of what it is told."""
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\nimport json, os, sys, time\norder = json.load(sys.stdin)\n{body}\n"
    )
    script.chmod(0o755)
    return str(script)


def question(python: str, **changed: object) -> Question:
    fields = {
        "folder": "/m",
        "engine": "vLLM 0",
        "arguments": ("--dtype", "x"),
        "environment": {"A": "b"},
    }
    return Question(python=python, **(fields | changed))  # type: ignore[arg-type]


def test_an_answer_is_read(tmp_path: Path) -> None:
    body = (
        "told = order['folder'], order['arguments'], order['environment']\n"
        "assert told == ('/m', ['--dtype', 'x'], {'A': 'b'})\n"
        "print(json.dumps({'max_model_len': 9, 'request_bytes': 5, 'weights_bytes': 7,"
        " 'layers': [{'kind': 'full', 'count': 2, 'heads': 3, 'head_bytes': 4}]}))"
    )
    answer = ask(question(python(tmp_path, body)), limit_s=60)
    assert (answer.max_model_len, answer.request_bytes, answer.weights_bytes) == (9, 5, 7)
    assert answer.built
    assert [(its.kind, its.count, its.heads, its.head_bytes) for its in answer.layers] == [("full", 2, 3, 4)]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("sys.exit(3)", "its process ended with exit code 3"),
        ("os.kill(os.getpid(), 11)", "its process ended by signal SIGSEGV"),
        ("print('hello')", "its answer cannot be read"),
        ("print('[' * 100000)", "its answer cannot be read"),
        ("print(json.dumps({'layers': 'x'}))", "its answer cannot be read"),
        ("print(json.dumps({'max_model_len': -1}))", "its answer cannot be read"),
        ("print('x' * (1 << 22))", "its answer cannot be read"),
    ],
)
def test_anything_else_is_no_answer(body: str, why: str, tmp_path: Path) -> None:
    answer = ask(question(python(tmp_path, body)), limit_s=60)
    assert answer.failed is not None
    assert answer.failed.startswith(why)


def test_what_an_answer_says_is_printable(tmp_path: Path) -> None:
    body = "print(json.dumps({'refused': 'a\\x1b[2Jb'}))"
    assert ask(question(python(tmp_path, body)), limit_s=60).refused == "a\\x1b[2Jb"


def test_a_question_has_an_end_and_leaves_nothing(tmp_path: Path) -> None:
    body = "if os.fork() == 0:\n    time.sleep(600)\ntime.sleep(600)"
    began = time.monotonic()
    answer = ask(question(python(tmp_path, body)), limit_s=1)
    assert answer.failed == "no answer within 1 s"
    assert time.monotonic() - began < 300


def test_a_python_that_is_not_there_is_told(tmp_path: Path) -> None:
    answer = ask(question(str(tmp_path / "none")), limit_s=60)
    assert answer.failed == f"{tmp_path / 'none'} does not start: no such file or directory"


def test_root_runs_no_code_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    touched = python(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\nprint('{{}}')")
    assert "which root does not" in str(ask(question(touched, runs_code=True), limit_s=60).failed)
    assert not (tmp_path / "ran").exists()
    # As the instances' user it may.
    ask(question(touched, runs_code=True), limit_s=60, become=("env",))
    assert (tmp_path / "ran").exists()


def test_trust_is_read_as_vllm_reads_it(folder: Path) -> None:
    assert not asked(folder).runs_code
    assert asked(folder, trust_remote_code=True).runs_code
    assert asked(folder, args=("--trust_remote_code",)).runs_code


def test_an_answer_is_kept(folder: Path, tmp_path: Path) -> None:
    answers, one = Answers(tmp_path / "state" / "engine-answers"), asked(folder)
    assert answers.get(one) is None
    answers.keep(one, Answer(max_model_len=5, request_bytes=1))
    assert answers.get(one) == Answer(max_model_len=5, request_bytes=1)
    assert answers.get(asked(folder, dtype="float32")) is None
    next(answers.folder.iterdir()).write_text("[")
    assert answers.get(one) is None


def test_an_answer_of_another_user_is_not_believed(folder: Path, tmp_path: Path) -> None:
    answers, one = Answers(tmp_path / "answers"), asked(folder)
    answers.keep(one, Answer(max_model_len=5, request_bytes=1))
    file = next(answers.folder.iterdir())
    file.chmod(0o666)
    assert answers.get(one) is None


def test_answers_that_cannot_be_kept_stop_nothing(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answers = Answers(tmp_path / "file" / "answers")
    answers.keep(asked(folder), Answer())
    assert answers.get(asked(folder)) is None


def test_the_folder_of_answers() -> None:
    assert answers_folder({}, 0) == Path("/var/lib/numa-launcher/engine-answers")
    assert answers_folder({"STATE_DIRECTORY": "/s"}, 1000) == Path("/s/engine-answers")
    assert answers_folder({"HOME": "/h"}, 1000) == Path("/h/.cache/numa-launcher/engine-answers")
    assert answers_folder({"HOME": "/h", "XDG_CACHE_HOME": "/c"}, 1000) == Path(
        "/c/numa-launcher/engine-answers"
    )
