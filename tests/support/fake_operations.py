"""A daemon that only remembers what it was asked: for the control server, its client and the command line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from msgspec.structs import replace

from launcher.accounts.budgets import BudgetState
from launcher.accounts.cost import CostNow, CostReport, spent
from launcher.accounts.report_values import UsageReport, UsageRequests, UsageToday
from launcher.accounts.spending import Report, read_report
from launcher.accounts.timeline import Timeline
from launcher.accounts.usage_report import latest_requests, report
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, NotFoundError, RefusedError
from launcher.base.redaction import Redactor
from launcher.config.schema import Cost
from launcher.control.messages import Request, SlotCommand
from launcher.control.server import ControlServer
from launcher.daemon.machine import Disk, MachineStatus, NodeUse, SlotPlaces
from launcher.daemon.measured import Measurement
from launcher.daemon.status import SlotStatus, Status, Zentorch
from launcher.daemon.usage_reports import question_of
from launcher.engines.causes import Cause, Retry
from launcher.instances.verify import Verification
from launcher.machine.named import find_topology
from launcher.machine.topology import Topology
from launcher.machine.topology_text import layout_json
from launcher.proxy.readings import KeyTotals, QueueState, TokenTotals
from launcher.telemetry.quantiles import Quantiles


def slot_status(slot: int = 0, **more: Any) -> SlotStatus:
    """A ready slot; keywords replace fields."""
    fields: dict[str, Any] = {
        "slot": slot, "model": "m", "state": "ready", "phase": "", "intent": "run", "since": 100.0, "pid": 4242,
        "generation": 1, "restarts": 0, "in_flight": 0, "socket": 0, "node": 0, "cpus": "0-3", "omp_cpus": "0-2",
        "membind": "0", "kv_cache_bytes": 1 << 30, "address": "unix:/run/slot0-1.sock", "responsive": True,
        "next_start": None, "last_cause": None, "verified": None, "zentorch": Zentorch(found=None, active=None),
    }  # fmt: skip
    return SlotStatus(**(fields | more))


VERIFIED = Verification(
    bound_cpus="",
    node_bytes={},
    processes=2,
    threads=9,
    cpus="0-3",
    policies=("bind:0",),
    bound_share=1.0,
    libraries=(),
    differences=(),
    foreign=(),
)
CAUSE = Cause("oom", "it died", "buy memory", Retry.BACKOFF, ("last words",))


def machine_load(topology: Topology, slots: Sequence[SlotStatus] = ()) -> MachineStatus:
    """A machine at work: even cpus busy, a quarter of each node's memory in weights, a quarter in KV cache."""
    nodes = tuple(
        NodeUse(
            node=node.id, total_bytes=node.memory_bytes, free_bytes=node.memory_bytes - node.memory_bytes // 8 * 5,
            weights_bytes=node.memory_bytes // 4, kv_cache_bytes=node.memory_bytes // 4, foreign_bytes=0,
            other_bytes=node.memory_bytes // 8 * 5 - node.memory_bytes // 4 * 2,
        )
        for node in topology.numa_nodes
    )  # fmt: skip
    return MachineStatus(
        time=100.0, busy=[0.9 if cpu % 2 == 0 else 0.1 for cpu in range(len(topology.online))], nodes=nodes,
        slots=tuple(
            SlotPlaces(
                slot=slot.slot, node_bytes={str(slot.node): 1 << 30}, off_node_bytes=0, misplaced=(), misplaced_threads=0
            )
            for slot in slots
        ),
        drift=(), disks=(Disk(path="/var/lib/numa-launcher", free_bytes=1 << 38, total_bytes=1 << 40),),
    )  # fmt: skip


@dataclass
class FakeOperations:
    """Implements Operations. `after` holds what a slot becomes, one entry per later look at the status."""

    slots: dict[int, SlotStatus] = field(default_factory=lambda: {0: slot_status(0), 1: slot_status(1)})
    after: list[dict[str, Any]] = field(default_factory=list)
    asked: list[tuple[int, SlotCommand]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    refused: bool = False
    reloads: list[tuple[list[str], bool, bool]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=lambda: [{"stage": "none"}])
    held: list[BudgetState] = field(default_factory=list)
    """Budgets of API keys."""
    told: list[Report] = field(default_factory=list)
    """What was spent on other hosts."""
    verified: list[int] = field(default_factory=list)
    histories: list[tuple[str, int, str]] = field(default_factory=list)
    """What was asked of the history."""
    lines: list[str] = field(default_factory=lambda: ["one", "two", "three"])
    more: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    following: int = 0
    """Feeds that are open."""
    fed: int = 0
    """Feeds that were begun."""
    printed_at: float = 0.0
    """Of every line."""

    machine_name: str = "epyc-9755-2p"
    """Of /v1/topology: a built-in machine, or a description of one."""
    queue: QueueState = field(
        default_factory=lambda: QueueState(
            requests=0, bytes=0, oldest_s=None, limit_requests=64, limit_bytes=1 << 20
        )
    )
    measured: list[Measurement] = field(default_factory=list)
    load: MachineStatus | None = None
    """Of /v1/machine; None: every second cpu is busy, and memory is as planned."""

    timelines: dict[str, Timeline] = field(default_factory=dict)
    ledger: Path | None = None
    now: float = 0.0
    prices: Cost = field(default_factory=lambda: Cost(hourly=0.79))
    cost_now: CostNow | None = None
    today: UsageToday | None = None
    endpoint: str = "http://127.0.0.1:8000"

    def status(self) -> Status:
        if self.after and self.asked:
            slot = self.asked[-1][0]
            self.slots[slot] = replace(self.slots[slot], **self.after.pop(0))
        return Status(
            slots=tuple(self.slots.values()),
            ready=sum(slot.state == "ready" for slot in self.slots.values()),
            endpoint=self.endpoint, version="0", build="python", pid=1, since=0.0, binding="membind",
            stack={"vllm": "0.32.0", "torch": "2.13.0", "zentorch": None, "tcmalloc": "/lib/tcmalloc.so"},
            requests={"accepted": 3, "completed": 2, "in_flight": 1}, warnings=("mind the gap",),
            cost=self.cost_now, queue=self.queue, first_token=Quantiles(p50_s=0.21, p99_s=0.9, count=12),
            tokens=TokenTotals(prompt=1200, cached=300, output=900),
            tokens_by_model={"m": TokenTotals(prompt=1200, cached=300, output=900)},
            keys={"ann": KeyTotals(accepted=3, in_flight=1, tokens=2100, prompt_tokens=1200, output_tokens=900)},
        )  # fmt: skip

    def _known(self, slot: int) -> None:
        if slot not in self.slots:
            raise NotFoundError(f"cannot use slot '{slot}': no such slot", "slots are 0, 1")

    def act(self, slot: int, request: Request) -> None:
        self._known(slot)
        if self.refused and not request.force:
            raise RefusedError(f"cannot {request.command} slot '{slot}': too few are left", "add --force")
        self.asked.append((slot, request.command))
        self.requests.append(request)

    async def reload(
        self, overrides: Sequence[str], *, dry_run: bool = False, force: bool = False
    ) -> dict[str, Any]:
        if self.refused:
            raise RefusedError("cannot reload: another reload is running", "wait")
        self.reloads.append((list(overrides), dry_run, force))
        return self.reloading() | ({"stage": "dry run"} if dry_run else {})

    def reloading(self) -> dict[str, Any]:
        return self.rollouts.pop(0) if len(self.rollouts) > 1 else self.rollouts[0]

    def events(self, count: int, after: int) -> list[dict[str, Any]]:
        event = {"time": 1.0, "level": "info", "logger": "launcher.daemon.main", "fields": {}}
        return [{**event, "number": n, "message": f"event {n}"} for n in range(after + 1, after + count + 1)][
            :3
        ]

    async def history(self, span: str, after: int, slots: str) -> bytes:
        self.histories.append((span, after, slots))
        rows = b"[[2000,1.5]]" if after < 2000 else b"[]"
        return b'{"span":"%s","step_ms":2000,"newest":2000,"columns":["requests_per_s"],"rows":%s}' % (
            span.encode(),
            rows,
        )

    def plan(self) -> dict[str, Any]:
        return {"slots": []}

    def topology(self) -> dict[str, Any]:
        return layout_json(find_topology(self.machine_name), CpuSet.parse("0"))

    async def machine(self) -> MachineStatus:
        return self.load or machine_load(find_topology(self.machine_name), tuple(self.slots.values()))

    async def measurements(self) -> list[Measurement]:
        return self.measured

    def config(self) -> dict[str, Any]:
        return {"engine": {"env": {"X_TOKEN": "<redacted>"}}}

    async def metrics(self) -> str:
        return "# HELP a_total x\na_total 1\n"

    async def usage_today(self) -> UsageToday | None:
        return self.today

    def budgets(self) -> list[BudgetState]:
        return self.held

    def spent_elsewhere(self, body: bytes) -> dict[str, int | list[str]]:
        self.told.append(read_report(body))
        return {"taken": len(self.told[-1].spent), "ignored": []}

    async def usage(self, asked: Mapping[str, str]) -> UsageReport:
        return report(self._ledger(), question_of(asked), self.now, "USD")

    async def usage_requests(self, asked: Mapping[str, str], limit: int) -> UsageRequests:
        return latest_requests(self._ledger(), question_of(asked), limit, self.now, "USD")

    async def request(self, request_id: str) -> Timeline:
        if request_id not in self.timelines:
            raise NotFoundError(f"cannot show request '{request_id}': unknown", "give another id")
        return self.timelines[request_id]

    async def cost(self, since: str) -> CostReport:
        return spent(self._ledger(), self.prices, since, self.now)

    def _ledger(self) -> Path:
        if self.ledger is None:
            raise LauncherError("cannot report usage: the ledger is off", "set enabled = true")
        return self.ledger

    async def redactor(self) -> Redactor:
        return Redactor(["three"])

    def log_tail(self, slot: int, lines: int) -> list[dict[str, Any]]:
        self._known(slot)
        return [self._line(text) for text in self.lines[-lines:]] if lines else []

    def log_follow(self, slot: int, lines: int) -> AsyncGenerator[dict[str, Any], None]:
        return self._feed(self.log_tail(slot, lines))

    async def _feed(self, first: list[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:
        self.following += 1
        self.fed += 1
        try:
            for line in first:
                yield line
            while True:
                yield self._line(await self.more.get())
        finally:
            self.following -= 1

    def _line(self, text: str) -> dict[str, Any]:
        return {"time": self.printed_at, "generation": 1, "text": text}

    async def verify(self, slot: int) -> None:
        self._known(slot)
        self.verified.append(slot)
        self.slots[slot] = replace(self.slots[slot], verified=VERIFIED)


class Backstage:
    """A real ControlServer in a thread of its own, for callers that block."""

    def __init__(self, path: str, operations: FakeOperations) -> None:
        self.path = path
        self.operations = operations
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="control server")

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self.operations.more = asyncio.Queue()
        server = ControlServer(self.path, None, self.operations)
        await server.start()
        self._ready.set()
        await self._over.wait()
        await server.stop()

    def say(self, text: str) -> None:
        """An instance prints a line."""
        self._loop.call_soon_threadsafe(self.operations.more.put_nowait, text)

    def close(self) -> None:
        """The daemon ends."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
