"""What a plan's rules are told of this host, and what engine.args change in a deployment."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
from support.asked_engine import ANSWER, answering_vllm
from support.model_folders import model

from launcher.base.errors import LauncherError, PassingError
from launcher.config.schema import Config, Control, Engine, EngineKind, Model, Runtime
from launcher.daemon.deployment import (
    ASKED,
    NOT_ASKING,
    Deployment,
    _facts,
    asked_profiles,
    asking_at_start,
    build_deployment,
    require_models,
)
from launcher.daemon.rollout import Step, compare
from launcher.engines.software import Stack
from launcher.engines.vllm.settings import WEIGHT_PREPACK
from launcher.instances.state_file import Record, StateFile
from launcher.machine.named import find_topology

MODELS = (Model(name="m", path="/m"),)


def test_what_the_instances_inherit_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WEIGHT_PREPACK, "0")
    stack = Stack(command=("vllm",))
    assert _facts(stack, Config(models=MODELS)).engine == {WEIGHT_PREPACK: "0"}
    # A container gets what is named, and none of the daemon's own variables.
    contained = Config(models=MODELS, engine=Engine(runtime=Runtime.PODMAN, image="x"))
    assert _facts(stack, contained).engine == {}


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


@pytest.mark.parametrize(
    ("path", "command", "runtime", "waits"),
    [
        ("{folder}/away", ("serve", "{uds}", "{model}"), Runtime.HOST, True),
        ("{folder}/away", ("serve", "{uds}"), Runtime.HOST, False),  # it is told of no model
        ("{folder}/away", ("serve", "{uds}", "{model}"), Runtime.PODMAN, False),  # in the image
        ("org/model", ("serve", "{uds}", "{model}"), Runtime.HOST, False),  # a name
        ("{folder}/m.gguf", ("serve", "{uds}", "{model}"), Runtime.HOST, False),
    ],
)
def test_a_custom_server_waits_for_its_model(
    path: str, command: tuple[str, ...], runtime: Runtime, tmp_path: Path, *, waits: bool
) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    engine = Engine(kind=EngineKind.COMMAND, command=command, runtime=runtime, image="x")
    config = Config(models=(Model(name="m", path=path.format(folder=tmp_path)),), engine=engine)
    with pytest.raises(PassingError, match="no such directory") if waits else nullcontext():
        require_models(config)


# --- The engine's own answers. ---


def config_of(folder: Path, answer: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("STATE_DIRECTORY", str(folder / "state"))
    (folder / "asked").write_text("")
    return Config(
        models=(Model(name="m", path=model(folder / "model"), max_num_seqs=1),),
        engine=Engine(command=(answering_vllm(folder, answer),), tcmalloc="off"),
        control=Control(socket=str(folder / "c.sock")),
    )


def test_the_engine_is_asked_once_and_its_figures_go_before_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, machine = config_of(tmp_path, ANSWER, monkeypatch), find_topology("epyc-7763-1p")
    (before,) = build_deployment(config, machine=machine).plan.needs
    assert before.sources == ("config", "assumed")
    assert (tmp_path / "asked").read_text() == ""
    for asking in (ASKED, ASKED, NOT_ASKING):
        deployment = build_deployment(config, machine=machine, asking=asking)
        (needs,) = deployment.plan.needs
        assert (needs.sources, needs.request_bytes, needs.weights_bytes) == (("engine",), 123456789, 1 << 32)
        assert (needs.max_model_len, needs.kv_bytes_per_token) == (4096, 20480)
        assert not [its for its in deployment.plan.warnings if its.code == "assumed-size"]
    assert (tmp_path / "asked").read_text() == "."
    # At another length its layers say what a request needs; of one rank only its figure is known.
    shorter = msgspec.structs.replace(config.models[0], max_model_len=1024)
    (needs,) = build_deployment(
        msgspec.structs.replace(config, models=(shorter,)), machine=machine
    ).plan.needs
    assert (needs.sources, needs.request_bytes) == (("engine",), 1024 * 20480)


def test_an_engine_that_does_not_answer_is_a_warning_and_asked_again_only_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, machine = config_of(tmp_path, "none", monkeypatch), find_topology("epyc-7763-1p")
    asking = asking_at_start(config)
    assert 0 < asking.limit_s <= 30
    for _ in range(2):
        plan = build_deployment(config, machine=machine, asking=asking).plan
        assert [its.code for its in plan.warnings if its.code.startswith("engine")] == ["engine-silent"]
        assert plan.needs[0].sources == ("config", "assumed")
        assert not plan.violations
    assert (tmp_path / "asked").read_text() == "."
    build_deployment(config, machine=machine, asking=ASKED)
    assert (tmp_path / "asked").read_text() == ".."


def test_an_engine_that_refuses_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, '{"refused": "ValueError: no such class"}', monkeypatch)
    plan = build_deployment(config, machine=find_topology("epyc-7763-1p"), asking=ASKED).plan
    (finding,) = (its for its in plan.findings if its.code.startswith("engine"))
    assert (finding.severity, finding.code) == ("warning", "engine-refuses")
    assert "vLLM 0.32.0+cpu: ValueError: no such class" in finding.message


def test_a_class_without_a_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = '{"max_model_len": 4096, "unbuilt": "ValueError: on CPU", "no_kernel": true}'
    config = config_of(tmp_path, answer, monkeypatch)
    plan = build_deployment(config, machine=find_topology("epyc-7763-1p"), asking=ASKED).plan
    assert [its.code for its in plan.warnings if its.code == "cpu-backend"] == ["cpu-backend"]
    assert plan.needs[0].sources == ("config", "assumed", "engine")


async def test_instances_of_an_earlier_daemon_do_not_wait_for_an_answer(tmp_path: Path) -> None:
    config = Config(models=MODELS, control=Control(socket=str(tmp_path / "c.sock")))
    records = StateFile(tmp_path / "c.state" / "instances.json")
    await records.put(Record(slot=0, generation=1, unit="u", digest="d"))
    assert asking_at_start(config) == NOT_ASKING


def test_an_engine_that_is_not_here_can_only_be_missed_by_a_plan_that_asks(tmp_path: Path) -> None:
    config = Config(
        models=(Model(name="m", path=model(tmp_path / "model")),),
        engine=Engine(command=(str(tmp_path / "none"),)), control=Control(socket=str(tmp_path / "c.sock")),
    )  # fmt: skip
    machine = find_topology("epyc-7763-1p")
    assert build_deployment(config, machine=machine).plan.needs
    with pytest.raises(LauncherError, match="cannot find vLLM"):
        build_deployment(config, machine=machine, asking=ASKED)
    assert asked_profiles(config) == {}
