"""The arguments of a llama-server that engine.command starts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.errors import LauncherError
from launcher.config.loading import parse_config
from launcher.engines.llama_cpp.arguments import check_arguments, overriding, slots_of

EXAMPLE = Path(__file__).parents[3] / "configs" / "command-engine.toml"
LLAMA = "/opt/llama.cpp/llama-server"


@pytest.mark.parametrize(
    ("argv", "env", "slots"),
    [
        ((LLAMA, "--parallel", "8"), {}, 8),
        ((LLAMA, "-np", "8", "--parallel=2"), {}, 2),
        ((LLAMA, "--no-mmap"), {"LLAMA_ARG_N_PARALLEL": "6"}, 6),
        ((LLAMA, "-np", "3"), {"LLAMA_ARG_N_PARALLEL": "6"}, 3),
        ((LLAMA,), {}, None),
        ((LLAMA, "-np", "-1"), {}, None),
        ((LLAMA, "--parallel"), {}, None),
        ((LLAMA, "--parallel", "\u0663"), {}, None),
        (("other-server", "--parallel", "8"), {}, None),
    ],
)
def test_requests_at_once(argv: tuple[str, ...], env: dict[str, str], slots: int | None) -> None:
    assert slots_of(argv, env) == slots


def test_the_proxy_sends_no_more_than_the_server_of_the_example_computes() -> None:
    tree = tomllib.loads(EXAMPLE.read_text())
    machine = Machine(cores=32).topology()
    plan = make_plan(machine, parse_config(tree, origin="test"), {})
    assert {slot.effective.max_num_seqs for slot in plan.slots} == {8}
    tree["models"][0]["max_num_seqs"] = 2
    plan = make_plan(machine, parse_config(tree, origin="test"), {})
    assert {slot.effective.max_num_seqs for slot in plan.slots} == {2}, "an operator's lower limit counts"


@pytest.mark.parametrize(
    ("argument", "remedy"),
    [
        ("--host", "proxy.listen"), ("--port", "proxy.listen"), ("--api-key", "proxy.listen"), ("-m", "`path`"),
        ("--model", "`path`"), ("-hf", "`path`"), ("--models-dir", "`path`"), ("--gpt-oss-20b-default", "`path`"),
        ("-a", "`name`"), ("-c", "max_model_len"), ("--ctx_size", "max_model_len"), ("-np", "max_num_seqs"),
        ("-kvu", "pool"), ("--kv-unified-per-slot", "pool"), ("--tools", "run commands"),
        ("--mcp-servers-json", "run commands"), ("--agent", "run commands"), ("--ui-mcp-proxy", "run commands"),
    ],
)  # fmt: skip
def test_options_that_only_the_launcher_sets(argument: str, remedy: str) -> None:
    with pytest.raises(LauncherError, match=f"cannot use '{argument}' in engine.args: ") as refused:
        check_arguments(("--metrics", argument, "x"), {})
    assert remedy in f"{refused.value.message} {refused.value.remedy}"


@pytest.mark.parametrize(
    "name", ["LLAMA_ARG_HOST", "LLAMA_ARG_TOOLS", "LLAMA_ARG_N_PARALLEL", "LLAMA_API_KEY"]
)
def test_variables_that_only_the_launcher_sets(name: str) -> None:
    with pytest.raises(LauncherError, match=f"cannot use {name} in engine.env: "):
        check_arguments((), {name: "1"})


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("model.gguf",), "it is not an option"),
        (("--threads=4",), "takes option and value as two arguments"),
        (("-t 4",), "takes option and value as two arguments"),
    ],
)
def test_forms_that_llama_server_does_not_read(arguments: tuple[str, ...], why: str) -> None:
    with pytest.raises(LauncherError, match=why):
        check_arguments(arguments, {})


def test_other_options_are_taken() -> None:
    check_arguments(
        ("--embedding", "-ub", "4096", "--temp", "-1", "--lora", "a.gguf", "--numa", "isolate"), {"X": "1"}
    )


def test_words_that_override_keys_of_a_model() -> None:
    words = ("--metrics", "-b", "512", "--batch-size", "64")
    assert overriding(words, ["max_num_batched_tokens", "max_num_seqs"]) == (1, 2, 3, 4)
    assert overriding(words, ["max_num_seqs"]) == ()
