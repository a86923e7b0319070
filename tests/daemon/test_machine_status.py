"""Memory of each node divided among weights, KV cache and the rest; threads and pages outside their slot."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_operations import machine_load, slot_status
from support.fakes import a_slot

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Strategy
from launcher.daemon.machine import MAX_MISPLACED, NodeUse, Resident, busy_list, node_uses, slot_places
from launcher.machine.named import find_topology
from launcher.machine.oom import NodeMemory
from launcher.machine.placement import MisplacedThread
from launcher.plan.plan import LedgerLine, LedgerRow, Placement, Plan

GIB = 1 << 30


def placement(node: int | None) -> Placement:
    membind = CpuSet() if node is None else CpuSet((node,))
    cpus = CpuSet.parse("0-3" if node != 1 else "4-7")
    return Placement(0, node, cpus, membind, (cpus,))


def row(node: int | None, slots: Mapping[int, tuple[int, int]]) -> LedgerRow:
    """Weights and KV cache of each slot."""
    lines = [
        LedgerLine(what, size, "a test", slot)
        for slot, sizes in slots.items()
        for what, size in zip(("weights", "KV"), sizes, strict=True)
    ]
    return LedgerRow(
        node=node, total_bytes=64 * GIB, available_bytes=64 * GIB, reserve_bytes=0, weights_bytes=0, overhead_bytes=0,
        kv_bytes=0, slots=tuple(slots), lines=tuple(lines),
    )  # fmt: skip


def plan(*rows: LedgerRow) -> Plan:
    return Plan(
        strategy=Strategy.PER_NODE,
        slots=(a_slot(),),
        reserved=CpuSet(),
        usable=CpuSet(),
        ledger=rows,
        findings=(),
    )


def total(use: NodeUse) -> int:
    return use.free_bytes + use.weights_bytes + use.kv_cache_bytes + use.foreign_bytes + use.other_bytes


TWO = plan(row(0, {0: (10 * GIB, 4 * GIB)}), row(1, {1: (10 * GIB, 4 * GIB)}))
MEMORY = (NodeMemory(0, 40 * GIB, 64 * GIB), NodeMemory(1, 30 * GIB, 64 * GIB))


def test_memory_is_divided_as_planned() -> None:
    residents = {
        0: Resident(placement(0), {0: 16 * GIB, 1: 3 * GIB}),
        1: Resident(placement(1), {1: 12 * GIB}),
    }
    first, second = node_uses(MEMORY, TWO, residents, 0)
    assert (first.weights_bytes, first.kv_cache_bytes, first.foreign_bytes) == (10 * GIB, 4 * GIB, 0)
    assert (first.free_bytes, first.other_bytes) == (40 * GIB, 10 * GIB)
    assert (second.weights_bytes, second.kv_cache_bytes) == (10 * GIB, 2 * GIB)
    assert second.foreign_bytes == 3 * GIB
    assert slot_places(0, residents[0]).off_node_bytes == 3 * GIB
    assert slot_places(0, residents[0]).node_bytes == {"0": 16 * GIB, "1": 3 * GIB}
    assert slot_places(1, residents[1]).off_node_bytes == 0


def test_an_engine_without_planned_memory_is_other() -> None:
    (use,) = node_uses(MEMORY[:1], plan(), {0: Resident(placement(0), {0: 5 * GIB})}, 0)
    assert (use.weights_bytes, use.kv_cache_bytes, use.other_bytes) == (0, 0, 24 * GIB)


def test_a_kernel_without_numa_has_one_node() -> None:
    residents = {0: Resident(placement(None), {0: 16 * GIB})}
    bare = plan(row(None, {0: (10 * GIB, 4 * GIB)}))
    (use,) = node_uses((NodeMemory(None, 1 * GIB, 64 * GIB),), bare, residents, 0)
    assert (use.node, use.weights_bytes, use.kv_cache_bytes, use.foreign_bytes) == (0, 10 * GIB, 4 * GIB, 0)
    assert slot_places(0, residents[0]).off_node_bytes == 0


SIZES = st.integers(min_value=0, max_value=64 * GIB)


@given(free=SIZES, here=SIZES, there=SIZES)
def test_the_parts_of_a_node_are_its_total(free: int, here: int, there: int) -> None:
    """Verified memory is minutes old: an instance may have freed it since."""
    residents = {
        0: Resident(placement(0), {0: here, 1: there}),
        1: Resident(placement(1), {0: there, 1: here}),
    }
    for use in node_uses((NodeMemory(0, free, 64 * GIB),), TWO, residents, 0):
        assert total(use) == use.total_bytes == 64 * GIB
        assert (
            min(use.free_bytes, use.weights_bytes, use.kv_cache_bytes, use.foreign_bytes, use.other_bytes)
            >= 0
        )


def test_threads_outside_their_slot() -> None:
    threads = [MisplacedThread(100 + i, "worker", CpuSet.parse("6-7")) for i in range(MAX_MISPLACED + 5)]
    places = slot_places(0, Resident(placement(0), {}, threads))
    assert (len(places.misplaced), places.misplaced_threads) == (MAX_MISPLACED, MAX_MISPLACED + 5)
    first = places.misplaced[0]
    assert (first.thread, first.name, first.cpus, first.planned) == (100, "worker", "6-7", "0-3")


@pytest.mark.parametrize(("shares", "expected"), [({}, []), ({0: 0.12345, 2: 1.0}, [0.123, None, 1.0])])
def test_shares_are_listed_by_cpu(shares: Mapping[int, float], expected: list[float | None]) -> None:
    assert busy_list(shares) == expected


def test_a_machine_of_512_cpus_is_a_small_answer() -> None:
    machine = machine_load(find_topology("epyc-9755-2p"), [slot_status(slot) for slot in range(16)])
    assert len(machine.busy) == 512
    assert len(msgspec.json.encode(machine)) < 8_000
