"""Divides the ordered cores of a zone among instances: one pure function per strategy.

A zone has the usable cores of one NUMA node on one socket, ordered by their lowest cpu (or of several
nodes with layout.span_nodes). Each function returns one tuple
of cores per instance, in the zone's order, and raises CutError when that is not possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar, assert_never

from launcher.config.schema import Strategy
from launcher.machine.topology import Core, L3Domain

if TYPE_CHECKING:
    import numpy as np

    Sizes = np.ndarray[tuple[int, ...], np.dtype[np.intp]]

T = TypeVar("T")
Cut = tuple[tuple[Core, ...], ...]
Cutter = Callable[[Sequence[Core], Sequence[L3Domain], int], Cut]


class CutError(Exception):
    """The zone cannot be divided this way. The message completes "cannot divide ...: "."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


def interleaved(cores: Sequence[Core], _l3: Sequence[L3Domain], n: int) -> Cut:
    """AMD's published pattern.

    1. Core k of the ordered cores goes to instance k mod n.
    2. So every instance has cores in every L3 domain, and sizes differ by one at most."""
    return tuple(tuple(cores[k::n]) for k in range(n))


def contiguous(cores: Sequence[Core], _l3: Sequence[L3Domain], n: int) -> Cut:
    """Blocks of neighbouring cores.

    1. The ordered cores are cut into n runs; the first len mod n runs have one core more."""
    return runs(cores, n)


def l3_aligned(cores: Sequence[Core], l3: Sequence[L3Domain], n: int) -> Cut:
    """Whole L3 domains.

    1. Cores of one L3 domain stay together; of an L3 that extends beyond the zone, the part inside counts.
    2. Where all domains have the same number of cores, they are assigned in runs of neighbours (as contiguous).
    3. Else domains go, largest first, to the smallest instance; then whole domains are swapped or moved
       while that reduces the difference of two instances (`rebalance`). Ties go to the lower instance."""
    domains = _domains(cores, l3)
    if len(domains) < n:
        raise CutError(
            f"{n} instances need {n} whole L3 domains, the zone has {len(domains)}",
            f"lower layout.instances_per_socket to at most {len(domains)} on a node, or take another strategy",
        )
    sizes = [len(domain) for domain in domains]
    if len(set(sizes)) == 1:
        groups: Sequence[Sequence[int]] = runs(range(len(domains)), n)
    else:
        groups = _deal(sizes, n)
        held = [sum(sizes[domain] for domain in group) for group in groups]
        # A swap moves the difference of two domains; it helps where instances differ by more.
        if max(held) - min(held) > min(high - low for low, high in pairwise(sorted(set(sizes)))):
            groups = even_out(groups, sizes)
        groups = sorted((sorted(group) for group in groups), key=lambda group: group[0])
    return tuple(tuple(core for d in group for core in domains[d]) for group in groups)


def per_node(cores: Sequence[Core], l3: Sequence[L3Domain], n: int) -> Cut:
    """One instance per node.

    1. With one model on the node, its instance gets all cores.
    2. Models that share a node get runs of neighbouring cores of equal size."""
    return contiguous(cores, l3, n)


def kinds_of(cores: Sequence[Core], n: int) -> list[tuple[tuple[Core, ...], int]]:
    """Kinds of cores, fastest first, with the number of n instances that each gets; kinds without one are left out.

    OpenMP threads wait for the slowest, so that no instance has cores of two kinds.

    1. Each instance in turn goes to the kind with the most computing power (cores times speed) for each of its
       instances; ties go to the faster kind.
    2. A kind has no more instances than cores. n is at most the number of cores."""
    kinds = [
        tuple(core for core in cores if core.speed == speed)
        for speed in sorted({core.speed for core in cores}, reverse=True)
    ]
    counts = [0] * len(kinds)
    for _ in range(n):
        free = [i for i, kind in enumerate(kinds) if counts[i] < len(kind)]
        best = max(free, key=lambda i: len(kinds[i]) * kinds[i][0].speed / (counts[i] + 1))
        counts[best] += 1
    return [(kind, count) for kind, count in zip(kinds, counts, strict=True) if count]


def cutter(strategy: Strategy) -> Cutter:
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
                f"the kernel reports no L3 cache for cpu {core.cpus.first}",
                'set layout.strategy to "contiguous" or "interleaved"',
            )
        groups.setdefault(domain, []).append(core)
    return list(groups.values())


def _deal(sizes: Sequence[int], n: int) -> list[list[int]]:
    """Assigns each piece, largest first, to the smallest instance; n is at most the number of sizes."""
    groups: list[list[int]] = [[] for _ in range(n)]
    held = [0] * n
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        group = held.index(min(held))
        groups[group].append(piece)
        held[group] += sizes[piece]
    return groups


# --- Balances instances by moving and swapping whole pieces (L3 domains). ---
#
# numpy is imported only when the first distribution is uneven, which keeps other plans fast: it is a fifth of their time.
# All exchanges between a pair of instances are evaluated at once.

Groups = list[list[int]]


def even_out(groups: Sequence[Sequence[int]], sizes: Sequence[int]) -> Groups:
    """The groups (piece indices per instance) after the last exchange that improves the balance.

    1. Two instances swap pieces, or one gives one away, when that reduces their difference.
    2. The pair with the largest difference comes first; ties go to the lower instance.
    3. Each exchange lowers the sum of squares, so the process ends.

    No instance gives its last piece away: that would not reduce the difference."""
    import numpy as np  # noqa: PLC0415  heavy

    array = np.array([*sizes, 0], dtype=np.intp)  # the last index stands for no piece
    found = [sorted(group) for group in groups]
    while (best := _best(found, array)) is not None:
        giver, taker, give, take = best
        found[giver] = sorted({*found[giver], take} - {give, len(sizes)})
        found[taker] = sorted({*found[taker], give} - {take})
    return found


def _best(groups: Groups, sizes: Sizes) -> tuple[int, int, int, int] | None:
    """The best exchange: giver, taker, piece given, piece taken back (the last index: none)."""
    import numpy as np  # noqa: PLC0415  heavy

    held = [int(sizes[group].sum()) for group in groups]
    pairs = [(a, b) for a in range(len(groups)) for b in range(len(groups)) if held[a] - held[b] > 1]
    for a, b in sorted(pairs, key=lambda pair: held[pair[1]] - held[pair[0]]):
        back = [*groups[b], len(sizes) - 1]
        shift = sizes[groups[a]][:, None] - sizes[back][None, :]
        good = np.argwhere((shift > 0) & (shift < held[a] - held[b]))
        if len(good):
            return a, b, groups[a][int(good[0, 0])], back[int(good[0, 1])]
    return None
