"""The ledger's arithmetic."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.plans import make_plan
from support.synthetic import Machine

from launcher.base.text import GIB, MIB
from launcher.config.schema import Config, Engine, Layout, Memory, Model
from launcher.engines.vllm.demand import INSTANCE_OVERHEAD_BYTES, KV_STEP_BYTES, RANK_OVERHEAD_BYTES
from launcher.models.profile import UNKNOWN, ModelProfile
from launcher.plan.plan import Plan

# Llama-3.1-8B in bfloat16: 32 layers, 8 KV heads of 128.
LLAMA_8B = ModelProfile(
    weights_bytes=16_060_522_496,
    kv_bytes_per_token=131_072,
    max_model_len=131_072,
    num_attention_heads=32,
    num_kv_heads=8,
)
TINY = ModelProfile(
    weights_bytes=3_410_432,
    kv_bytes_per_token=1024,
    max_model_len=4096,
    num_attention_heads=4,
    num_kv_heads=2,
)


def plan_for(
    machine: Machine,
    profile: ModelProfile = LLAMA_8B,
    *,
    memory: Memory | None = None,
    count: int = 2,
    **model: object,
) -> Plan:
    entry = Model(name="m", path="/m", **model)  # type: ignore[arg-type]
    config = Config(
        models=(entry,),
        layout=Layout(instances_per_socket=count, reserve_cores=0),
        memory=memory or Memory(),
        engine=Engine(),
    )
    return make_plan(machine.topology(), config, {"m": profile})


def test_auto_divides_what_the_node_has_left() -> None:
    plan = plan_for(Machine(cores=8, node_bytes=384 * GIB), max_model_len=32_768, max_num_seqs=256)
    (row,) = plan.ledger
    assert row.reserve_bytes == 8 * GIB
    assert row.weights_bytes == 2 * LLAMA_8B.weights_bytes  # type: ignore[operator]
    assert row.peak_bytes == row.weights_bytes // 4
    assert row.overhead_bytes == 2 * INSTANCE_OVERHEAD_BYTES
    kv = plan.slots[0].kv_cache_bytes
    assert kv is not None
    assert kv % KV_STEP_BYTES == 0
    assert 0 <= row.left_bytes < 2 * KV_STEP_BYTES
    assert plan.findings == ()


def test_auto_is_capped_by_what_requests_can_fill() -> None:
    plan = plan_for(Machine(cores=8, node_bytes=384 * GIB), max_model_len=2048, max_num_seqs=8)
    needed = (8 * 16 + 1) * 128 * 131_072
    assert plan.slots[0].kv_cache_bytes == -(-needed // KV_STEP_BYTES) * KV_STEP_BYTES


def test_two_tiny_instances_fit_the_development_machine() -> None:
    plan = plan_for(Machine(cores=2, node_bytes=7_610_773_504), TINY)
    assert plan.violations == ()
    assert all(slot.kv_cache_bytes and slot.kv_cache_bytes >= 4096 * 1024 for slot in plan.slots)


def test_a_share_below_the_step_still_holds_one_request() -> None:
    free = 4 * GIB + 2 * 20 * MIB
    plan = plan_for(Machine(cores=2, node_bytes=free), TINY, memory=Memory(reserve="0"))
    assert plan.violations == ()
    assert plan.slots[0].kv_cache_bytes == 33 * 128 * 1024


def test_less_than_one_request_is_refused_with_the_gap() -> None:
    plan = plan_for(Machine(cores=8, node_bytes=48 * GIB))
    (violation,) = plan.violations
    assert violation.code == "out-of-memory"
    assert violation.message.startswith("cannot fit 2 instances on node 0: ")
    assert f"{-plan.ledger[0].left_bytes / GIB:.2f} GiB" in violation.message
    assert "max_model_len" in violation.remedy


def test_explicit_kv_is_taken_as_given_and_checked() -> None:
    fits = plan_for(Machine(cores=8, node_bytes=384 * GIB), memory=Memory(kv_cache="40GiB"))
    assert [slot.kv_cache_bytes for slot in fits.slots] == [40 * GIB] * 2
    assert fits.violations == ()
    large = plan_for(Machine(cores=8, node_bytes=64 * GIB), memory=Memory(kv_cache="40GiB"))
    assert [finding.code for finding in large.violations] == ["out-of-memory"]
    assert "memory.kv_cache" in large.violations[0].remedy


def test_a_kv_cache_below_one_request_is_refused_before_vllm_does() -> None:
    plan = plan_for(Machine(cores=8, node_bytes=384 * GIB), memory=Memory(kv_cache="1GiB"))
    (violation,) = plan.violations
    assert violation.code == "kv-too-small"
    assert violation.message == (
        "cannot start 'm' with 1 GiB of KV cache: one request of max_model_len needs 16 GiB"
    )
    assert "16400MiB" in violation.remedy


def test_overhead_can_be_said() -> None:
    plan = plan_for(Machine(cores=8, node_bytes=384 * GIB), memory=Memory(instance_overhead="5GiB"))
    assert plan.ledger[0].overhead_bytes == 10 * GIB


def test_cgroup_limit_is_shared_by_the_nodes_in_use() -> None:
    machine = Machine(sockets=2, cores=8, node_bytes=100 * GIB, memory_limit_bytes=60 * GIB)
    plan = plan_for(machine, TINY, count=1)
    assert [row.total_bytes for row in plan.ledger] == [30 * GIB, 30 * GIB]
    assert plan_for(replace(machine, memory_limit_bytes=500 * GIB), TINY).ledger[0].total_bytes == 100 * GIB


def test_ranks_share_weights_and_take_kv_each() -> None:
    machine = Machine(cores=8, node_bytes=384 * GIB)
    one, two = plan_for(machine, count=1), plan_for(machine, count=1, tensor_parallel_size=2)
    assert two.ledger[0].weights_bytes == one.ledger[0].weights_bytes
    assert two.ledger[0].overhead_bytes == INSTANCE_OVERHEAD_BYTES + RANK_OVERHEAD_BYTES
    assert two.slots[0].kv_cache_bytes is not None
    assert two.ledger[0].kv_bytes == 2 * two.slots[0].kv_cache_bytes


def test_ranks_on_nodes_of_their_own_are_charged_there() -> None:
    machine = Machine(nodes=2, cores=8, node_bytes=96 * GIB)
    config = Config(
        models=(Model(name="m", path="/m", tensor_parallel_size=2, max_model_len=4096),),
        layout=Layout(instances_per_socket=1, span_nodes=True, reserve_cores=0),
    )
    plan = make_plan(machine.topology(), config, {"m": LLAMA_8B})
    assert [row.node for row in plan.ledger] == [0, 1]
    assert plan.ledger[0].weights_bytes == plan.ledger[1].weights_bytes
    assert [row.overhead_bytes for row in plan.ledger] == [INSTANCE_OVERHEAD_BYTES, RANK_OVERHEAD_BYTES]
    assert [row.kv_bytes for row in plan.ledger] == [plan.slots[0].kv_cache_bytes] * 2
    assert "spans-nodes" not in [finding.code for finding in plan.findings]


def test_an_unknown_model_needs_an_explicit_size() -> None:
    machine = Machine(cores=8)
    (violation,) = plan_for(machine, UNKNOWN).violations
    assert violation.code == "memory-unknown"
    plan = plan_for(machine, UNKNOWN, memory=Memory(kv_cache="4GiB"))
    assert [finding.code for finding in plan.findings] == ["memory-unchecked"]


def test_a_node_whose_memory_is_unknown_needs_an_explicit_size() -> None:
    topology = Machine(cores=8).topology()
    node = replace(topology.numa_nodes[0], memory_bytes=0, available_bytes=0, memory_known=False)
    topology = replace(topology, numa_nodes=(node,))
    plan = make_plan(topology, Config(models=(Model(name="m", path="/m"),)), {"m": TINY})
    assert [finding.code for finding in plan.violations] == ["memory-unknown"]


def test_huge_pages_are_left_out_and_said() -> None:
    topology = Machine(cores=8, node_bytes=64 * GIB).topology()
    node = replace(topology.numa_nodes[0], hugepages_bytes=40 * GIB)
    plan = make_plan(
        replace(topology, numa_nodes=(node,)), Config(models=(Model(name="m", path="/m"),)), {"m": LLAMA_8B}
    )
    assert plan.ledger[0].total_bytes == 24 * GIB
    assert plan.ledger[0].left_bytes < 0, "8B do not fit into 24 GiB with a KV cache for 131,072 tokens"
    assert {"huge-pages", "out-of-memory"} <= {finding.code for finding in plan.findings}
    assert "40 GiB of node 0 are reserved" in next(f.message for f in plan.findings if f.code == "huge-pages")


def test_free_memory_below_the_plan_is_said() -> None:
    topology = Machine(cores=8).topology()
    node = replace(topology.numa_nodes[0], available_bytes=3 * GIB)
    plan = make_plan(
        replace(topology, numa_nodes=(node,)), Config(models=(Model(name="m", path="/m"),)), {"m": LLAMA_8B}
    )
    assert "free-memory" in [finding.code for finding in plan.warnings]


@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 131_072), (2, 65_536), (8, 16_384), (16, 16_384)])
def test_kv_heads_are_split_then_repeated(ranks: int, per_rank: int) -> None:
    assert sum(its.count * its.token_bytes(ranks) for its in LLAMA_8B.kv_layers) == per_rank
    assert UNKNOWN.kv_layers == ()


# A Llama of 131 GiB: 64 heads, 8 KV heads.
LARGE = ModelProfile(
    weights_bytes=131 * GIB,
    kv_bytes_per_token=327_680,
    max_model_len=8192,
    num_attention_heads=64,
    num_kv_heads=8,
)
SMALL_NODES = Machine(sockets=2, nodes=12, cores=8, node_bytes=64 * GIB)


def whole(machine: Machine, profile: ModelProfile, layout: Layout, **model: object) -> Plan:
    entry = Model(name="m", path="/m", **model)  # type: ignore[arg-type]
    return make_plan(machine.topology(), Config(models=(entry,), layout=layout), {"m": profile})


def test_nodes_that_lack_the_same_are_one_finding_with_a_remedy_that_the_next_run_accepts() -> None:
    (found,) = whole(SMALL_NODES, LARGE, Layout(), tensor_parallel_size=1).violations
    assert found.code == "out-of-memory"
    assert "on node 0, nor those of nodes 1-23: " in found.message
    assert 'set tensor_parallel_size = "auto": an instance then' in found.remedy
    assert "NPS1" in found.remedy
    assert "max_model_len" not in found.remedy
    (found,) = whole(SMALL_NODES, LARGE, Layout(instances_per_socket=12)).violations
    assert 'set layout.instances_per_socket = "auto": an instance then' in found.remedy
    assert not whole(SMALL_NODES, LARGE, Layout()).violations


@pytest.mark.parametrize(
    ("machine", "profile", "said", "unsaid"),
    [
        (SMALL_NODES, LARGE, 'tensor_parallel_size = "auto"', "instances_per_socket"),
        # Nothing divides them.
        (
            SMALL_NODES,
            replace(LARGE, num_attention_heads=59, num_kv_heads=59),
            "NPS1",
            "tensor_parallel_size",
        ),
        # The socket has one node, too small.
        (Machine(cores=8, node_bytes=64 * GIB), LARGE, "smaller or quantized", "NPS1"),
        # Nor would one node for all of the socket do.
        (replace(SMALL_NODES, nodes=2), LARGE, 'tensor_parallel_size = "auto"', "NPS1"),
        (replace(SMALL_NODES, nodes=2, sockets=1), LARGE, "smaller or quantized", "tensor_parallel_size"),
    ],
)
def test_the_remedy_for_a_model_larger_than_a_node(
    machine: Machine, profile: ModelProfile, said: str, unsaid: str
) -> None:
    (found,) = whole(machine, profile, Layout(), tensor_parallel_size=1).violations
    assert said in found.remedy
    assert unsaid not in found.remedy


def test_one_instance_on_a_node_is_not_told_to_become_fewer() -> None:
    short = plan_for(Machine(cores=8, node_bytes=32 * GIB), count=1)
    assert "lower max_model_len" in short.violations[0].remedy
    assert "instances_per_socket" not in short.violations[0].remedy
    crowded = plan_for(Machine(cores=8, node_bytes=48 * GIB), count=2)
    assert "instances_per_socket" in crowded.violations[0].remedy


def test_a_spanning_instance_gets_advice_that_is_accepted() -> None:
    layout = Layout(span_nodes=True, instances_per_socket=1)
    ranks = whole(SMALL_NODES, LARGE, layout, tensor_parallel_size=8)
    warned = next(finding for finding in ranks.warnings if finding.code == "spans-nodes")
    assert "tensor_parallel_size" not in warned.remedy
    assert "NPS1" in warned.remedy
    small = whole(SMALL_NODES, TINY, layout)
    warned = next(finding for finding in small.warnings if finding.code == "spans-nodes")
    assert "instances_per_socket to the number of nodes, 12" in warned.remedy
    assert "tensor_parallel_size to 4" in warned.remedy
