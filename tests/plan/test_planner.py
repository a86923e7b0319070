"""Plans for named machines: what an operator of that machine expects, written down."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from msgspec.structs import replace
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import GIB
from launcher.config.schema import Config, Engine, EngineKind, Layout, Memory, Model, Strategy
from launcher.machine.topology import Topology
from launcher.models.profile import ModelProfile
from launcher.plan.plan import Plan

PROFILE = ModelProfile(
    weights_bytes=2 * GIB,
    kv_bytes_per_token=32 * 1024,
    max_model_len=4096,
    num_attention_heads=32,
    num_kv_heads=8,
)
EPYC_1P = Machine(l3=16, cores=8, smt=2, node_bytes=768 * GIB)
EPYC_2P = replace(EPYC_1P, sockets=2)
NPS4 = Machine(sockets=2, nodes=4, l3=4, cores=8, node_bytes=96 * GIB)


def plan_for(machine: Machine, *models: Model, memory: Memory | None = None, **layout: Any) -> Plan:
    names = models or (Model(name="m", path="/m"),)
    config = Config(models=names, layout=Layout(**layout), memory=memory or Memory())
    return make_plan(machine.topology(), config, {model.name: PROFILE for model in names})


def cpus(plan: Plan) -> list[str]:
    return [slot.placement.cpus.format() for slot in plan.slots]


def codes(plan: Plan) -> list[str]:
    return [finding.code for finding in plan.findings]


def test_amd_text_on_one_socket() -> None:
    plan = plan_for(EPYC_1P, strategy=Strategy.INTERLEAVED, instances_per_socket=2, reserve_cores=0)
    assert cpus(plan) == [",".join(map(str, range(0, 128, 2))), ",".join(map(str, range(1, 128, 2)))]
    assert [slot.placement.membind.format() for slot in plan.slots] == ["0", "0"]
    assert plan.findings == ()


def test_amd_text_on_two_sockets() -> None:
    plan = plan_for(EPYC_2P, instances_per_socket=2, reserve_cores=0)
    placements = [slot.placement for slot in plan.slots]
    assert [(p.socket, p.node, p.membind.format()) for p in placements] == [
        (0, 0, "0"),
        (0, 0, "0"),
        (1, 1, "1"),
        (1, 1, "1"),
    ]
    assert [p.cpus.first for p in placements] == [0, 1, 128, 129]
    assert plan.violations == ()


def test_auto_is_one_per_64_cores_of_a_node_and_reserves_one_per_64() -> None:
    plan = plan_for(EPYC_1P)
    assert plan.reserved == CpuSet([126, 254, 127, 255])
    assert cpus(plan) == [",".join(map(str, range(0, 126, 2))), ",".join(map(str, range(1, 126, 2)))]


@pytest.mark.parametrize(("cores", "reserved"), [(15, 0), (16, 1), (64, 1), (65, 2), (256, 4)])
def test_auto_reserve(cores: int, reserved: int) -> None:
    assert len(plan_for(Machine(cores=cores)).reserved) == reserved


def test_reserved_cores_come_from_the_ends_of_the_nodes_in_turn() -> None:
    assert plan_for(NPS4, reserve_cores=10).reserved == CpuSet([31, 63, 95, 127, 159, 191, 223, 255, 30, 62])


def test_a_nodes_last_core_is_never_reserved() -> None:
    machine = Machine(nodes=2, cores=2)
    assert plan_for(machine, reserve_cores=2).reserved == CpuSet([1, 3])
    assert "reserve-too-large" in codes(plan_for(machine, reserve_cores=3))


def test_contiguous_and_uneven() -> None:
    plan = plan_for(Machine(cores=128), strategy=Strategy.CONTIGUOUS, instances_per_socket=3, reserve_cores=0)
    assert cpus(plan) == ["0-42", "43-85", "86-127"]
    warning = next(finding for finding in plan.warnings if finding.code == "uneven-cores")
    assert "43-43-42" in warning.message


def test_l3_aligned_never_splits_an_l3() -> None:
    plan = plan_for(EPYC_1P, strategy=Strategy.L3_ALIGNED, instances_per_socket=3, reserve_cores=0)
    assert cpus(plan) == ["0-47", "48-87", "88-127"]


def test_l3_aligned_needs_enough_domains() -> None:
    plan = plan_for(Machine(l3=2, cores=8), strategy=Strategy.L3_ALIGNED, instances_per_socket=3)
    assert codes(plan) == ["cannot-cut"]
    assert plan.violations[0].message.startswith("cannot divide node 0: ")


def test_l3_aligned_needs_an_l3() -> None:
    assert codes(plan_for(Machine(has_l3=False), strategy=Strategy.L3_ALIGNED)) == ["cannot-cut"]


def test_per_node() -> None:
    plan = plan_for(NPS4, strategy=Strategy.PER_NODE, reserve_cores=0)
    assert cpus(plan) == [f"{start}-{start + 31}" for start in range(0, 256, 32)]
    assert codes(plan_for(NPS4, strategy=Strategy.PER_NODE, instances_per_socket=4, reserve_cores=0)) == []
    assert "per-node-count" in codes(plan_for(NPS4, strategy=Strategy.PER_NODE, instances_per_socket=2))


def test_instances_are_spread_over_the_nodes_of_a_socket() -> None:
    plan = plan_for(NPS4, instances_per_socket=6, reserve_cores=0)
    assert [slot.placement.node for slot in plan.slots] == [0, 0, 1, 1, 2, 3, 4, 4, 5, 5, 6, 7]
    assert codes(plan) == ["uneven-instances", "uneven-instances"]


def test_fewer_instances_than_nodes_need_leave_to_span() -> None:
    refused = plan_for(NPS4, instances_per_socket=2, reserve_cores=0)
    assert {finding.code for finding in refused.violations} == {"spans-nodes"}
    assert "would span nodes" in refused.violations[0].message
    plan = plan_for(
        NPS4, instances_per_socket=2, reserve_cores=0, span_nodes=True, strategy=Strategy.CONTIGUOUS
    )
    assert cpus(plan) == ["0-63", "64-127", "128-191", "192-255"]
    assert [slot.placement.membind.format() for slot in plan.slots] == ["0-1", "2-3", "4-5", "6-7"]
    assert not plan.violations
    assert "50 %" in plan.warnings[0].message


def test_memory_of_a_spanning_instance_is_charged_to_its_home_node() -> None:
    plan = plan_for(NPS4, instances_per_socket=1, reserve_cores=0, span_nodes=True)
    assert [(row.node, row.slots) for row in plan.ledger] == [(0, (0,)), (4, (1,))]


def test_smt_is_idle_unless_asked() -> None:
    machine = Machine(cores=4, smt=2)
    assert cpus(plan_for(machine)) == ["0-3"]
    plan = plan_for(machine, use_smt=True)
    assert cpus(plan) == ["0-7"]
    assert plan.slots[0].placement.omp_cpus == (CpuSet.parse("0-2,4-6"),)
    assert codes(plan) == ["smt"]


def test_a_core_whose_first_sibling_is_not_allowed_uses_the_other() -> None:
    assert cpus(plan_for(Machine(cores=4, smt=2, allowed=CpuSet.parse("0,2,5-7")))) == ["0,2,5,7"]


def test_layout_cpus_narrows_the_machine() -> None:
    machine = Machine(cores=8, smt=2)
    plan = plan_for(machine, cpus="2-5,10-13", instances_per_socket=2)
    assert cpus(plan) == ["2,4", "3,5"]
    assert plan.usable == CpuSet.parse("2-5,10-13")
    assert codes(plan_for(machine, cpus="0-99")) == ["cpus-not-allowed"]
    assert codes(plan_for(machine, cpus="64-99")) == ["cpus-not-allowed", "no-usable-cpus"]


def test_one_core_of_a_larger_set_stays_out_of_openmp() -> None:
    small, large = plan_for(Machine(cores=4)), plan_for(Machine(cores=5))
    assert small.slots[0].placement.omp_cpus == (CpuSet.parse("0-3"),)
    assert large.slots[0].placement.omp_cpus == (CpuSet.parse("0-3"),)
    assert large.slots[0].placement.cpus == CpuSet.parse("0-4")


@pytest.mark.parametrize(
    "engine", [Engine(kind=EngineKind.LLAMA_CPP), Engine(kind=EngineKind.COMMAND, command=("x", "{uds}"))]
)
def test_an_engine_without_ranks_computes_on_all_its_cpus(engine: Engine) -> None:
    config = Config(models=(Model(name="m", path="/m"),), engine=engine, layout=Layout(reserve_cores=0))
    [slot] = make_plan(Machine(cores=8).topology(), config, {"m": PROFILE}).slots
    assert slot.placement.omp_cpus == (slot.placement.cpus,) == (CpuSet.parse("0-7"),)


def test_tensor_parallel_lists() -> None:
    model = Model(name="m", path="/m", tensor_parallel_size=2)
    plan = plan_for(Machine(cores=8), model)
    assert plan.slots[0].placement.omp_cpus == (CpuSet.parse("0-3"), CpuSet.parse("4-6"))
    assert codes(plan) == ["ranks-share-node"]
    assert "more-ranks-than-cores" in codes(plan_for(Machine(cores=1), model))


def test_two_models_on_sockets_of_their_own() -> None:
    plan = plan_for(
        EPYC_2P,
        Model(name="a", path="/a", sockets=(1,)),
        Model(name="b", path="/b", nodes=(0,)),
        instances_per_socket=1,
        reserve_cores=0,
    )
    assert [(slot.id, slot.model.name, slot.placement.socket) for slot in plan.slots] == [
        (0, "a", 1),
        (1, "b", 0),
    ]


def test_two_models_on_one_node_are_cut_together() -> None:
    models = (Model(name="a", path="/a"), Model(name="b", path="/b"))
    plan = plan_for(Machine(cores=12), *models, instances_per_socket=2, strategy=Strategy.CONTIGUOUS)
    assert [(slot.model.name, slot.placement.cpus.format()) for slot in plan.slots] == [
        ("a", "0-2"),
        ("a", "3-5"),
        ("b", "6-8"),
        ("b", "9-11"),
    ]
    shared = plan_for(Machine(cores=128), *models, reserve_cores=0)
    assert len(shared.slots) == 2, "auto: models share the instances of a node"


def test_models_that_overlap_in_part_are_refused() -> None:
    plan = plan_for(
        NPS4,
        Model(name="a", path="/a"),
        Model(name="b", path="/b", nodes=(0,)),
        instances_per_socket=1,
        span_nodes=True,
        strategy=Strategy.CONTIGUOUS,
    )
    assert "models-overlap" in codes(plan)


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (Model(name="m", path="/m", sockets=(2,)), "unknown-socket"),
        (Model(name="m", path="/m", nodes=(9,)), "unknown-node"),
        (Model(name="m", path="/m", nodes=(2,)), "unknown-node"),
        (Model(name="m", path="/m", sockets=(0,), nodes=(1,)), "no-cpus"),
    ],
)
def test_unknown_parts(model: Model, code: str) -> None:
    plan = plan_for(Machine(sockets=2, cores=4, memory_only=1), model)
    assert code in [finding.code for finding in plan.violations]
    assert plan.slots == ()


def test_more_instances_than_cores() -> None:
    plan = plan_for(Machine(cores=2), instances_per_socket=3)
    assert codes(plan) == ["more-instances-than-cores"]


def test_nothing_allowed() -> None:
    plan = plan_for(Machine(allowed=CpuSet()))
    assert codes(plan) == ["no-usable-cpus"]
    assert plan.slots == ()


def test_a_node_without_memory_binds_to_the_nearest() -> None:
    machine = Machine(sockets=2, nodes=2, cores=4, memoryless=frozenset({1}), memory_only=1)
    plan = plan_for(machine)
    assert [slot.placement.membind.format() for slot in plan.slots] == ["0", "0", "2", "3"]
    assert [slot.placement.node for slot in plan.slots] == [0, 1, 2, 3]
    assert codes(plan) == ["remote-memory"]
    assert [row.slots for row in plan.ledger] == [(0, 1), (2,), (3,)]


def flat(topology: Topology) -> Topology:
    """All nodes are equally far from each other."""
    return replace(
        topology,
        numa_nodes=tuple(
            replace(node, distances={to: 10 if to == node.id else 12 for to in node.distances})
            for node in topology.numa_nodes
        ),
    )


def test_of_equally_near_nodes_that_with_the_most_room_is_bound() -> None:
    config = Config(models=(Model(name="m", path="/m"),), layout=Layout(reserve_cores=0))
    half = flat(Machine(nodes=4, cores=6, memoryless=frozenset({0, 3})).topology())
    plan = make_plan(half, config, {"m": PROFILE})
    assert [slot.placement.membind.format() for slot in plan.slots] == ["1", "1", "2", "2"]
    assert [slot.placement.remote for slot in plan.slots] == [True, False, False, True]
    assert [row.slots for row in plan.ledger] == [(0, 1), (2, 3)]
    larger = [
        replace(node, memory_bytes=node.memory_bytes * 4) if node.id == 2 else node
        for node in half.numa_nodes
    ]
    roomy = make_plan(replace(half, numa_nodes=tuple(larger)), config, {"m": PROFILE})
    assert [slot.placement.membind.format() for slot in roomy.slots] == ["2", "1", "2", "2"]
    only = replace(config, models=(Model(name="m", path="/m", nodes=(0, 3)),))
    assert [slot.placement.membind.format() for slot in make_plan(half, only, {"m": PROFILE}).slots] == [
        "1",
        "2",
    ]


def test_ranks_beside_a_node_without_memory_are_charged_where_the_engine_binds_them() -> None:
    model = Model(name="m", path="/m", tensor_parallel_size=2)
    machine = Machine(sockets=2, nodes=2, cores=4, memoryless=frozenset({1, 3}))
    plan = plan_for(machine, model, span_nodes=True, instances_per_socket=1, strategy=Strategy.CONTIGUOUS)
    assert [(slot.placement.membind.format(), slot.placement.remote) for slot in plan.slots] == [
        ("0", True),
        ("2", True),
    ]
    assert [(row.node, row.slots) for row in plan.ledger] == [(0, (0,)), (2, (1,))]


def test_memory_nodes_outside_the_cpuset_are_not_bound() -> None:
    topology = replace(Machine(nodes=2, cores=4).topology(), allowed_nodes=CpuSet([1]))
    config = Config(models=(Model(name="m", path="/m"),))
    plan = make_plan(topology, config, {"m": PROFILE})
    assert [slot.placement.membind.format() for slot in plan.slots] == ["1", "1"]
    assert [slot.placement.remote for slot in plan.slots] == [True, False]
    none = make_plan(replace(topology, allowed_nodes=CpuSet()), config, {"m": PROFILE})
    assert "no-memory-node" in [finding.code for finding in none.violations]


def test_kernel_without_numa() -> None:
    topology = replace(Machine(cores=4).topology(), has_numa=False)
    plan = make_plan(topology, Config(models=(Model(name="m", path="/m"),)), {"m": PROFILE})
    assert plan.slots[0].placement.node is None
    assert not plan.slots[0].placement.membind
    assert plan.ledger[0].node is None
    assert codes(plan) == ["no-numa"]


def test_command_engine_takes_no_memory() -> None:
    config = Config(
        models=(Model(name="m", path="/m"),),
        engine=Engine(kind=EngineKind.COMMAND, command=("server", "{uds}")),
    )
    plan = make_plan(Machine(cores=4, node_bytes=GIB).topology(), config, {})
    assert plan.slots[0].kv_cache_bytes is None
    assert plan.ledger[0].left_bytes == GIB
    assert plan.findings == ()


def test_a_bad_size_is_an_error() -> None:
    with pytest.raises(LauncherError, match=r"memory\.kv_cache"):
        plan_for(EPYC_1P, memory=Memory(kv_cache="lots"))


QUOTA_8 = Machine(cores=32, cpu_quota=Fraction(8))


def threads(plan: Plan) -> int:
    return sum(len(slot.placement.cpus) for slot in plan.slots)


@pytest.mark.parametrize(
    ("quota", "count"), [(Fraction(8), 8), (Fraction(79, 10), 7), (Fraction(1), 1), (Fraction(31), 31)]
)
def test_instances_use_no_more_cpus_than_the_cgroup_gives_time(quota: Fraction, count: int) -> None:
    plan = plan_for(replace(QUOTA_8, cpu_quota=quota))
    assert threads(plan) + len(plan.reserved) == count
    assert codes(plan) == ["cpu-quota"]
    assert f"{float(quota):g} cpus" in plan.findings[0].message


def test_cpu_time_for_all_cpus_changes_nothing() -> None:
    for quota in (Fraction(32), Fraction(100)):
        assert plan_for(replace(QUOTA_8, cpu_quota=quota)) == plan_for(replace(QUOTA_8, cpu_quota=None))


def test_strategies_within_the_cpu_time() -> None:
    assert cpus(plan_for(QUOTA_8)) == ["0,4,8,12,16,20,24,28"]
    assert cpus(plan_for(QUOTA_8, strategy=Strategy.CONTIGUOUS)) == ["0-7"]
    smt = plan_for(replace(QUOTA_8, smt=2), strategy=Strategy.CONTIGUOUS, use_smt=True)
    assert cpus(smt) == ["0-3,32-35"]


def test_cpu_time_fills_one_node_unless_the_configuration_asks_for_more() -> None:
    machine = Machine(sockets=2, cores=16, cpu_quota=Fraction(8))
    assert [(s.placement.node, len(s.placement.cpus)) for s in plan_for(machine).slots] == [(0, 8)]
    both = plan_for(machine, instances_per_socket=2)
    assert [(s.placement.node, len(s.placement.cpus)) for s in both.slots] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    there = plan_for(machine, Model(name="m", path="/m", nodes=(1,)))
    assert [(s.placement.node, len(s.placement.cpus)) for s in there.slots] == [(1, 8)]
    empty = plan_for(replace(machine, memoryless=frozenset({0})))
    assert [s.placement.node for s in empty.slots] == [1]


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"cpus": "0-31"}, Model(name="m", path="/m")),
        ({"instances_per_socket": 12}, Model(name="m", path="/m")),
        ({}, Model(name="m", path="/m", tensor_parallel_size=8)),
    ],
)
def test_a_configuration_beyond_the_cpu_time_is_planned_with_a_warning(
    layout: dict[str, Any], model: Model
) -> None:
    plan = plan_for(QUOTA_8, model, **layout)
    assert not plan.violations
    assert threads(plan) > 8
    assert "cpu-quota-exceeded" in codes(plan)


def hybrid(fast: int, *slower: tuple[int, float]) -> Topology:
    """A node with so many fast cores, then slower ones."""
    speeds = [1.0] * fast + [speed for count, speed in slower for _ in range(count)]
    topology = Machine(cores=len(speeds)).topology()
    cores = zip(topology.cores, speeds, strict=True)
    return replace(topology, cores=tuple(replace(core, speed=speed) for core, speed in cores))


@pytest.mark.parametrize(
    ("topology", "count", "expected"),
    [
        (hybrid(6, (8, 0.6)), "auto", ["0-5"]),
        (hybrid(2, (8, 0.6)), "auto", ["2-9"]),
        (hybrid(6, (8, 0.6)), 2, ["0-5", "6-13"]),
        (hybrid(6, (8, 0.6)), 3, ["0-2", "3-5", "6-13"]),
        (hybrid(4, (4, 0.7), (4, 0.3)), 3, ["0-1", "2-3", "4-7"]),
        (hybrid(2, (2, 0.7), (2, 0.3)), 6, ["0", "1", "2", "3", "4", "5"]),
    ],
)
def test_an_instance_has_cores_of_one_kind(topology: Topology, count: int | str, expected: list[str]) -> None:
    layout = Layout(instances_per_socket=count, strategy=Strategy.CONTIGUOUS)  # type: ignore[arg-type]
    plan = make_plan(topology, Config(models=(Model(name="m", path="/m"),), layout=layout), {"m": PROFILE})
    assert cpus(plan) == expected
    idle = topology.online - CpuSet(cpu for slot in plan.slots for cpu in slot.placement.cpus)
    assert codes(plan) == (["core-kinds"] if idle else [])
    assert f"cpus {idle} none" in plan.findings[0].message if idle else True


def test_slow_cores_are_reserved_first_and_ranks_may_need_both_kinds() -> None:
    slow_first = replace(hybrid(10, (10, 0.7)), l3_domains=())
    swapped = replace(
        slow_first,
        cores=tuple(replace(core, speed=0.7 if core.cpus.first < 10 else 1.0) for core in slow_first.cores),
    )
    config = Config(
        models=(Model(name="m", path="/m", tensor_parallel_size=8),), layout=Layout(reserve_cores=2)
    )
    plan = make_plan(swapped, config, {"m": PROFILE})
    assert (plan.reserved, cpus(plan)) == (CpuSet.parse("8-9"), ["10-19"])
    few = make_plan(hybrid(6, (6, 0.7)), config, {"m": PROFILE})
    assert not few.violations
    assert "they are mixed" in next(found.message for found in few.findings if found.code == "core-kinds")
    quota = make_plan(
        replace(swapped, cpu_quota=Fraction(4)), Config(models=(Model(name="m", path="/m"),)), {"m": PROFILE}
    )
    assert cpus(quota) == ["10,12,15,17"]
