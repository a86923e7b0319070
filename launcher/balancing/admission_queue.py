"""The queue of requests that no instance can start yet.

Bounds: by count, by bytes of bodies, by each ticket's deadline. Models share the first two equally, and so do the API
keys of one model: in a full queue a ticket displaces the last one of a larger share (`displaced`). One model or key may
fill the queue while no other needs it. Tickets that were on an instance before are not counted, and not displaced.

Each model has a queue of its own: instances of other
models cannot serve it. Order within a model: priority classes first (smaller first); within a class the API keys share
by start-time fair queueing (Goyal, Vin, Cheng 1996) over the requests' estimated cost, so that a key with a thousand
waiting requests does not delay one with two; within a key by `rank`, which the balancer sets: the time of arrival,
less a head start for small requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import Final

from launcher.balancing.upstreams import FIRST, Demand, Ticket, Upstream

# --- What the queue holds, in sums: prefill that waits for whichever instance is free first, or for a certain one;
# prompts.


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


MOST_KEYS: Final = 64  # whose shares one prediction looks at
MOST_DISPLACED: Final = 256  # by the bytes of one ticket: smaller ones than its 256th part stay
# Rank, ticket number (unique), ticket.
Entry = tuple[float, int, Ticket]
# Which bound is reached ("requests", "bytes"), and why that is so.
Refusal = tuple[str, str]


class Share:
    """Tickets of one model, or of one API key for it, as far as the bounds count them."""

    def __init__(self) -> None:
        self.requests: int = 0
        self.bytes: int = 0
        self.keys: dict[str | None, Share] = {}  # of a model

    def size(self, *, in_bytes: bool) -> int:
        return self.bytes if in_bytes else self.requests

    def add(self, ticket: Ticket, sign: int) -> None:
        self.requests += sign
        self.bytes += sign * ticket.demand.body_bytes


class Ends:
    """The tickets of each share that may be displaced, those that would start last first. `found` are displaced already."""

    def __init__(self, queue: AdmissionQueue, found: dict[Ticket, None], least_bytes: int) -> None:
        self._queue = queue
        self._found = found
        self._least_bytes = least_bytes
        self._rest: dict[tuple[str | None, str | None], Iterator[Ticket]] = {}
        self._next: dict[tuple[str | None, str | None], Ticket | None] = {}

    def last(self, model: str | None, key: str | None) -> Ticket | None:
        """The ticket of an API key for a model that would start last; None where none may leave. Each is looked at once."""
        share = (model, key)
        if share not in self._rest:
            self._rest[share] = self._queue.last_first(model, key, self._least_bytes)
            self._next[share] = next(self._rest[share], None)
        while (ticket := self._next[share]) is not None and ticket in self._found:
            self._next[share] = next(self._rest[share], None)
        return ticket


class KeyQueue:
    """Tickets of one API key in one class, ordered by rank."""

    def __init__(self) -> None:
        self.waiting: list[Entry] = []
        # The virtual time at which its share of what was started is used up.
        self.finish: float = 0.0
        self.cost: float = 0.0  # of all that wait
        self.work: QueuedWork = QueuedWork()


class PriorityClass:
    """Tickets for one model at one priority, which their API keys share."""

    def __init__(self) -> None:
        self.keys: dict[str | None, KeyQueue] = {}
        # Virtual time.
        self.virtual: float = 0.0
        self.count: int = 0
        self.work: QueuedWork = QueuedWork()
        self.prompts: QueuedPrompts = QueuedPrompts()


class AdmissionQueue:
    """Queued tickets. Counts and bytes are exact; it drops nothing by itself."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.count: int = 0
        self.bytes: int = 0
        # How many tickets share each cached block (Ticket.shared_block).
        self.sharing: dict[int | None, int] = {}
        # By model, by priority; none is empty.
        self._models: dict[str | None, dict[int, PriorityClass]] = {}
        self._deadlines: list[Entry] = []
        # What the bounds count: of all, and by model; none of these is empty.
        self._bounded: Share = Share()
        self._shares: dict[str | None, Share] = {}

    def refusal(self, body_bytes: int) -> Refusal | None:
        """Why there is no room for one more request of this size; None when there is."""
        if self._over(1, in_bytes=False):
            return "requests", f"{self.count} requests wait already"
        if self._over(body_bytes, in_bytes=True):
            return "bytes", f"{self.bytes} bytes of request bodies wait already"
        return None

    def displaced(self, demand: Demand) -> list[Ticket]:
        """The tickets that must leave a full queue for this one; [] where none of them has to, so that it is refused.

        The last ones of the model that has most, if that has more than its own even after the exchange, else those of
        the API key of its own model that has most.
        """
        found: dict[Ticket, None] = {}
        for in_bytes in (False, True):
            size = demand.body_bytes if in_bytes else 1
            ends = Ends(self, found, 1 + size // MOST_DISPLACED if in_bytes else 0)
            while self._over(size, in_bytes=in_bytes):
                ticket = self._to_displace(demand, size, ends, in_bytes=in_bytes)
                if ticket is None:
                    break
                found[ticket] = None
                self._share(ticket, -1)
        fits = self.refusal(demand.body_bytes) is None
        for ticket in found:
            self._share(ticket, 1)
        return list(found) if fits else []

    def _over(self, size: int, *, in_bytes: bool) -> bool:
        limit = self.max_bytes if in_bytes else self.max_requests
        return self._bounded.size(in_bytes=in_bytes) + size > limit

    def _to_displace(self, demand: Demand, size: int, ends: Ends, *, in_bytes: bool) -> Ticket | None:
        own = self._shares.get(demand.model)
        if (model := _largest(self._shares, in_bytes=in_bytes)) != demand.model:
            largest = self._shares.get(model)
            if largest is not None and (key := _largest(largest.keys, in_bytes=in_bytes)) in largest.keys:
                ticket = ends.last(model, key)
                if ticket is not None and _is_fair(own, size, largest, ticket, in_bytes=in_bytes):
                    return ticket
        if own is None or (key := _largest(own.keys, in_bytes=in_bytes)) == demand.key:
            return None
        ticket = ends.last(demand.model, key)
        fair = ticket is not None and _is_fair(
            own.keys.get(demand.key), size, own.keys[key], ticket, in_bytes=in_bytes
        )
        return ticket if fair else None

    def last_first(self, model: str | None, key: str | None, least_bytes: int) -> Iterator[Ticket]:
        """Tickets of an API key that may be displaced, those that would start last first."""
        classes = self._models.get(model, {})
        for priority in sorted(classes, reverse=True):
            queue = classes[priority].keys.get(key)
            for _, _, ticket in reversed(queue.waiting if queue is not None else []):
                if not ticket.begun and ticket.demand.body_bytes >= least_bytes:
                    yield ticket

    def _share(self, ticket: Ticket, sign: int) -> None:
        """Count it under the bounds, or no more (-1)."""
        if ticket.begun:
            return
        model, key = ticket.demand.model, ticket.demand.key
        of_model = self._shares.setdefault(model, Share())
        of_key = of_model.keys.setdefault(key, Share())
        for share in (self._bounded, of_model, of_key):
            share.add(ticket, sign)
        if not of_key.requests:
            del of_model.keys[key]
        if not of_model.requests:
            del self._shares[model]

    def add(self, ticket: Ticket) -> None:
        """Queue it. `ticket.rank` and `.cost` are set."""
        demand = ticket.demand
        classes = self._models.setdefault(demand.model, {})
        among = classes.get(demand.priority)
        if among is None:
            among = classes[demand.priority] = PriorityClass()
        queue = among.keys.get(demand.key)
        if queue is None:
            queue = among.keys[demand.key] = KeyQueue()
        among.count += 1
        among.work.add(ticket)
        among.prompts.add(demand.prefix)
        queue.work.add(ticket)
        queue.cost += ticket.cost
        insort(queue.waiting, (ticket.rank, ticket.number, ticket))
        heappush(self._deadlines, (ticket.deadline, ticket.number, ticket))
        ticket.queued = True
        self._share(ticket, 1)
        self.count += 1
        self.bytes += demand.body_bytes
        self.sharing[ticket.shared_block] = self.sharing.get(ticket.shared_block, 0) + 1

    def take(self, ticket: Ticket) -> None:
        """It was started: its key is charged."""
        demand = ticket.demand
        among = self._models[demand.model][demand.priority]
        queue = among.keys[demand.key]
        among.virtual = max(queue.finish, among.virtual)
        queue.finish = among.virtual + ticket.cost
        self._leave(ticket, among)

    def remove(self, ticket: Ticket) -> None:
        """It leaves the queue, and was not started."""
        demand = ticket.demand
        self._leave(ticket, self._models[demand.model][demand.priority])

    @staticmethod
    def wait_for(ticket: Ticket, upstream: Upstream | None) -> None:
        """It waits for just this instance; None: for whichever is free first."""
        if ticket.awaited is upstream:
            return
        if ticket.awaited is not None:
            ticket.awaited.load.expect_no_more(ticket.prefill_s)
        if upstream is not None:
            upstream.load.expect(ticket.prefill_s)
        ticket.awaited = upstream

    def models(self) -> list[str | None]:
        """Those that tickets wait for. None comes first: those requests are no work for an instance."""
        return sorted(self._models, key=lambda model: model is not None)

    def waiting(self, model: str | None) -> int:
        """How many tickets name this model; None: none."""
        return sum(among.count for among in self._models.get(model, {}).values())

    def ordered(self, model: str | None, *, takes_place: bool = False) -> Iterator[Ticket]:
        """All tickets for a model, in the order in which they would start. The queue must not change meanwhile.

        `takes_place`: without those that need no place, which come first."""
        classes = self._models.get(model, {})
        for priority in sorted(classes):
            if takes_place and priority == FIRST:
                continue
            among = classes[priority]
            if len(among.keys) == 1:
                for queue in among.keys.values():
                    for entry in queue.waiting:
                        yield entry[2]
            else:
                yield from self._merged(among)

    def ahead(self, ticket: Ticket, nearest: int) -> tuple[QueuedWork, list[Ticket]]:
        """What would start before a ticket that has its rank and is not queued: the last of its own key, and the others."""
        demand, ahead = ticket.demand, QueuedWork()
        last: list[Ticket] = []
        for priority, among in self._models.get(demand.model, {}).items():
            if priority < demand.priority:
                ahead.plus(among.work)
            elif priority == demand.priority:
                last = self._ahead_among(ticket, among, ahead, nearest)
        return ahead, last

    def shared_blocks(self, demand: Demand) -> int:
        """How many leading blocks of its prompt another one has that waits."""
        among = self._models.get(demand.model, {}).get(demand.priority)
        return 0 if among is None else among.prompts.match(demand.prefix)

    @staticmethod
    def _ahead_among(ticket: Ticket, among: PriorityClass, ahead: QueuedWork, nearest: int) -> list[Ticket]:
        """In its own class: all of its own key but those it passes, and of the other keys their fair share till then."""
        own = among.keys.get(ticket.demand.key)
        tag, last = among.virtual, []
        if own is not None:
            tag = max(own.finish, among.virtual) + own.cost
            ahead.plus(own.work)
            end = bisect_left(own.waiting, (ticket.rank, ticket.number))
            for _, _, passed in own.waiting[end:]:
                ahead.add(passed, -1)
                tag -= passed.cost
            last = [entry[2] for entry in own.waiting[max(0, end - nearest) : end]]
            for other in last:
                ahead.add(other, -1)
        others = len(among.keys) - (own is not None)
        if others:
            # Of very many keys some stand for all.
            scale = max(1.0, others / MOST_KEYS)
            for queue in islice(among.keys.values(), MOST_KEYS):
                share = tag - max(queue.finish, among.virtual)
                if queue is not own and queue.cost > 0.0 and share > 0.0:
                    ahead.plus(queue.work, scale * min(1.0, share / queue.cost))
        return last

    def expired(self, now: float) -> list[Ticket]:
        """Remove those whose deadline has come, the earliest first."""
        late: list[Ticket] = []
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or not deadlines[0][2].queued):
            ticket = heappop(deadlines)[2]
            if ticket.queued and ticket.deadline <= now:  # else it was queued again, with another deadline
                self.remove(ticket)
                late.append(ticket)
        return late

    def extend(self, seconds: float) -> None:
        """All that wait may wait so much longer."""
        # Once each: one that was queued again is there twice.
        tickets = {ticket.number: ticket for _, _, ticket in self._deadlines if ticket.queued}.values()
        for ticket in tickets:
            ticket.deadline += seconds
        self._deadlines = [(ticket.deadline, ticket.number, ticket) for ticket in tickets]
        heapify(self._deadlines)

    def next_deadline(self) -> float | None:
        """When the next ticket expires, or earlier."""
        return self._deadlines[0][0] if self._deadlines else None

    @staticmethod
    def _merged(among: PriorityClass) -> Iterator[Ticket]:
        """Start-time fair queueing, played forward: next is always the key whose share is used up first."""
        heads = [
            (max(queue.finish, among.virtual), queue.waiting[0][1], 0, queue.waiting)
            for queue in among.keys.values()
            if queue.waiting
        ]
        heapify(heads)
        while heads:
            finish, _, at, waiting = heads[0]
            ticket = waiting[at][2]
            yield ticket
            at += 1
            if at < len(waiting):
                heapreplace(heads, (finish + ticket.cost, waiting[at][1], at, waiting))
            else:
                heappop(heads)

    def _leave(self, ticket: Ticket, among: PriorityClass) -> None:
        demand = ticket.demand
        queue = among.keys[demand.key]
        waiting = queue.waiting
        del waiting[bisect_left(waiting, (ticket.rank, ticket.number))]
        among.work.add(ticket, -1)
        among.prompts.remove(demand.prefix)
        queue.work.add(ticket, -1)
        queue.cost = queue.cost - ticket.cost if waiting else 0.0
        ticket.queued = False
        self.wait_for(ticket, None)
        self._share(ticket, -1)
        self.count -= 1
        self.bytes -= demand.body_bytes
        left = self.sharing[ticket.shared_block] - 1
        if left:
            self.sharing[ticket.shared_block] = left
        else:
            del self.sharing[ticket.shared_block]
        among.count -= 1
        if not among.count:  # nothing waits: all shares start again
            classes = self._models[demand.model]
            del classes[demand.priority]
            if not classes:
                del self._models[demand.model]
        if len(self._deadlines) > 2 * self.count + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].queued]
            heapify(self._deadlines)


def _largest(shares: dict[str | None, Share], *, in_bytes: bool) -> str | None:
    """The name of the largest share."""
    largest, most = None, -1
    for name, share in shares.items():
        size = share.size(in_bytes=in_bytes)
        if size > most:
            largest, most = name, size
    return largest


def _is_fair(own: Share | None, size: int, other: Share, ticket: Ticket, *, in_bytes: bool) -> bool:
    """Whether a share is no larger than another one if it gets `size`, and the other one loses the ticket."""
    before = 0 if own is None else own.size(in_bytes=in_bytes)
    lost = ticket.demand.body_bytes if in_bytes else 1
    return before + size <= other.size(in_bytes=in_bytes) - lost
