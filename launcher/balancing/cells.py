"""Balancers of a part of the instances each, so that what a decision costs is bounded however many instances there are.

Up to MOST_INSTANCES there is one, which decides as one host's does. Of several a request goes to the one whose instances
hold most of its prompt, unless it has more than its share of all requests: consistent hashing with bounded loads
(Mirrokni, Thorup, Zadimoghaddam 2018), with what is believed to be cached in place of the hash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from math import inf, sqrt
from typing import Final

from launcher.balancing.balancer import Balancer
from launcher.balancing.prefix_cache import PrefixCache
from launcher.balancing.upstreams import InstanceId

MOST_INSTANCES: Final = 64
# More requests than its share that a balancer may have, in standard deviations of what chance alone puts there.
MOST_BEYOND: Final = 3.0


class Cell:
    """One of the balancers. Its owner keeps `requests` and calls `resize` when instances were added."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer = balancer
        self.requests: dict[str, int] = {}  # by model: those that it queues or has bound
        self.prefixes: PrefixCache = PrefixCache()  # blocks that some instance of it is believed to hold
        self.pumped_at: float = -inf
        self.pump_at: float | None = None  # Balancer.next_pump when it was pumped last

    def resize(self) -> None:
        self.prefixes.set_capacity(sum(upstream.prefixes.capacity for upstream in self.balancer.table))

    def count(self, model: str, more: int) -> None:
        """A request of that model came (1) or left (-1)."""
        self.requests[model] = self.requests.get(model, 0) + more

    def instances(self) -> int:
        return sum(1 for _ in self.balancer.table)


class Cells:
    """All cells; there is always one. Hosts stay in the cell that they were put into."""

    def __init__(self, make: Callable[[], Balancer]) -> None:
        self._make = make
        self._cells: list[Cell] = [Cell(make())]

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._cells)

    def place(self, instances: int) -> Cell:
        """For a host with so many instances: the cell with the fewest, a new one if that would have too many."""
        cell = min(self._cells, key=Cell.instances)
        has = cell.instances()
        if has and has + instances > MOST_INSTANCES:
            cell = Cell(self._make())
            self._cells.append(cell)
        return cell

    def choose(self, model: str, prefix: tuple[int, ...], tried: Collection[InstanceId] = ()) -> Cell | None:
        """For a request; the caller counts it. None: no cell has an instance that may serve it."""
        usable = [
            (cell, size, cell.requests.get(model, 0))
            for cell in self._cells
            if (size := len(cell.balancer.table.candidates(model, None, tried)))
        ]
        if not usable:
            return None
        share = (1 + sum(has for _, _, has in usable)) / sum(size for _, size, _ in usable)
        chosen, best = usable[0][0], (-1, 0.0)
        for cell, size, has in usable:
            if len(usable) == 1 or has < share * size + MOST_BEYOND * sqrt(share * size):
                found = (cell.prefixes.match(prefix), -has / size)
                if found > best:
                    chosen, best = cell, found
        if prefix and len(self._cells) > 1:
            chosen.prefixes.use(prefix)
        return chosen
