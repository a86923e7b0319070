"""The arguments of a llama-server that engine.command starts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from support.plans import make_plan
from support.synthetic import Machine

from launcher.config.loading import parse_config
from launcher.engines.llama_server import slots_of

EXAMPLE = Path(__file__).parents[2] / "configs" / "command-engine.toml"
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
