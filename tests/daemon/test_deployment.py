"""What a plan's rules are told of this host, and what engine.args change in a deployment."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.config.schema import Config, Control, Engine, Model, Runtime
from launcher.daemon.deployment import Deployment, _facts, build_deployment
from launcher.daemon.rollout import Step, compare
from launcher.engines.vllm_software import Stack
from launcher.machine.named import find_topology

MODELS = (Model(name="m", path="/m"),)


def test_what_the_instances_inherit_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ZENTORCH_WEIGHT_PREPACK", "0")
    stack = Stack(command=("vllm",))
    assert _facts(stack, Config(models=MODELS)).weight_prepack == "0"
    # A container gets what is named, and none of the daemon's own variables.
    contained = Config(models=MODELS, engine=Engine(runtime=Runtime.PODMAN, image="x"))
    assert _facts(stack, contained).weight_prepack is None


def deployment_of(folder: Path, *args: str, **model: int) -> Deployment:
    config = Config(
        models=(Model(name="m", path="nobody/none", **model),),  # type: ignore[arg-type]
        engine=Engine(args=args), control=Control(socket=str(folder / "c.sock")),
    )  # fmt: skip
    return build_deployment(config, machine=find_topology("epyc-7763-1p"))


@pytest.mark.parametrize("args", [("--max-num-seqs", "8"), ("--max_num_seqs=4", "--max-num-seqs=8")])
def test_a_limit_in_engine_args_is_the_limit_everywhere(args: tuple[str, ...], tmp_path: Path) -> None:
    plain, limited = deployment_of(tmp_path), deployment_of(tmp_path, *args)
    assert plain.connections == 64 * len(plain.plan.slots)
    assert limited.connections == 8 * len(limited.plan.slots)
    assert {slot["max_num_seqs"] for slot in limited.to_json()["slots"]} == {8}
    reasons = [change.reasons for change in compare(plain, limited).slots if change.step is Step.RESTART]
    assert len(reasons) == len(limited.plan.slots)
    assert all("max_num_seqs 64 becomes 8" in each for each in reasons)
    # The same limit written elsewhere is no other limit.
    moved = compare(limited, deployment_of(tmp_path, max_num_seqs=8)).slots
    assert not any(reason.startswith("max_num_seqs") for change in moved for reason in change.reasons)
