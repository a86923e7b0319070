"""`tune --stack`: the engines and libraries that are compared on one machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.gguf_headers import write_gguf
from support.model_folders import model
from support.verdicts import FINGERPRINT, SOFTWARE

from launcher.base.errors import LauncherError
from launcher.cli import main, tune
from launcher.cli.tune_plan import Prepared, begin, prepare
from launcher.measure.tune.model import Candidate, Verdict

TENSORS = (("token_embd.weight", (256, 1024), 0), ("blk.0.ffn_up.weight", (256, 512), 0))
Preparing = Callable[..., Prepared]


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", *TENSORS)


@pytest.fixture
def preparing(tmp_path: Path) -> Preparing:
    """Prepares a run for another machine, from a configuration of vLLM or one that ends in `engine`."""

    def make(*words: str, engine: str = "") -> Prepared:
        file = tmp_path / "config.toml"
        folder = model(tmp_path / "model")
        file.write_text(
            f'[[models]]\nname = "m"\npath = {json.dumps(folder)}\nmax_model_len = 2048\n'
            f'[engine]\nargs = ["--seed", "1"]\nenv = {{VLLM_LOGGING_LEVEL = "INFO"}}\n{engine}'
        )
        parser = argparse.ArgumentParser()
        tune.add_arguments(parser)
        args = parser.parse_args(
            ["-c", str(file), "--machine", "epyc-9454-1p", "--measure", "true", "--instances", "1,2", *words]
        )
        args.slo, args.stack, args.workload = {}, args.stack or [], args.workload or "rackspace-128"
        args.budget, args.seed = args.budget or 7200.0, args.seed or 0
        return prepare(args, tmp_path)

    return make


def racing(prepared: Prepared) -> list[Candidate]:
    return [each for each in prepared.candidates if each.refines is None]


@pytest.mark.parametrize("names", ["vllm,llama.cpp", "llama.cpp,vllm", "llama.cpp"])
def test_each_layout_is_measured_with_both_engines(names: str, preparing: Preparing, gguf: Path) -> None:
    prepared = preparing("--stack", names, "--gguf", str(gguf))
    entered = racing(prepared)
    assert [each.layout.stack for each in entered[:2]] == ["vllm", "llama.cpp"]
    assert entered[0].is_default, "the configured engine comes first, whatever the order of --stack"
    assert sum(each.layout.stack == "llama.cpp" for each in entered) == len(entered) / 2
    for each in entered:
        words = each.plan["slots"][0]["argv"]
        if each.layout.stack == "vllm":
            assert "serve" in words
            assert "--seed" in words
        else:
            assert words[words.index("--model") + 1] == str(gguf)
            assert "llama-server" in words
            assert "--seed" not in words, "arguments of vLLM are none of llama.cpp"
            assert "VLLM_LOGGING_LEVEL" not in each.plan["slots"][0]["env"]
    assert prepared.config_of(entered[1].layout).models[0].path == str(gguf)
    assert prepared.config_of(entered[0].layout) is prepared.config


def test_one_engine_needs_no_other_model(preparing: Preparing) -> None:
    assert {each.layout.stack for each in racing(preparing())} == {None}


@pytest.mark.parametrize("words", [("--stack", "vllm,llama.cpp"), ("--gguf", "m.gguf")])
def test_llama_cpp_and_its_model_come_together(words: tuple[str, ...], preparing: Preparing) -> None:
    with pytest.raises(LauncherError, match=r"cannot use one of --stack llama\.cpp and --gguf") as caught:
        preparing(*words)
    assert "--stack vllm,llama.cpp --gguf FILE" in caught.value.remedy


def test_a_file_that_is_no_model(preparing: Preparing, tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"none\.gguf"):
        preparing("--stack", "vllm,llama.cpp", "--gguf", str(tmp_path / "none.gguf"))


def test_another_engine_is_no_beginning(preparing: Preparing, gguf: Path) -> None:
    engine = 'kind = "command"\ncommand = ["serve", "--uds", "{uds}"]\n'
    with pytest.raises(LauncherError, match=r'cannot use --stack with engine\.kind = "command"'):
        preparing("--stack", "vllm,llama.cpp", "--gguf", str(gguf), engine=engine)


def test_a_winner_is_remembered_with_the_software_of_its_engine(preparing: Preparing, gguf: Path) -> None:
    other = replace(FINGERPRINT, software=replace(SOFTWARE, engine="llama.cpp"))
    prepared = replace(
        preparing("--stack", "vllm,llama.cpp", "--gguf", str(gguf)),
        fingerprint=FINGERPRINT, fingerprints={"vllm": FINGERPRINT, "llama.cpp": other},
    )  # fmt: skip
    journal = begin(prepared, {})
    for stack, fingerprint, configured in (("vllm", FINGERPRINT, None), ("llama.cpp", other, FINGERPRINT)):
        winner = next(i for i, each in enumerate(prepared.candidates) if each.layout.stack == stack)
        verdict = Verdict(
            winner=winner, different=True, ratio_to_default=None, interval=None, comparison=None, standings=[],
            complete=True,
        )  # fmt: skip
        best = prepared.remember(journal, verdict)
        assert best is not None
        assert (best.fingerprint, best.configured) == (fingerprint, configured)
        assert best.layout.stack == (stack if configured else None)


def test_pace_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--stack", "vllm, pace"]) == 2
    why, remedy = capsys.readouterr().err.splitlines()
    assert why.startswith(
        "cannot use --stack 'pace': pace-vllm 1.3.0 turns itself off beside any vLLM but 0.25.0 to "
    )
    assert remedy.startswith("give some of vllm, zentorch, llama.cpp; ")
