"""The layouts that a search compares."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from measure.tune.planted import CONFIG, MACHINES, candidates_of, plan_of_layout
from support.plans import make_plan

from launcher.base.errors import LauncherError
from launcher.config.schema import Config, Engine, EngineKind, Strategy
from launcher.config.schema import Layout as ConfiguredLayout
from launcher.engines.make import engine_type
from launcher.engines.vllm.arguments import overriding
from launcher.machine.named import find_topology
from launcher.measure.tune.layout import MOST, find_candidates, with_layout
from launcher.measure.tune.model import Candidates, Layout
from launcher.plan.plan_text import plan_json


def found(machine: str, config: Config = CONFIG, **more: Any) -> Candidates:
    topology = find_topology(machine)
    return find_candidates(topology, config, lambda layout: plan_of_layout(topology, config, layout), **more)


def race(candidates: Candidates) -> list[str]:
    return [each.label for each in candidates.entered if each.refines is None]


def test_two_cores_have_two_layouts() -> None:
    assert race(found("socket:1 node:1(memory=8GiB) core:2")) == ["interleaved x 1", "interleaved x 2"]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_default_is_first_and_one_instance_per_socket_is_among_them(machine: str) -> None:
    topology, candidates = candidates_of(machine)
    entered = [each for each in candidates.entered if each.refines is None]
    assert [i for i, each in enumerate(entered) if each.is_default] == [0]
    sockets = {socket.id for socket in topology.sockets}
    assert any(sorted(slot["socket"] for slot in each.plan["slots"]) == sorted(sockets) for each in entered)
    assert len(entered) <= MOST


def test_one_instance_on_a_socket_of_several_nodes_spans_them() -> None:
    entered = found("epyc-9755-1p-nps4").entered
    one = next(each for each in entered if len(each.plan["slots"]) == 1)
    assert one.layout.span_nodes
    assert one.layout.instances_per_socket == 1


def test_one_instance_over_two_sockets_is_refused_with_its_cause() -> None:
    refused = found("epyc-9755-2p").refused
    assert refused[0].label == "one instance over the whole machine"
    assert refused[0].layout is None
    assert "places an instance of one rank on one socket" in refused[0].cause


def test_refused_plans_are_listed_with_their_violations() -> None:
    refused = found("socket:1 node:1(memory=8GiB) l3:1(size=32MiB) core:2").refused
    assert [(each.label, each.cause) for each in refused] == [
        ("l3-aligned x 2", "cannot divide node 0: 2 instances need 2 whole L3 domains, the zone has 1")
    ]


def test_a_layout_without_a_plan_is_refused_with_the_error() -> None:
    topology = find_topology("epyc-9454-1p")

    def plan_of(layout: Layout) -> dict[str, Any]:
        if layout.strategy is Strategy.CONTIGUOUS:
            raise LauncherError("cannot read the model", "repair it")
        return plan_of_layout(topology, CONFIG, layout)

    refused = find_candidates(topology, CONFIG, plan_of).refused
    assert {each.cause for each in refused} == {"cannot read the model"}


def test_a_configured_layout_without_a_plan_is_an_error() -> None:
    config = msgspec.structs.replace(CONFIG, layout=ConfiguredLayout(instances_per_socket=500))
    with pytest.raises(LauncherError, match="cannot tune: the configured layout has no plan: cannot divide"):
        found("epyc-9454-1p", config)


@pytest.mark.parametrize("machine", MACHINES)
def test_no_two_candidates_place_the_same(machine: str) -> None:
    _, candidates = candidates_of(machine)
    entered = [each for each in candidates.entered if each.refines is None]
    placed = [str([(slot["cpus"], slot["membind"]) for slot in each.plan["slots"]]) for each in entered]
    assert len(set(placed)) == len(placed)
    labels = [each.label for each in candidates.entered if each.refines in {None, 1}]
    assert len(set(labels)) == len(labels)


def test_what_does_not_fit_is_said() -> None:
    left_out = found("epyc-9654-2p").left_out
    assert "interleaved x 12 per socket" in [each.label for each in left_out]
    assert {each.cause for each in left_out} == {f"not among the first {MOST} layouts"}


def test_each_stack_has_each_layout() -> None:
    entered = [
        each for each in found("epyc-9454-1p", stacks=("vllm", "zentorch")).entered if each.refines is None
    ]
    assert [(each.layout.stack, each.is_default) for each in entered[:2]] == [
        ("vllm", True), ("zentorch", False)
    ]  # fmt: skip
    assert sum(each.layout.stack == "vllm" for each in entered) == len(entered) / 2


def test_refinements_are_of_one_layout_with_other_limits() -> None:
    entered = found("epyc-9454-1p").entered
    refinements = [each for each in entered if each.refines == 2]
    assert all(each.layout.strategy is entered[2].layout.strategy for each in refinements)
    assert {each.layout.max_num_seqs for each in refinements} == {None, 32, 128, 256}
    assert {each.layout.max_num_batched_tokens for each in refinements} == {None, 1024, 4096, 8192}


def test_refinements_start_from_the_limits_of_engine_args() -> None:
    config = msgspec.structs.replace(
        CONFIG, engine=Engine(args=("--max-num-seqs=8", "--max_num_batched_tokens", "4k", "--seed", "1"))
    )
    entered = found("epyc-9454-1p", config).entered
    refinements = [each.layout for each in entered if each.refines == 2]
    assert {layout.max_num_seqs for layout in refinements} == {None, 4, 16, 32}
    assert {layout.max_num_batched_tokens for layout in refinements} == {None, 1024, 4096, 8192}


def test_a_layout_replaces_the_limits_of_engine_args() -> None:
    args = ("--max-num-seqs=8", "--max_num_batched_tokens", "4k", "--seed", "1", "--max-num-seqs", "9")
    config = msgspec.structs.replace(CONFIG, engine=Engine(args=args))
    topology = find_topology("epyc-9454-1p")

    def slots(**limits: int) -> list[dict[str, Any]]:
        layout = Layout(strategy=Strategy.INTERLEAVED, instances_per_socket=2, reserve_cores=0, **limits)  # type: ignore[arg-type]
        plan = plan_json(make_plan(topology, with_layout(config, layout, overriding), {}, cpus_only=True))
        return [
            {key: slot[key] for key in ("max_num_seqs", "max_num_batched_tokens")} for slot in plan["slots"]
        ]

    assert slots() == [{"max_num_seqs": 9, "max_num_batched_tokens": 4000}] * 2
    assert slots(max_num_seqs=16) == [{"max_num_seqs": 16, "max_num_batched_tokens": 4000}] * 2
    layout = Layout(
        strategy=Strategy.INTERLEAVED, instances_per_socket=2, reserve_cores=0, max_num_seqs=16, max_num_batched_tokens=1024
    )  # fmt: skip
    assert with_layout(config, layout, overriding).engine.args == ("--seed", "1")
    command = msgspec.structs.replace(config, engine=Engine(EngineKind.COMMAND, command=("x",), args=args))
    others = engine_type(EngineKind.COMMAND).overriding
    assert with_layout(command, layout, others).engine.args == args, "another engine's arguments"


def test_limits_that_memory_lowers_to_the_same_value_are_measured_once() -> None:
    """As with llama.cpp, whose instance computes as many requests as its KV cache holds."""
    topology, most = find_topology("epyc-9454-1p"), 40

    def plan_of(layout: Layout) -> dict[str, Any]:
        plan = plan_of_layout(topology, CONFIG, layout)
        slots = [slot | {"max_num_seqs": min(most, slot["max_num_seqs"])} for slot in plan["slots"]]
        return plan | {"slots": slots}

    entered = find_candidates(topology, CONFIG, plan_of).entered
    for i in {each.refines for each in entered if each.refines is not None}:
        its = [entered[i], *(each for each in entered if each.refines == i)]
        runs = [(each.plan["slots"], each.plan["reserved"]) for each in its]
        assert all(run not in runs[:index] for index, run in enumerate(runs))
    # 20 is half of the default's 40; 80 and 160 would be 40 again.
    asked = {each.layout.max_num_seqs for each in entered if each.refines == 2}
    assert asked <= {None, 20, 80}
    assert 20 in asked
