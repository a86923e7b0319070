"""The cutting rules on bare cores."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Strategy
from launcher.machine.topology import Core, CoreKey, L3Domain
from launcher.plan.strategies import CutError, cutter, even_out, l3_aligned


def machine(sizes: list[int]) -> tuple[list[Core], list[L3Domain]]:
    """Cores in L3 domains of the given sizes."""
    cores: list[Core] = []
    domains: list[L3Domain] = []
    for size in sizes:
        first = len(cores)
        cores += [Core(CoreKey(0, 0, i), CpuSet([i]), 0) for i in range(first, first + size)]
        domains.append(L3Domain(CpuSet(range(first, first + size)), None, 0))
    return cores, domains


@pytest.mark.parametrize(
    ("sizes", "n", "held"),
    [
        ([8, 8, 8, 8], 2, [16, 16]),
        ([8] * 7 + [7], 3, [23, 24, 16]),
        ([3, 3, 2, 2, 2], 2, [6, 6]),
        ([8, 1], 2, [8, 1]),
        ([5, 4, 3, 3, 3], 2, [9, 9]),
        ([6, 2, 2, 2], 1, [12]),
        ([8] * 15 + [6], 2, [64, 62]),
        ([7, 5, 4, 4, 3, 3, 2], 3, [10, 9, 9]),
    ],
)
def test_l3_domains_are_dealt_evenly(sizes: list[int], n: int, held: list[int]) -> None:
    cores, domains = machine(sizes)
    cut = l3_aligned(cores, domains, n)
    assert sorted(map(len, cut)) == sorted(held)
    assert sorted(core.key for hand in cut for core in hand) == [core.key for core in cores]
    for domain in domains:
        assert sum(any(core.cpus <= domain.cpus for core in hand) for hand in cut) == 1


def test_a_swap_brings_instances_closer_than_dealing() -> None:
    """Dealt 5+3+3 and 4+3; 4 for 5 leaves nothing to gain, 3 for 4 does not help, so 5 goes for 4."""
    assert even_out([[0, 3], [1, 2, 4]], [5, 4, 3, 3, 3]) == [[0, 1], [2, 3, 4]]
    assert even_out([[0], [1]], [8, 1]) == [[0], [1]]


@example([1, 1, 2, 5, 5, 5, 7, 8, 8, 10, 10, 11, 12, 14], 5)  # after a swap a piece may go alone
@given(st.lists(st.integers(1, 16), min_size=1, max_size=14), st.integers(1, 5))
def test_no_swap_is_left_that_helps(sizes: list[int], n: int) -> None:
    n = min(n, len(sizes))
    cores, domains = machine(sizes)
    cut = l3_aligned(cores, domains, n)
    hands = [[len([c for c in hand if c.cpus <= domain.cpus]) for domain in domains] for hand in cut]
    assert all(any(hand) for hand in hands)
    if len(set(sizes)) == 1:
        return
    for one in hands:
        for other in hands:
            gap = sum(one) - sum(other)
            swaps = {a - b for a in one if a for b in other if b}
            assert not any(0 < shift < gap for shift in swaps)
            assert not any(a < gap for a in one if a) or sum(map(bool, one)) == 1, "nor a move"


def test_an_l3_beyond_the_zone_counts_with_its_part() -> None:
    cores, _ = machine([4])
    wide = [L3Domain(CpuSet(range(100)), None, None)]
    assert len(l3_aligned(cores, wide, 1)) == 1
    with pytest.raises(CutError, match="the zone has 1"):
        l3_aligned(cores, wide, 2)


@pytest.mark.parametrize("strategy", Strategy)
def test_every_strategy_deals_all_cores(strategy: Strategy) -> None:
    topology = Machine(l3=4, cores=4).topology()
    cut = cutter(strategy)(topology.cores, topology.l3_domains, 4)
    assert [len(hand) for hand in cut] == [4, 4, 4, 4]
    assert {core.key for hand in cut for core in hand} == {core.key for core in topology.cores}
