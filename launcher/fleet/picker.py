"""The choice of host and instance for each request of the fleet: one balancer over the instances of all hosts.

Pure: `now` is the caller's clock, seconds. A request is held until an instance can start it, as one daemon with all these
instances would hold it, but for HOLD_S at most: then it waits in its host's queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import exp
from typing import Final, NamedTuple

from msgspec import Struct, field

from launcher.balancing.balancer import Balancer
from launcher.balancing.cells import Cell, Cells
from launcher.balancing.cost_model import TOKEN_S
from launcher.balancing.upstreams import Demand, Ending, FullError, InstanceId, Ticket, Upstream
from launcher.base.address import TcpAddress
from launcher.config.schema import Policy
from launcher.fleet.loads import HostLoad, InstanceLoad
from launcher.proxy.request.beginning import Asked

HOLD_S: Final = 1.0
# Reports in a row with fewer requests than are believed to be on a host: that many ends were never told.
REPORTS: Final = 5
UNAVAILABLE: Final = 503  # status of a daemon without a ready instance
EJECT_S: Final = 2.0  # a host's own reports say within a second what is ready
# What these two save of the decisions' cost, and what they change: docs/fleet.md, "Balancing across hosts".
ASK_AGAIN_S: Final = 0.1
RECENT_S: Final = 60.0  # a request counts e times less for its host's share so long after it was bound
PAUSE_S: Final = 0.005  # between two turns of one balancer, which binds 10 ms ahead (CostModel.horizon_s)


class Choice(NamedTuple):
    host: str
    slot: int


class Host(Struct, eq=False):
    name: str
    draining: bool = False
    cell: Cell | None = None  # None: until its first report
    lost: bool = True  # until its first report
    load: HostLoad | None = None
    instances: dict[tuple[int, int], Upstream] = field(default_factory=dict)  # by slot and generation
    names: dict[str, str] = field(default_factory=dict)  # that requests may use -> model
    bound: dict[str, Request] = field(default_factory=dict)  # by id, oldest first
    # Requests believed to be there beyond those that it reports, at its last reports.
    beyond: deque[int] = field(default_factory=lambda: deque(maxlen=REPORTS))
    recent: float = 0.0  # requests bound to it, as they counted at `counted_at`
    counted_at: float = 0.0

    def count(self, now: float, requests: int = 0) -> float:
        """`recent` now, with so many more."""
        self.recent = self.recent * exp(min(0.0, self.counted_at - now) / RECENT_S) + requests
        self.counted_at = now
        return self.recent


class Request(Struct, eq=False):
    id: str
    ticket: Ticket
    cell: Cell
    model: str
    host: Host | None = None  # None: it is held
    late: bool = False  # bound after HOLD_S: its first byte may be a comment of its host's queue


class Picker:
    def __init__(self, random: Callable[[int], int]) -> None:
        """`random(n)`: a number below n, to choose among equals."""
        self._random = random
        self._cells = Cells(
            lambda: Balancer(Policy.PREFIX_AWARE, random, eject_s=EJECT_S, ask_again_s=ASK_AGAIN_S)
        )
        self._changed: dict[Cell, None] = {}  # where something may start since the last turn
        self._upstreams = 0  # that there were so far: an instance's number at its balancer
        self._hosts: dict[str, Host] = {}
        self._where: dict[int, tuple[Host, int]] = {}  # an instance's number at the balancer -> host and slot
        self._names: dict[str, str] = {}  # of all hosts
        self._requests: dict[str, Request] = {}
        self._held: dict[Ticket, Request] = {}

    # --- hosts -------------------------------------------------------------------------------------

    def serve(self, hosts: Mapping[str, bool], now: float) -> None:
        """All hosts; True: it drains."""
        for name in self._hosts.keys() - hosts.keys():
            host = self._hosts.pop(name)
            for key in tuple(host.instances):
                self._remove(host, key)
            for id_ in tuple(host.bound):
                self._release(id_, now, Ending.LEFT)
        for name, draining in hosts.items():
            host = self._hosts.setdefault(name, Host(name))
            host.draining = draining
            self._open(host)
        self._gather_names()

    def report(self, name: str, load: HostLoad, now: float) -> None:
        """What a host says of itself: its instances, and their requests, of which some may not be the fleet's."""
        if (host := self._hosts.get(name)) is None:
            return
        host.load, host.lost = load, False
        self._forget_ended(host, load, now)
        cell = self._cell(host)
        found = {(instance.slot, instance.generation): instance for instance in load.instances}
        for key in host.instances.keys() - found.keys():
            self._remove(host, key)
        # A host may use another slot than was wished: its slots are right in sum only.
        foreign = max(0, load.running + load.waiting - len(host.bound))
        for key, said in found.items():
            upstream = host.instances.get(key) or self._add(host, key, said)
            beyond = max(0, min(foreign, said.running + said.waiting - upstream.in_flight))
            foreign -= beyond
            running = upstream.in_flight + beyond - said.waiting
            cell.balancer.reconcile(upstream, running, said.waiting, said.kv_usage, said.kv_tokens)
        names = {name: i.model for i in load.instances for name in _names(load, i.model)}
        if names != host.names:
            host.names = names
            self._gather_names()
        self._open(host)

    def _gather_names(self) -> None:
        self._names = {name: model for host in self._hosts.values() for name, model in host.names.items()}

    def lost(self, name: str) -> None:
        """It does not answer: no new requests. What it has cached is still believed when it answers again."""
        if (host := self._hosts.get(name)) is not None:
            host.lost = True
            self._open(host)

    def _forget_ended(self, host: Host, load: HostLoad, now: float) -> None:
        """An end that was not told (a datagram lost, HAProxy killed) must not count for ever."""
        host.beyond.append(len(host.bound) - load.running - load.waiting)
        if len(host.beyond) == REPORTS and (surely := min(host.beyond)) > 0:
            for id_ in tuple(islice(host.bound, surely)):
                self._release(id_, now, Ending.LEFT)
            host.beyond.clear()

    def _add(self, host: Host, key: tuple[int, int], said: InstanceLoad) -> Upstream:
        self._upstreams += 1
        where = TcpAddress(host.name, said.slot)
        upstream = Upstream(
            self._upstreams, 1, said.model, where, said.concurrency_limit, kv_tokens=said.kv_tokens
        )
        host.instances[key] = upstream
        self._where[upstream.slot] = (host, said.slot)
        cell = self._cell(host)
        cell.balancer.add(upstream)
        cell.resize()
        return upstream

    def _remove(self, host: Host, key: tuple[int, int]) -> None:
        upstream = host.instances.pop(key)
        del self._where[upstream.slot]
        self._cell(host).balancer.table.remove(*upstream.key, "gone")

    def _open(self, host: Host) -> None:
        """New requests for its ready instances, if it may have any."""
        instances = () if host.load is None or host.lost or host.draining else host.load.instances
        ready = {(each.slot, each.generation) for each in instances if each.ready}
        cell = self._cell(host) if host.instances else None
        for key, upstream in host.instances.items():
            if cell is None or (key in ready) is not upstream.draining:
                continue
            if upstream.draining:
                cell.balancer.add(upstream)
            else:
                cell.balancer.table.drain(*upstream.key)
        if cell is not None:
            self._changed[cell] = None

    def _cell(self, host: Host) -> Cell:
        """Chosen when it has told how many instances it has."""
        if host.cell is None:
            host.cell = self._cells.place(len(host.load.instances) if host.load else 0)
        return host.cell

    # --- requests ----------------------------------------------------------------------------------

    def offer(self, asked: Asked, now: float) -> Choice | None:
        """Its instance. None: it is held, if `holds` says so, else no instance is known to serve it."""
        if (model := self._model(asked.model)) is None or asked.id in self._requests:
            return None
        tried: set[InstanceId] = set()
        if asked.model not in (None, model):
            without = (host for host in self._hosts.values() if asked.model not in host.names)
            tried = {upstream.key for host in without for upstream in host.instances.values()}
        if (cell := self._cells.choose(model, asked.prefix, tried)) is None:
            return None
        balancer = cell.balancer
        if not asked.takes_place:
            return self._anywhere(balancer.table.candidates(model, None, tried))
        demand = Demand(
            model,
            balancer.prompt_tokens(asked.prompt_bytes) if asked.prompt_bytes else 0,
            balancer.output_tokens(asked.max_tokens, asked.choices),
            asked.prefix,
            key=asked.key,
            max_tokens=asked.max_tokens,
            stream=asked.stream,
        )
        ticket = Ticket(demand, now, now + HOLD_S)
        ticket.tried = tried
        request = self._requests[asked.id] = Request(asked.id, ticket, cell, model)
        cell.count(model, 1)
        self._changed[cell] = None
        try:
            balancer.offer(ticket, now)
        except FullError:
            return self._bind_late(request, now)
        if ticket.upstream is None:
            self._held[ticket] = request
            return None
        return self._bound(request, ticket.upstream, now)

    def _anywhere(self, candidates: Sequence[Upstream]) -> Choice | None:
        """An instance for a request that takes no place: it is neither held nor followed."""
        usable = [upstream for upstream in candidates if not upstream.outliers.out] or candidates
        if not usable:
            return None
        host, slot = self._where[usable[self._random(len(usable))].slot]
        return Choice(host.name, slot)

    def holds(self, id_: str) -> bool:
        request = self._requests.get(id_)
        return request is not None and request.host is None

    def turn(self, now: float) -> list[tuple[str, Choice | None]]:
        """What becomes of requests that were held. To be called when anything has changed, and at `next_turn`."""
        due = [cell for cell in self._cells if cell.pump_at is not None and cell.pump_at <= now]
        changed, self._changed = self._changed | dict.fromkeys(due), {}
        decided: list[tuple[str, Choice | None]] = []
        for cell in changed:
            if now < cell.pumped_at + PAUSE_S:
                self._changed[cell] = None
                continue
            balancer = cell.balancer
            for ticket in balancer.pump(now):
                request = self._held.pop(ticket)
                decided.append((request.id, self._bound(request, ticket.upstream, now)))
            displaced = [ticket for ticket, _ in balancer.displaced() if ticket in self._held]
            for ticket in (*displaced, *balancer.queue.expired(now)):
                request = self._held.pop(ticket)
                decided.append((request.id, self._bind_late(request, now)))
            cell.pumped_at, cell.pump_at = now, balancer.next_pump(now)
        return decided

    def next_turn(self, now: float) -> float | None:
        """When `turn` is due, if nothing happens until then. None: not before something does."""
        times = [max(now, cell.pumped_at + PAUSE_S) for cell in self._changed if cell.balancer.queue.count]
        times += [
            cell.pump_at for cell in self._cells if cell.pump_at is not None and cell not in self._changed
        ]
        return min(times, default=None)

    def first(self, id_: str, status: int, now: float) -> None:
        """The head of its response has come: a daemon sends it with the first token."""
        request = self._requests.get(id_)
        if request is not None and status < 400 and not request.late:
            request.cell.balancer.first_token(request.ticket, now)
            self._changed[request.cell] = None

    def ended(self, id_: str, status: int, termination: str, now: float, *, sent: bool = True) -> None:
        """It has left HAProxy; `termination`: how (%ts in its manual). Not `sent`: HAProxy had no server for it."""
        if (request := self._requests.get(id_)) is None:
            return
        upstream = request.ticket.upstream
        if request.host is None or upstream is None or not sent or termination[:1] in {"C", "c"}:
            self._release(id_, now, Ending.LEFT)
        elif status < 500 and termination[:1] == "-":
            self._release(id_, now, Ending.WHOLE if status < 400 else Ending.REFUSED)
        else:
            self._release(id_, now, Ending.BROKEN)
            # Other errors are whole answers of a daemon that has tried its instances: the request itself may be at fault.
            if termination[:1] == "-" and status != UNAVAILABLE:
                return
            # The last instance that is not ejected stays: with none there would be nothing to fail on.
            balancer = request.cell.balancer
            others = (u for u in balancer.table.of(upstream.model) if u is not upstream)
            if not all(u.outliers.out for u in others):
                balancer.failed(upstream, now)

    def _model(self, name: str | None) -> str | None:
        if name is not None:
            return self._names.get(name)
        models = set(self._names.values())  # its name is behind a long prompt: clear where there is but one
        return models.pop() if len(models) == 1 else None

    def _bind_late(self, request: Request, now: float) -> Choice | None:
        request.late = True
        return self._bound(request, request.cell.balancer.bind_soonest(request.ticket, now), now)

    def _bound(self, request: Request, upstream: Upstream | None, now: float) -> Choice | None:
        if upstream is None:
            del self._requests[request.id]
            request.cell.count(request.model, -1)
            return None
        request.host, slot = self._where[upstream.slot]
        request.host.bound[request.id] = request
        request.host.count(now, 1)
        return Choice(request.host.name, slot)

    def _release(self, id_: str, now: float, ending: Ending) -> None:
        request = self._requests.pop(id_)
        ticket, balancer = request.ticket, request.cell.balancer
        request.cell.count(request.model, -1)
        self._changed[request.cell] = None
        if request.host is None:
            del self._held[ticket]
            balancer.withdraw(ticket)
            return
        del request.host.bound[id_]
        if ticket.first_token_at is not None:
            # Its tokens are not seen here: only the time that they take matters.
            balancer.progress(ticket, round((now - ticket.first_token_at) / TOKEN_S))
        balancer.release(ticket, now, ending)

    # --- what is shown -----------------------------------------------------------------------------

    @property
    def held(self) -> int:
        return len(self._held)

    def notes(self) -> list[str]:
        """Lines for the log since the last call: ejections, stragglers."""
        found = []
        for note in (note for cell in self._cells for note in cell.balancer.notes()):
            number, _, what = note.removeprefix("slot ").partition(": ")
            if (where := self._where.get(int(number))) is not None:
                found.append(f"host {where[0].name}: slot {where[1]}: {what}")
        return found

    def status(self) -> dict[str, dict[str, object]]:
        """By host."""
        return {name: _status(host) for name, host in self._hosts.items()}

    def shares(self, now: float) -> dict[str, float]:
        """Of the requests of about the last minute, by host; {} where there were none."""
        counts = {name: host.count(now) for name, host in self._hosts.items()}
        total = sum(counts.values())
        return {name: round(count / total, 4) for name, count in counts.items()} if total >= 1 else {}


def _names(load: HostLoad, model: str) -> tuple[str, ...]:
    known = load.models.get(model)
    return (model, *known.aliases, *known.adapters) if known else (model,)


def _status(host: Host) -> dict[str, object]:
    shown: dict[str, object] = {"draining": host.draining, "lost": host.lost, "sent": len(host.bound)}
    if (load := host.load) is not None:
        uses = [each.kv_usage for each in load.instances if each.kv_usage is not None]
        shown |= {
            "ready": sum(each.ready for each in load.instances), "instances": len(load.instances),
            "running": load.running, "waiting": load.waiting, "predicted_ttft_s": load.predicted_ttft_s,
            "kv_usage": sum(uses) / len(uses) if uses else None,
            # Requests of others that take places there, as far as they are believed: two reports in a row had them.
            "foreign": sum(upstream.load.surplus for upstream in host.instances.values()),
        }  # fmt: skip
    slow = (slot for (slot, _), upstream in host.instances.items() if upstream.outliers.straggler)
    return shown | {"stragglers": sorted(slow)}
