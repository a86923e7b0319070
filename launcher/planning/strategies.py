"""How the ordered cores of a zone become instances: one pure function per strategy.

A zone is what instances are cut from: the usable cores of one NUMA node on one socket, ordered by
their lowest cpu (or of several nodes, where spanning was asked for). Each function returns one tuple
of cores per instance, in the zone's order, and raises CutError when the rule can't be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar, assert_never

from launcher.config.schema import Strategy
from launcher.topology.model import Core, L3Domain

T = TypeVar("T")
Cut = tuple[tuple[Core, ...], ...]
Cutter = Callable[[Sequence[Core], Sequence[L3Domain], int], Cut]


class CutError(Exception):
    """The zone can't be cut that way. The message completes "cannot cut ...: "."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def interleaved(cores: Sequence[Core], _l3: Sequence[L3Domain], n: int) -> Cut:
    """AMD's published pattern.

    1. Core k of the ordered cores goes to instance k mod n.
    2. So every instance has cores in every L3 domain, and sizes differ by one at most.
    """
    return tuple(tuple(cores[k::n]) for k in range(n))


def contiguous(cores: Sequence[Core], _l3: Sequence[L3Domain], n: int) -> Cut:
    """Blocks of neighbours.

    1. The ordered cores are cut into n runs; the first len mod n runs have one core more.
    """
    return runs(cores, n)


def l3_aligned(cores: Sequence[Core], l3: Sequence[L3Domain], n: int) -> Cut:
    """Whole L3 domains.

    1. Cores of one L3 domain stay together; an L3 that reaches beyond the zone counts with its part inside.
    2. Where all domains have the same number of cores, they are dealt in runs of neighbours (as contiguous).
    3. Else the greatest domain goes to the smallest instance, in turn; then whole domains are swapped
       or moved until that brings no two instances closer (`exchange`). Ties go to the lower instance.
    """
    domains = _domains(cores, l3)
    if len(domains) < n:
        raise CutError(
            f"{n} instances need {n} whole L3 domains, there are {len(domains)}",
            f"lower layout.instances_per_socket to at most {len(domains)} on a node, or take another "
            "strategy",
        )
    sizes = [len(domain) for domain in domains]
    if len(set(sizes)) == 1:
        hands: Sequence[Sequence[int]] = runs(range(len(domains)), n)
    else:
        hands = _deal(sizes, n)
        held = [sum(sizes[domain] for domain in hand) for hand in hands]
        # A swap shifts the difference of two domains; it helps where instances are further apart than that.
        if max(held) - min(held) > min(high - low for low, high in pairwise(sorted(set(sizes)))):
            from launcher.planning.rebalance import even_out  # noqa: PLC0415  numpy

            hands = even_out(hands, sizes)
        hands = sorted((sorted(hand) for hand in hands), key=lambda hand: hand[0])
    return tuple(tuple(core for d in hand for core in domains[d]) for hand in hands)


def per_node(cores: Sequence[Core], l3: Sequence[L3Domain], n: int) -> Cut:
    """One instance takes the whole node.

    1. With one model on the node, its instance gets all cores.
    2. Models that share a node get neighbouring runs of equal size.
    """
    return contiguous(cores, l3, n)


def cutter(strategy: Strategy) -> Cutter:
    """The function of a strategy."""
    match strategy:
        case Strategy.INTERLEAVED:
            return interleaved
        case Strategy.CONTIGUOUS:
            return contiguous
        case Strategy.L3_ALIGNED:
            return l3_aligned
        case Strategy.PER_NODE:
            return per_node
        case _:
            assert_never(strategy)


def runs(items: Sequence[T], n: int) -> tuple[tuple[T, ...], ...]:
    """n runs of neighbours, of which the first len mod n have one item more."""
    each, more = divmod(len(items), n)
    cuts = [i * each + min(i, more) for i in range(n + 1)]
    return tuple(tuple(items[low:high]) for low, high in pairwise(cuts))


def _domains(cores: Sequence[Core], l3: Sequence[L3Domain]) -> list[list[Core]]:
    """The zone's cores by L3, in the order of the first core of each."""
    domain_of = {cpu: i for i, domain in enumerate(l3) for cpu in domain.cpus}
    groups: dict[int, list[Core]] = {}
    for core in cores:
        domain = domain_of.get(core.cpus.first)
        if domain is None:
            raise CutError(
                f"the kernel describes no L3 cache for cpu {core.cpus.first}",
                'set layout.strategy to "contiguous" or "interleaved"',
            )
        groups.setdefault(domain, []).append(core)
    return list(groups.values())


def _deal(sizes: Sequence[int], n: int) -> list[list[int]]:
    """The greatest to the smallest instance, in turn; n is at most the number of sizes."""
    hands: list[list[int]] = [[] for _ in range(n)]
    held = [0] * n
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        hand = held.index(min(held))
        hands[hand].append(piece)
        held[hand] += sizes[piece]
    return hands
