"""No machine and no layout breaks the planner: it plans, or says why not and what to do."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.examples import examples
from support.plans import compare, make_plan
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB, MIB
from launcher.config.schema import Config, Layout, Memory, Model, Strategy
from launcher.machine import named
from launcher.machine.picture import DrawnSlot, draw, make_picture
from launcher.machine.svg import to_svg
from launcher.machine.topology import Topology
from launcher.models.profile import ModelProfile
from launcher.plan.comparison import notes, rows
from launcher.plan.comparison import to_json as compare_json
from launcher.plan.plan import Plan
from launcher.plan.plan_text import plan_json, to_text

PROFILE = ModelProfile(
    weights_bytes=GIB, kv_bytes_per_token=32 * 1024, max_model_len=4096, num_attention_heads=8, num_kv_heads=2
)
# More than the smaller nodes hold: its ranks are spread over several.
LARGE = replace(PROFILE, weights_bytes=5 * GIB)
CPUS = st.frozensets(st.integers(0, 40), min_size=1, max_size=12).map(lambda ids: CpuSet(ids).format())


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Small and lopsided: sockets without memory, nodes of a few cores, tight cgroups, no NUMA."""
    sockets, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    machine = Machine(
        sockets=sockets,
        nodes=nodes,
        l3=draw(st.integers(1, 2)),
        cores=draw(st.integers(1, 5)),
        smt=draw(st.integers(1, 2)),
        adjacent=draw(st.booleans()),
        has_l3=draw(st.booleans()),
        memory_only=draw(st.integers(0, 2)),
        memoryless=draw(st.frozensets(st.integers(0, sockets * nodes - 1))),
        node_bytes=draw(st.sampled_from([1024, 512 * MIB, 4 * GIB, 64 * GIB])),
        memory_limit_bytes=draw(st.none() | st.sampled_from([0, MIB, 8 * GIB, 512 * GIB])),
        cpu_quota=draw(st.none() | st.fractions(Fraction(1, 10), 70, max_denominator=10)),
    )
    every = range(machine.core_count * machine.smt)
    offline = draw(st.frozensets(st.sampled_from(every), max_size=len(every) - 1))
    allowed = draw(st.none() | st.frozensets(st.sampled_from(every)).map(CpuSet))
    topology = replace(machine, offline=offline, allowed=allowed).topology()
    odd = draw(
        st.sampled_from(
            ["", "", "no numa", "memory unknown", "no memory allowed", "no distances", "homeless"]
        )
    )
    if odd == "no numa":
        whole = replace(topology.numa_nodes[0], cpus=topology.online, distances={})
        cores = tuple(replace(core, node=0) for core in topology.cores)
        return replace(topology, numa_nodes=(whole,), cores=cores, has_numa=False, allowed_nodes=CpuSet((0,)))
    if odd == "memory unknown":
        blind = (
            replace(node, memory_bytes=0, available_bytes=0, memory_known=False)
            for node in topology.numa_nodes
        )
        return replace(topology, numa_nodes=tuple(blind))
    if odd == "no memory allowed":
        return replace(topology, allowed_nodes=CpuSet())
    if odd == "no distances":
        return replace(
            topology, numa_nodes=tuple(replace(node, distances={}) for node in topology.numa_nodes)
        )
    if odd == "homeless":
        lost = topology.numa_nodes[0].cpus
        nodes_left = (replace(topology.numa_nodes[0], cpus=CpuSet()), *topology.numa_nodes[1:])
        cores = tuple(replace(core, node=None) if core.cpus <= lost else core for core in topology.cores)
        return replace(topology, numa_nodes=nodes_left, cores=cores)
    return topology


LAYOUTS = st.builds(
    Layout,
    strategy=st.sampled_from(Strategy),
    instances_per_socket=st.just("auto") | st.integers(1, 40),
    reserve_cores=st.just("auto") | st.integers(0, 60),
    use_smt=st.booleans(),
    span_nodes=st.booleans(),
    cpus=st.none() | CPUS,
)
IDS = st.none() | st.lists(st.integers(0, 4), min_size=1, max_size=2, unique=True).map(tuple)
MODELS = st.lists(
    st.builds(
        Model,
        name=st.sampled_from("ab"),
        path=st.just("/m"),
        sockets=IDS,
        nodes=IDS,
        tensor_parallel_size=st.sampled_from([1, 2, 4, "auto", "auto"]),
    ),
    min_size=1,
    max_size=2,
).map(tuple)


def check(plan: Plan, topology: Topology) -> None:
    for finding in plan.findings:
        assert finding.remedy, finding
        assert finding.message.startswith("cannot ") == (finding.severity == "violation"), finding
    assert plan.slots or plan.violations, "nothing planned, and nothing said"
    blind = any(not node.memory_known for node in topology.numa_nodes)
    assert blind or all(row.left_bytes >= 0 for row in plan.ledger) or plan.violations
    spread = {chosen.model for chosen in plan.chosen_ranks if chosen.ranks > 1}
    for placement in (slot.placement for slot in plan.slots if slot.model.name in spread):
        for node, cpus in zip(placement.rank_nodes, placement.omp_cpus, strict=True):
            assert cpus <= topology.node(node).cpus, "a rank has its cpus and its memory on one node"
        assert len(set(placement.rank_nodes)) == len(placement.rank_nodes)
    to_text(plan, topology)
    json.dumps(plan_json(plan, {slot.id: {} for slot in plan.slots}))
    slots = [DrawnSlot(f"slot {slot.id}", slot.placement.cpus, ("x",)) for slot in plan.slots]
    picture = make_picture(topology, slots, plan.reserved)
    draw(picture)
    to_svg(picture, "x")


@settings(max_examples=examples(200), deadline=None)
@given(
    topologies(),
    LAYOUTS,
    MODELS,
    st.sampled_from([Memory(), Memory(kv_cache="1GiB")]),
    st.sampled_from([PROFILE, LARGE, None]),
)
def test_plan_or_reason(
    topology: Topology, layout: Layout, models: tuple[Model, ...], memory: Memory, its: ModelProfile | None
) -> None:
    """Without a profile: of the cpus alone."""
    config = Config(models=models, layout=layout, memory=memory)
    check(make_plan(topology, config, {"a": its or PROFILE}, cpus_only=its is None), topology)


@settings(max_examples=examples(60), deadline=None)
@given(topologies(), LAYOUTS, MODELS)
def test_compare_or_reason(topology: Topology, layout: Layout, models: tuple[Model, ...]) -> None:
    columns = compare(topology, Config(models=models, layout=layout), {"a": PROFILE}, cpus_only=False)
    rows(columns)
    notes(columns)
    json.dumps(compare_json(columns))


@pytest.mark.parametrize("name", named.names())
@pytest.mark.parametrize("strategy", Strategy)
def test_every_known_machine_with_every_strategy(name: str, strategy: Strategy) -> None:
    for suffix in ("", "-smtoff", *(("-nps4",) if name.endswith(("9654-2p", "9755-2p")) else ())):
        topology = named.find_topology(f"{name}{suffix}")
        for count in ("auto", 1, 2, 3, 4, 12, 200):
            layout = Layout(strategy=strategy, instances_per_socket=count)
            plan = make_plan(
                topology, Config(models=(Model(name="a", path="/m"),), layout=layout), {"a": PROFILE}
            )
            if count == "auto":
                assert not plan.violations, plan.violations
            for finding in plan.findings:
                assert finding.remedy
                assert finding.message.startswith("cannot ") == (finding.severity == "violation")
            assert plan.slots or plan.violations
