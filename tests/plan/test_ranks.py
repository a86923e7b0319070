"""tensor_parallel_size = "auto": the ranks that are chosen, where they are placed, and what the plan says about it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.config.schema import Config, Engine, Layout, Memory, Model, Strategy
from launcher.models.profile import UNKNOWN, ModelProfile
from launcher.plan.plan import Plan
from launcher.plan.plan_text import plan_json, to_text
from launcher.plan.ranks import choose_ranks

# Llama-3.3-70B in bfloat16.
LLAMA_70B = ModelProfile(
    weights_bytes=141_107_412_992,
    kv_bytes_per_token=327_680,
    max_model_len=8192,
    num_attention_heads=64,
    num_kv_heads=8,
)
LLAMA_8B = ModelProfile(
    weights_bytes=16_060_522_496,
    kv_bytes_per_token=131_072,
    max_model_len=8192,
    num_attention_heads=32,
    num_kv_heads=8,
)
TWO_SOCKETS = Machine(sockets=2, cores=8, node_bytes=128 * GIB)


def plan_of(
    machine: Machine, profile: ModelProfile = LLAMA_70B, layout: Layout | None = None, **more: object
) -> Plan:
    model = Model(name="m", path="/m", **more)  # type: ignore[arg-type]
    config = Config(models=(model,), layout=layout or Layout(reserve_cores=0))
    return make_plan(machine.topology(), config, {"m": profile})


def ranks_of(plan: Plan) -> list[tuple[int, ...]]:
    """Memory nodes of the ranks of each slot."""
    return [slot.placement.rank_nodes for slot in plan.slots]


def test_a_model_larger_than_a_socket_has_a_rank_on_each() -> None:
    plan = plan_of(TWO_SOCKETS)
    (slot,) = plan.slots
    assert plan.violations == ()
    assert slot.effective.tensor_parallel_size == 2
    assert slot.placement.rank_nodes == (0, 1)
    assert slot.placement.membind == CpuSet((0, 1))
    nodes = [node.cpus for node in TWO_SOCKETS.topology().numa_nodes]
    assert all(cpus <= node for cpus, node in zip(slot.placement.omp_cpus, nodes, strict=True))
    assert {finding.code for finding in plan.findings}.isdisjoint({"spans-nodes", "ranks-share-node"})
    head, row = (line.split() for line in to_text(plan, TWO_SOCKETS.topology()).splitlines()[2:4])
    shown = dict(zip(head, row, strict=False))
    assert (shown["socket"], shown["node"]) == ("0-1", "0|1")


def test_the_ledger_has_each_rank_on_its_node() -> None:
    plan = plan_of(TWO_SOCKETS)
    (slot,) = plan.slots
    assert slot.kv_cache_bytes is not None
    for row in plan.ledger:
        assert row.weights_bytes == -(-LLAMA_70B.weights_bytes // 2)  # type: ignore[operator]
        assert row.kv_bytes == slot.kv_cache_bytes
        assert row.left_bytes >= 0
        assert row.slots == (0,)


def test_a_model_that_fits_on_a_node_has_one_rank() -> None:
    plan = plan_of(TWO_SOCKETS, LLAMA_8B)
    assert ranks_of(plan) == [(0,), (1,)]
    (chosen,) = plan.chosen_ranks
    assert (chosen.ranks, chosen.why) == (1, "an instance fits on one node")
    assert "tensor_parallel_size" not in to_text(plan, TWO_SOCKETS.topology())


def test_the_plan_says_what_was_chosen_and_why() -> None:
    plan = plan_of(TWO_SOCKETS)
    (chosen,) = plan.chosen_ranks
    assert chosen.why == (
        "an instance needs 169 GiB with the KV cache of one request, and node 0 has 122 GiB; it fits on 2 nodes, "
        "a rank on each"
    )
    (line,) = (
        line for line in to_text(plan, TWO_SOCKETS.topology()).splitlines() if "tensor_parallel_size" in line
    )
    assert line.startswith("tensor_parallel_size of m: 2, as an instance needs ")
    assert plan_json(plan)["chosen_ranks"] == [{"model": "m", "tensor_parallel_size": 2, "why": chosen.why}]


@pytest.mark.parametrize(
    ("machine", "groups"),
    [
        # The nodes of one socket hold a quarter each.
        (Machine(sockets=2, nodes=4, cores=4, node_bytes=64 * GIB), [(0, 1, 2, 3), (4, 5, 6, 7)]),
        # Pairs within the sockets.
        (Machine(sockets=2, nodes=4, cores=4, node_bytes=128 * GIB), [(0, 1), (2, 3), (4, 5), (6, 7)]),
        # Eight of them, over both sockets.
        (Machine(sockets=2, nodes=4, cores=4, node_bytes=32 * GIB), [tuple(range(8))]),
        # Three nodes on a socket: the third of each make a pair.
        (Machine(sockets=2, nodes=3, cores=4, node_bytes=128 * GIB), [(0, 1), (2, 5), (3, 4)]),
    ],
)
def test_nodes_are_grouped_within_sockets_first(machine: Machine, groups: list[tuple[int, ...]]) -> None:
    plan = plan_of(machine)
    assert plan.violations == ()
    assert ranks_of(plan) == groups


def test_a_node_that_is_left_over_is_said() -> None:
    plan = plan_of(Machine(sockets=3, cores=4, node_bytes=128 * GIB))
    assert ranks_of(plan) == [(0, 1)]
    (idle,) = (finding for finding in plan.warnings if finding.code == "idle-nodes")
    assert idle.message == "no instance of 'm' is on node 2: its ranks take 2 nodes at once"


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(64, 8, 4), (48, 12, 3), (40, 10, 5), (56, 7, 7)])
def test_ranks_divide_the_heads(heads: int, kv_heads: int, ranks: int) -> None:
    machine = Machine(nodes=8, cores=4, node_bytes=80 * GIB)
    plan = plan_of(machine, replace(LLAMA_70B, num_attention_heads=heads, num_kv_heads=kv_heads))
    assert plan.violations == ()
    assert plan.slots[0].effective.tensor_parallel_size == ranks


@pytest.mark.parametrize(
    ("machine", "profile", "why"),
    [
        (Machine(nodes=2, cores=4, node_bytes=32 * GIB), LLAMA_70B, "nor does it fit on 2 nodes with a rank on each"),
        (
            Machine(nodes=4, cores=4, node_bytes=64 * GIB),
            replace(LLAMA_70B, num_attention_heads=59, num_kv_heads=59),
            "there is no number of ranks for more nodes",
        ),
    ],
)  # fmt: skip
def test_a_model_that_fits_nowhere_keeps_one_rank_and_is_refused(
    machine: Machine, profile: ModelProfile, why: str
) -> None:
    plan = plan_of(machine, profile)
    assert [finding.code for finding in plan.violations] == ["out-of-memory"]
    assert plan.slots[0].effective.tensor_parallel_size == 1
    assert plan.chosen_ranks[0].why.endswith(why)


def test_instances_per_socket_decides_how_many_nodes_one_has() -> None:
    machine = Machine(sockets=2, nodes=4, cores=4, node_bytes=128 * GIB)
    whole = plan_of(machine, layout=Layout(instances_per_socket=1, reserve_cores=0))
    assert ranks_of(whole) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert whole.violations == ()
    each = plan_of(machine, layout=Layout(instances_per_socket=4, reserve_cores=0))
    assert [finding.code for finding in each.violations] == ["out-of-memory"]
    assert 'set layout.instances_per_socket = "auto"' in each.violations[0].remedy


def test_engine_args_go_first() -> None:
    config = Config(
        models=(Model(name="m", path="/m"),), engine=Engine(args=("-tp", "1")), layout=Layout(reserve_cores=0)
    )
    plan = make_plan(TWO_SOCKETS.topology(), config, {"m": LLAMA_70B})
    assert plan.chosen_ranks == ()
    assert [finding.code for finding in plan.violations] == ["out-of-memory"]


def test_an_unknown_model_has_one_rank() -> None:
    config = Config(models=(Model(name="m", path="/m"),), memory=Memory(kv_cache="4GiB"))
    plan = make_plan(TWO_SOCKETS.topology(), config, {"m": UNKNOWN})
    assert plan.chosen_ranks == ()
    assert {slot.effective.tensor_parallel_size for slot in plan.slots} == {1}


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("use_smt", [False, True])
def test_a_smaller_model_has_an_instance_beside_each_rank(strategy: Strategy, use_smt: bool) -> None:
    machine = Machine(sockets=2, cores=8, smt=2, l3=2, node_bytes=128 * GIB)
    config = Config(
        models=(Model(name="a", path="/a"), Model(name="b", path="/b")),
        layout=Layout(strategy=strategy, reserve_cores=1, use_smt=use_smt),
    )
    plan = make_plan(machine.topology(), config, {"a": LLAMA_70B, "b": LLAMA_8B})
    assert plan.violations == ()
    assert ranks_of(plan) == [(0, 1), (0,), (1,)]
    large, *small = (slot.placement for slot in plan.slots)
    assert len({len(cpus) for cpus in large.omp_cpus}) == 1, "ranks wait for each other"
    assert all(large.cpus.isdisjoint(each.cpus) for each in small)
    assert [row.slots for row in plan.ledger] == [(0, 1), (0, 2)]


def test_ranks_are_chosen_for_models_that_do_not_fit_beside_each_other() -> None:
    config = Config(
        models=(Model(name="a", path="/a"), Model(name="b", path="/b")), layout=Layout(reserve_cores=0)
    )
    profile = replace(LLAMA_70B, weights_bytes=80 * GIB)
    plan = make_plan(TWO_SOCKETS.topology(), config, {"a": profile, "b": LLAMA_8B})
    assert plan.violations == ()
    assert ranks_of(plan) == [(0, 1), (0,), (1,)]
    assert " beside 21.7 GiB of other models, and node 0 has " in plan.chosen_ranks[0].why


def test_cpus_that_alternate_between_sockets() -> None:
    """Even cpus on socket 0, odd ones on socket 1, as many servers number them; and a reserved core on one of them."""
    topology = TWO_SOCKETS.topology()
    swap = {cpu: 2 * (cpu % 8) + cpu // 8 for cpu in range(16)}

    def moved(cpus: CpuSet) -> CpuSet:
        return CpuSet(swap[cpu] for cpu in cpus)

    topology = replace(
        topology,
        cores=tuple(replace(core, cpus=moved(core.cpus)) for core in topology.cores),
        numa_nodes=tuple(replace(node, cpus=moved(node.cpus)) for node in topology.numa_nodes),
        l3_domains=tuple(replace(domain, cpus=moved(domain.cpus)) for domain in topology.l3_domains),
    )
    config = Config(models=(Model(name="m", path="/m"),), layout=Layout(reserve_cores=1))
    (slot,) = make_plan(topology, config, {"m": LLAMA_70B}).slots
    assert [str(cpus) for cpus in slot.placement.omp_cpus] == ["0,2,4,6,8,10,12", "1,3,5,7,9,11,13"]
    assert slot.placement.cpus == CpuSet(range(16)) - CpuSet((14,))


def test_ranks_that_the_operator_sets_are_spread_by_span_nodes() -> None:
    machine = Machine(nodes=4, cores=8, node_bytes=128 * GIB)
    spread = Layout(span_nodes=True, reserve_cores=0)
    for ranks, groups in ((2, [(0, 1), (2, 3)]), (4, [(0, 1, 2, 3)]), (8, [(0, 0, 1, 1, 2, 2, 3, 3)])):
        assert ranks_of(plan_of(machine, LLAMA_8B, spread, tensor_parallel_size=ranks)) == groups
    shared = plan_of(machine, LLAMA_8B, tensor_parallel_size=2)
    assert ranks_of(shared) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert "ranks-share-node" in {finding.code for finding in shared.warnings}


def test_a_limit_on_cpu_time_leaves_each_rank_a_core_on_its_node() -> None:
    machine = replace(TWO_SOCKETS, cpu_quota=4.0)
    (slot,) = plan_of(machine).slots
    assert slot.placement.rank_nodes == (0, 1)
    assert len(slot.placement.cpus) == 4


def test_a_limit_on_cpu_time_fills_the_nodes_of_one_instance_first() -> None:
    """Instances of a core per rank would each take the memory of all weights."""
    machine = Machine(sockets=2, nodes=2, cores=4, node_bytes=128 * GIB)
    assert ranks_of(plan_of(machine)) == [(0, 1), (2, 3)]
    # One core is too few for the ranks of a second instance.
    for quota, cores in ((6.0, [6]), (8.0, [8]), (9.0, [8]), (12.0, [8, 4])):
        slots = plan_of(replace(machine, cpu_quota=quota)).slots
        assert [len(slot.placement.cpus) for slot in slots] == cores
        assert [slot.placement.rank_nodes for slot in slots] == [(0, 1), (2, 3)][: len(slots)]


def test_a_node_that_another_model_uses_is_not_idle() -> None:
    machine = Machine(nodes=3, cores=8, node_bytes=128 * GIB)
    assert "idle-nodes" in {finding.code for finding in plan_of(machine).warnings}
    models = (Model(name="m", path="/m"), Model(name="small", path="/s", nodes=(2,)))
    config = Config(models=models, layout=Layout(reserve_cores=0))
    plan = make_plan(machine.topology(), config, {"m": LLAMA_70B, "small": LLAMA_8B})
    assert "idle-nodes" not in {finding.code for finding in plan.findings}
    assert ranks_of(plan) == [(0, 1), (2,)]


def test_models_are_tried_together() -> None:
    """The largest grows first; where its numbers are used up, the next one grows beside it."""
    seen: list[dict[str, int]] = []

    def too_large(ranks: Mapping[str, int]) -> dict[str, str]:
        seen.append(dict(ranks))
        return {"a": "a is large", "b": "b is large"} if ranks != {"a": 2, "b": 4} else {}

    a, b = choose_ranks({"a": (2,), "b": (2, 4)}, too_large)
    assert [tuple(its.values()) for its in seen[:4]] == [(1, 1), (2, 1), (2, 2), (2, 4)]
    assert (a.ranks, a.why) == (2, "a is large; it fits on 2 nodes, a rank on each")
    assert (b.ranks, b.why) == (4, "b is large; it fits on 4 nodes, a rank on each")


def test_one_that_grew_for_another_has_one_rank_again() -> None:
    def too_large(ranks: Mapping[str, int]) -> dict[str, str]:
        return {"a": "a is large", "b": "b is large"} if ranks["b"] < 4 else {}

    a, b = choose_ranks({"a": (2,), "b": (2, 4)}, too_large)
    assert (a.ranks, a.why) == (1, "an instance fits on one node")
    assert b.ranks == 4


def test_models_that_fit_nowhere_have_one_rank() -> None:
    a, b = choose_ranks({"a": (2,), "b": ()}, lambda _ranks: {"a": "a is large"})
    assert (a.ranks, a.why) == (1, "a is large, nor does it fit on 2 nodes with a rank on each")
    assert (b.ranks, b.why) == (1, "an instance fits on one node")


def test_two_models_each_with_a_rank_on_both_nodes() -> None:
    """169 and 60 GiB on nodes with room for 122: neither fits beside one rank of the other."""
    config = Config(
        models=(Model(name="a", path="/a"), Model(name="b", path="/b")), layout=Layout(reserve_cores=0)
    )
    small = replace(LLAMA_8B, weights_bytes=48 * GIB)
    plan = make_plan(TWO_SOCKETS.topology(), config, {"a": LLAMA_70B, "b": small})
    assert plan.violations == ()
    assert ranks_of(plan) == [(0, 1), (0, 1)]


def test_a_plan_that_needs_no_ranks_is_as_it_was() -> None:
    """Two models of 100 GiB on two nodes of 128 GiB: with one instance each per socket, each has a node."""
    machine = Machine(nodes=2, cores=8, node_bytes=128 * GIB)
    profile = replace(LLAMA_70B, weights_bytes=80 * GIB)
    layout = Layout(strategy=Strategy.CONTIGUOUS, span_nodes=True, instances_per_socket=1, reserve_cores=0)
    models = (Model(name="a", path="/a"), Model(name="b", path="/b"))
    auto = make_plan(machine.topology(), Config(models=models, layout=layout), {"a": profile, "b": profile})
    fixed = tuple(Model(name=its.name, path=its.path, tensor_parallel_size=1) for its in models)
    before = make_plan(machine.topology(), Config(models=fixed, layout=layout), {"a": profile, "b": profile})
    assert ranks_of(auto) == ranks_of(before)
    assert [finding.code for finding in auto.findings] == [finding.code for finding in before.findings]


def test_nodes_without_memory_have_no_rank() -> None:
    """Memory on nodes 0 and 2 only."""
    topology = Machine(nodes=4, cores=8, node_bytes=512 * GIB).topology()
    nodes = tuple(
        node if node.id in {0, 2} else replace(node, memory_bytes=0) for node in topology.numa_nodes
    )
    config = Config(models=(Model(name="m", path="/m"),), layout=Layout(reserve_cores=0))
    profile = replace(LLAMA_70B, weights_bytes=450 * GIB)
    plan = make_plan(replace(topology, numa_nodes=nodes), config, {"m": profile})
    assert ranks_of(plan) == [(0, 2)]


def test_models_that_span_the_same_nodes_are_divided_alike() -> None:
    machine = Machine(nodes=4, cores=8, node_bytes=128 * GIB)
    layout = Layout(span_nodes=True, instances_per_socket=1, reserve_cores=0)
    models = (
        Model(name="a", path="/a", tensor_parallel_size=4),
        Model(name="b", path="/b", tensor_parallel_size=1),
    )
    plan = make_plan(machine.topology(), Config(models=models, layout=layout), {"a": LLAMA_8B, "b": LLAMA_8B})
    assert "models-overlap" not in {finding.code for finding in plan.findings}
