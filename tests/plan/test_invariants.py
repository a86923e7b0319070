"""What holds for every plan of every machine."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.examples import examples
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Config, Layout, Memory, Model, Strategy
from launcher.machine.topology import Topology
from launcher.models.profile import ModelProfile
from launcher.plan.plan import Plan

PROFILE = ModelProfile(
    weights_bytes=2**20, kv_bytes_per_token=1024, max_model_len=1024, num_attention_heads=6, num_kv_heads=6
)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    machine = Machine(
        sockets=draw(st.integers(1, 3)),
        nodes=draw(st.integers(1, 4)),
        l3=draw(st.integers(1, 4)),
        cores=draw(st.integers(1, 8)),
        smt=draw(st.sampled_from([1, 2, 4])),
        adjacent=draw(st.booleans()),
        has_l3=draw(st.booleans()),
        memory_only=draw(st.integers(0, 2)),
    )
    every = range(machine.core_count * machine.smt)
    offline = draw(st.frozensets(st.sampled_from(every), max_size=len(every) // 3))
    allowed = draw(st.none() | st.frozensets(st.sampled_from(every), min_size=1).map(CpuSet))
    return replace(machine, offline=offline, allowed=allowed)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(
        strategy=draw(st.sampled_from(Strategy)),
        instances_per_socket=draw(st.just("auto") | st.integers(1, 9)),
        reserve_cores=draw(st.just("auto") | st.integers(0, 6)),
        use_smt=draw(st.booleans()),
        span_nodes=draw(st.booleans()),
    )


def plan_of(topology: Topology, layout: Layout, ranks: int = 1) -> Plan:
    model = Model(name="m", path="/m", tensor_parallel_size=ranks)
    return make_plan(topology, Config(models=(model,), layout=layout, memory=Memory()), {"m": PROFILE})


def disjoint(sets: Sequence[CpuSet]) -> bool:
    return sum(map(len, sets)) == len(set().union(*sets))


@settings(max_examples=examples(150), deadline=None)
@given(machines(), layouts(), st.integers(1, 3))
def test_every_plan(machine: Machine, layout: Layout, ranks: int) -> None:
    topology = machine.topology()
    plan = plan_of(topology, layout, ranks)
    placements = [slot.placement for slot in plan.slots]
    assert [slot.id for slot in plan.slots] == list(range(len(plan.slots)))
    assert disjoint([p.cpus for p in placements])
    assert all(p.cpus and p.cpus <= topology.allowed - plan.reserved for p in placements)
    assert plan.usable == topology.allowed - plan.reserved
    assert plan.reserved <= topology.allowed
    for placement in placements:
        assert disjoint(list(placement.omp_cpus))
        assert all(cpus and cpus <= placement.cpus for cpus in placement.omp_cpus)
        if not layout.span_nodes:
            assert placement.node is not None
            assert placement.cpus <= topology.node(placement.node).cpus
            assert len(placement.membind) == 1
    order = [(p.socket, p.node) for p in placements]
    assert all(a <= b for a, b in pairwise(order))  # type: ignore[operator]


@settings(max_examples=examples(150), deadline=None)
@given(machines(), layouts())
def test_a_plan_without_violations_uses_every_core(machine: Machine, layout: Layout) -> None:
    topology = machine.topology()
    plan = plan_of(topology, layout)
    if plan.violations:
        return
    used = {cpu for slot in plan.slots for cpu in slot.placement.cpus}
    expected: set[int] = set()
    for core in topology.cores:
        mine = core.cpus & plan.usable
        if mine:
            expected |= set(mine) if layout.use_smt else {mine.first}
    assert used == expected


@settings(max_examples=examples(150), deadline=None)
@given(machines(), layouts())
def test_cores_are_shared_evenly_in_each_node(machine: Machine, layout: Layout) -> None:
    if layout.strategy is Strategy.L3_ALIGNED or layout.span_nodes:
        return
    topology = machine.topology()
    sizes: dict[object, list[int]] = {}
    for slot in plan_of(topology, layout).slots:
        cores = sum(not core.cpus.isdisjoint(slot.placement.cpus) for core in topology.cores)
        sizes.setdefault((slot.placement.socket, slot.placement.node), []).append(cores)
    assert all(max(its) - min(its) <= 1 for its in sizes.values())


@settings(max_examples=examples(100), deadline=None)
@given(machines(), st.integers(1, 6))
def test_l3_domains_are_never_split(machine: Machine, count: int) -> None:
    topology = machine.topology()
    layout = Layout(strategy=Strategy.L3_ALIGNED, instances_per_socket=count, reserve_cores=0)
    for slot in plan_of(topology, layout).slots:
        for domain in topology.l3_domains:
            inside = domain.cpus & slot.placement.cpus
            firsts = CpuSet(
                (core.cpus & topology.allowed).first
                for core in topology.cores
                if core.cpus <= domain.cpus and core.cpus & topology.allowed
            )
            assert not inside or inside == firsts


@settings(max_examples=examples(100), deadline=None)
@given(machines(), layouts())
def test_numbering_of_siblings_changes_no_core_set(machine: Machine, layout: Layout) -> None:
    """Cpu ids differ between firmwares; which cores go together must not."""

    def core_sets(adjacent: bool) -> list[frozenset[object]]:
        topology = replace(machine, adjacent=adjacent, offline=frozenset(), allowed=None).topology()
        return [
            frozenset(core.key for core in topology.cores if not core.cpus.isdisjoint(slot.placement.cpus))
            for slot in plan_of(topology, layout).slots
        ]

    assert core_sets(adjacent=True) == core_sets(adjacent=False)
