"""The queue of requests that no instance can start yet.

Bounds: by count, by bytes of bodies, by each ticket's deadline. Each model has a line of its own: others'
instances are no use to it. Order in a line: priority classes first (smaller first); within a class the API
keys share by start-time fair queueing (Goyal, Vin, Cheng 1996) over the requests' estimated cost, so that a
key with a thousand waiting requests does not delay one with two; within a key by `rank`, which the scheduler
gives: the time of arrival, less a head start for small requests.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace

from launcher.proxy.balancing.demand import Ticket
from launcher.proxy.balancing.upstreams import Upstream

Place = tuple[float, int, Ticket]  # rank, number of arrival (unique), ticket


def _names_one(model: str | None) -> bool:
    return model is not None


class Lane:
    """What waits of one key in one class, in the order of rank."""

    __slots__ = ("finish", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Place] = []
        self.finish = 0.0  # virtual time at which its share of what was started is used up


class Class:
    """What waits for one model at one priority: its keys share."""

    __slots__ = ("count", "lanes", "virtual")

    def __init__(self) -> None:
        self.lanes: dict[str | None, Lane] = {}
        self.virtual = 0.0  # virtual time
        self.count = 0


class AdmissionQueue:
    """Tickets that wait. Counts and bytes are exact; nothing is ever dropped by it."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests = max_requests
        self.max_bytes = max_bytes
        self.count = 0
        self.bytes = 0
        self.families: dict[int | None, int] = {}  # how many wait of each
        self._lines: dict[str | None, dict[int, Class]] = {}  # by model, by priority; none is empty
        self._deadlines: list[tuple[float, int, Ticket]] = []

    def __len__(self) -> int:
        return self.count

    def refusal(self, body_bytes: int) -> str | None:
        """Why one more of this size can't wait; None when it can."""
        if self.count >= self.max_requests:
            return f"{self.count} requests wait already"
        if self.bytes + body_bytes > self.max_bytes:
            return f"{self.bytes} bytes of request bodies wait already"
        return None

    def add(self, ticket: Ticket) -> None:
        """It waits, `ticket.rank` and `.cost` being set."""
        demand = ticket.demand
        line = self._lines.setdefault(demand.model, {})
        among = line.get(demand.priority)
        if among is None:
            among = line[demand.priority] = Class()
        lane = among.lanes.get(demand.key)
        if lane is None:
            lane = among.lanes[demand.key] = Lane()
        among.count += 1
        insort(lane.waiting, (ticket.rank, ticket.number, ticket))
        heappush(self._deadlines, (ticket.deadline, ticket.number, ticket))
        ticket.waits = True
        self.count += 1
        self.bytes += demand.body_bytes
        self.families[ticket.family] = self.families.get(ticket.family, 0) + 1

    def take(self, ticket: Ticket) -> None:
        """It is started: its key is charged."""
        demand = ticket.demand
        among = self._lines[demand.model][demand.priority]
        lane = among.lanes[demand.key]
        among.virtual = max(lane.finish, among.virtual)
        lane.finish = among.virtual + ticket.cost
        self._leave(ticket, among)

    @staticmethod
    def wait_for(ticket: Ticket, home: Upstream | None) -> None:
        """It waits for just this instance; None: for whichever is free first."""
        if ticket.home is home:
            return
        if ticket.home is not None:
            ticket.home.ledger.expect_no_more(ticket.work_s)
        if home is not None:
            home.ledger.expect(ticket.work_s)
        ticket.home = home

    def remove(self, ticket: Ticket) -> None:
        """It waits no longer, and was not started."""
        demand = ticket.demand
        self._leave(ticket, self._lines[demand.model][demand.priority])

    def models(self) -> list[str | None]:
        """Those that somebody waits for. What asks for none comes first: to an instance it is no work."""
        return sorted(self._lines, key=_names_one)

    def ordered(self, model: str | None) -> Iterator[Ticket]:
        """All that wait for a model, in the order in which they would start. The queue must not change meanwhile."""
        line = self._lines.get(model, {})
        for priority in sorted(line):
            among = line[priority]
            if len(among.lanes) == 1:
                for lane in among.lanes.values():
                    for place in lane.waiting:
                        yield place[2]
            else:
                yield from self._merged(among)

    def expired(self, now: float) -> list[Ticket]:
        """Take out those whose deadline has come, the earliest first."""
        gone = []
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or not deadlines[0][2].waits):
            ticket = heappop(deadlines)[2]
            if ticket.waits:
                self.remove(ticket)
                gone.append(ticket)
        return gone

    def next_deadline(self) -> float | None:
        """When the next one expires, or earlier."""
        return self._deadlines[0][0] if self._deadlines else None

    @staticmethod
    def _merged(among: Class) -> Iterator[Ticket]:
        """Start-time fair queueing, played forward: always the lane whose share is used up first."""
        heads = [
            (max(lane.finish, among.virtual), lane.waiting[0][1], 0, lane.waiting)
            for lane in among.lanes.values()
            if lane.waiting
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

    def _leave(self, ticket: Ticket, among: Class) -> None:
        demand = ticket.demand
        waiting = among.lanes[demand.key].waiting
        del waiting[bisect_left(waiting, (ticket.rank, ticket.number))]
        ticket.waits = False
        self.wait_for(ticket, None)
        self.count -= 1
        self.bytes -= demand.body_bytes
        left = self.families[ticket.family] - 1
        if left:
            self.families[ticket.family] = left
        else:
            del self.families[ticket.family]
        among.count -= 1
        if not among.count:  # nobody waits: all shares begin anew
            line = self._lines[demand.model]
            del line[demand.priority]
            if not line:
                del self._lines[demand.model]
        if len(self._deadlines) > 2 * self.count + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].waits]
            heapify(self._deadlines)
