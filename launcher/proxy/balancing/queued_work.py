"""What the queue holds, in sums: prefill that waits for whichever instance is free first, or for a certain one; prompts."""

from __future__ import annotations

from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.balancing.upstreams import Upstream


class QueuedWork:
    """Requests and tokens of prefill. Kept as tickets come and leave."""

    __slots__ = ("at", "count", "tokens", "total")

    def __init__(self) -> None:
        self.total: int = 0
        self.count: int = 0  # those that start wherever an instance is free
        self.tokens: float = 0.0
        self.at: dict[
            Upstream, tuple[int, float]
        ] = {}  # the others, by the instance that has their prompt cached

    def add(self, ticket: Ticket, sign: int = 1) -> None:
        self.total += sign
        upstream, tokens = ticket.expected_at, sign * ticket.prefill_tokens
        if upstream is None:
            self.count += sign
            self.tokens = self.tokens + tokens if self.count else 0.0
            return
        count, sum_ = self.at.get(upstream, (0, 0.0))
        if count + sign:
            self.at[upstream] = (count + sign, sum_ + tokens)
        else:
            del self.at[upstream]

    def plus(self, other: QueuedWork, part: float = 1.0) -> None:
        """Add that part of another."""
        self.total += round(other.total * part)
        self.count += round(other.count * part)
        self.tokens += other.tokens * part
        for upstream, (count, tokens) in other.at.items():
            mine = self.at.get(upstream, (0, 0.0))
            self.at[upstream] = (mine[0] + round(count * part), mine[1] + tokens * part)


class QueuedPrompts:
    """Blocks of the prompts that wait (Demand.prefix): the first of several alike computes what they share."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}

    def add(self, prefix: tuple[int, ...]) -> None:
        blocks = self._blocks
        for block in prefix:
            blocks[block] = blocks.get(block, 0) + 1

    def remove(self, prefix: tuple[int, ...]) -> None:
        blocks = self._blocks
        for block in prefix:
            if (left := blocks[block] - 1) > 0:
                blocks[block] = left
            else:
                del blocks[block]

    def match(self, prefix: tuple[int, ...]) -> int:
        """How many leading blocks of `prefix` another prompt has."""
        blocks, count = self._blocks, 0
        for block in prefix:
            if block not in blocks:
                break
            count += 1
        return count
