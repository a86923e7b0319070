"""The queue of requests that no instance can start yet.

Bounds: by count, by bytes of bodies, by each ticket's deadline. Each model has a queue of its own: instances of other
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

from launcher.proxy.balancing.demand import Demand
from launcher.proxy.balancing.queued_work import QueuedPrompts, QueuedWork
from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.balancing.upstreams import Upstream

MOST_KEYS: Final = 64  # whose shares one prediction looks at
# Rank, ticket number (unique), ticket.
Entry = tuple[float, int, Ticket]


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
    """Queued tickets. Counts and bytes are exact; it drops nothing."""

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

    def refusal(self, body_bytes: int) -> str | None:
        """Why one more request of this size cannot be queued; None when it can."""
        if self.count >= self.max_requests:
            return f"{self.count} requests wait already"
        if self.bytes + body_bytes > self.max_bytes:
            return f"{self.bytes} bytes of request bodies wait already"
        return None

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

    def ordered(self, model: str | None) -> Iterator[Ticket]:
        """All tickets for a model, in the order in which they would start. The queue must not change meanwhile."""
        classes = self._models.get(model, {})
        for priority in sorted(classes):
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
