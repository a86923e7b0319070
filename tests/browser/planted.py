"""A planted machine behind a real control socket: 2 sockets, 256 cores, 512 CPUs, 8 instances."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from msgspec.structs import replace
from support.fake_operations import FakeOperations, slot_status
from support.ledger_file import LedgerFile

from launcher.accounts.cost import CostNow
from launcher.accounts.report_values import UsageToday
from launcher.accounts.timeline import Step, Timeline, TimelineTokens
from launcher.base.text import GIB
from launcher.config.schema import Cost
from launcher.daemon.status import Resident, SlotStatus, Status, Zentorch
from launcher.engines.causes import Cause, Retry
from launcher.instances.verify import Difference, Verification
from launcher.proxy.readings import KeyTotals, QueueState
from launcher.telemetry.engine_metrics import EngineMetrics
from launcher.telemetry.quantiles import Quantiles

MACHINE: Final = "epyc-9755-2p"
MODEL: Final = "llama-3.1-8b-instruct"
STEP_MS: Final = 2000
HOUR_ROWS: Final = 1800
# Of the machine, USD.
HOURLY: Final = 2.5
# A request whose instance died.
REQUEST: Final = "chat-7f3a91"
# The slot with a thread off its CPUs and memory off its node.
MISPLACED: Final = 2
_OOM: Final = Cause(
    "node-oom", "the node ran out of memory", "lower memory.kv_cache or the number of instances", Retry.BACKOFF,
    ("Killed process 30614 (VLLM::EngineCor) total-vm:412345678kB",),
)  # fmt: skip
_COLUMNS: Final = (
    "requests_per_s", "failed_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "first_token_p50_s",
    "first_token_p99_s", "queued", "oldest_queued_s", "in_flight", "ready", "kv_usage", "prefix_hit_rate", "cpu_busy",
    "memory_free_bytes", "overflow_per_s", "queue_rejected_per_s", "cost_per_hour",
)  # fmt: skip
_SLOT_COLUMNS: Final = ("tokens_per_s", "in_flight", "kv_usage", "cpu_busy", "state")


@cache
def plan(instances_per_socket: int = 4) -> dict[str, Any]:
    argv = [
        sys.executable, "-m", "launcher", "plan", "--machine", MACHINE, "--json",
        "--set", f"layout.instances_per_socket={instances_per_socket}",
    ]  # fmt: skip
    found: dict[str, Any] = json.loads(
        subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    )
    return found


def wave(at: float, period_s: float, least: float, most: float) -> float:
    return least + (most - least) * (0.5 + 0.5 * math.sin(at / period_s))


@dataclass
class PlantedMachine(FakeOperations):
    """A machine under load. `well`: all slots are ready and placed as planned."""

    well: bool = False
    model: str = MODEL
    began: float = field(default_factory=time.time)
    cause: Cause = _OOM
    log_lines: tuple[str, ...] = ("INFO loading weights", "INFO serving")
    key: str = "chat-ui"
    machine_name: str = MACHINE

    def __post_init__(self) -> None:
        self.slots = {found["slot"]: self._slot(found) for found in plan()["slots"]}
        self.printed_at = self.began
        self.lines = list(self.log_lines)
        self.prices = Cost(hourly=HOURLY)
        self.timelines = {REQUEST: self._continued()}
        self.queue = QueueState(
            requests=4, bytes=80_000, oldest_s=1.4, limit_requests=4096, limit_bytes=512 << 20,
        )  # fmt: skip
        self.totals = {self.key: KeyTotals(
            accepted=61_234, in_flight=38, tokens=84_000_000, prompt_tokens=59_000_000, output_tokens=25_000_000,
        )}  # fmt: skip
        self.today = UsageToday(
            since=int(self.began // 86_400) * 86_400,
            requests=61_180,
            prompt_tokens=56_400_000,
            output_tokens=24_600_000,
        )
        self.cost_now = CostNow(
            currency="USD",
            per_million_output=1.41,
            seconds=3600,
            today=HOURLY * (self.began % 86_400) / 3600,
            today_utilisation=0.61,
        )  # fmt: skip

    def _continued(self) -> Timeline:
        """A stream that went on elsewhere when its instance died."""
        began = self.began - 21
        return Timeline(
            id=REQUEST, source="memory", same_id=0, route="/v1/chat/completions", model=self.model, key=self.key,
            stream=True, began=began, ended=began + 11.9, outcome="completed", status=200, reason=None, predicted_s=1.1,
            attempts=2, tokens=TimelineTokens(prompt=1870, cached=1216, output=402, estimated=False), trace_id=None,
            steps=(
                Step(0.0, "received"), Step(0.002, "queued"), Step(0.74, "sent", 3, 4), Step(1.31, "first token", 3, 4),
                Step(8.02, "attempt failed", 3, 4, why="the instance is gone: killed by signal 9"),
                Step(8.03, "queued"), Step(8.05, "sent", 0, 1), Step(8.61, "continued", 0, 1), Step(11.9, "ended"),
            ),
        )  # fmt: skip

    def serve_today(self, ledger: LedgerFile) -> None:
        """Hours of today by key, model and slot."""
        hour = int(self.began // 3600 * 3600)
        shares = {"chat-ui": 0.6, "batch": 0.3, "docs-search": 0.1}
        for back in range(min(6, int(self.began % 86_400 // 3600) + 1)):
            at = hour - 3600 * back
            ledger.hour(at, **_figures(1.0))
            ledger.hour(at, "model", self.model, **_figures(1.0))
            for name, share in shares.items():
                ledger.hour(at, "key", name, **_figures(share))

    # --- status ------------------------------------------------------------------------------------

    def _slot(self, planned: dict[str, Any]) -> SlotStatus:
        number, node = planned["slot"], planned["node"]
        now = self.began
        row = slot_status(
            number, model=self.model, since=now - 18_000 - number, pid=30_600 + number, socket=planned["socket"], node=node,
            cpus=planned["cpus"], omp_cpus=planned["omp_cpus"], membind=planned["membind"], kv_cache_bytes=40 * GIB,
            address=f"unix:/run/numa-launcher/slot{number}-1.sock", in_flight=5 + number, looked_at=now,
            tokens_per_s=180.0 + 10 * number, first_token=Quantiles(p50_s=0.21 + 0.01 * number, p99_s=1.2, count=300),
            load=EngineMetrics(5 + number, 0, 10_000, 900, 0.3 + 0.05 * number, 1000, 610, kv_tokens=99_000),
            zentorch=Zentorch(found="5.2.1", active=True), verified=_verified(planned),
            resident=Resident(total_bytes=44 * GIB, on_node_bytes=44 * GIB, share=1.0),
        )  # fmt: skip
        return row if self.well else self._troubled(row, planned)

    def _troubled(self, row: SlotStatus, planned: dict[str, Any]) -> SlotStatus:
        now = self.began
        if row.slot == MISPLACED:
            differences = (
                Difference("memory on node 0", "100 %", "87 %"),
                Difference(
                    "threads of VLLM::EngineCor (pid 30602)",
                    f"on cpus {planned['cpus']}",
                    "1 of 130 may run on cpus 200: omp-7",
                ),
            )
            share = Resident(total_bytes=44 * GIB, on_node_bytes=38 * GIB, share=0.87)
            return replace(row, verified=_verified(planned, differences), resident=share)
        if row.slot == 3:
            return replace(
                row, state="backoff", pid=None, in_flight=0, since=now - 13, next_start=now + 3600, restarts=4, generation=5,
                last_cause=self.cause, last_cause_at=now - 13, last_cause_generation=4, load=None, tokens_per_s=None,
                first_token=None, verified=None, resident=None, responsive=None,
            )  # fmt: skip
        return replace(row, state="draining", intent="drain", since=now - 40) if row.slot == 6 else row

    def status(self) -> Status:
        ready = sum(slot.state == "ready" for slot in self.slots.values())
        requests = {
            "accepted": 61_234, "completed": 61_180, "client_aborted": 13, "rejected": 2, "failed": 1, "retried": 5,
            "continued": 3, "in_flight": 38, "waiting": 4,
        }  # fmt: skip
        return replace(
            super().status(), ready=ready, keys=self.totals, since=self.began - 18_000, pid=30_586, requests=requests,
            warnings=(), stack={"vllm": "0.32.0", "torch": "2.11.0+cpu", "zentorch": "5.2.1", "tcmalloc": None},
        )  # fmt: skip

    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(plan()).replace("MODEL", self.model))
        return found

    # --- load --------------------------------------------------------------------------------------

    async def machine(self) -> dict[str, Any]:
        now, ledger = time.time(), plan()["ledger"]
        busy: list[float | None] = [round(wave(now + cpu, 7, 0.0, 0.05), 3) for cpu in range(512)]
        for slot in self.slots.values():
            for cpu in _cpus(slot.cpus):
                busy[cpu] = round(wave(now + cpu / 3 + slot.slot, 5, 0.2, 1.0), 3)
        nodes = [
            {
                "node": each["node"], "total_bytes": each["total_bytes"], "free_bytes": each["total_bytes"] // 2,
                "weights_bytes": each["total_bytes"] // 8, "kv_cache_bytes": each["total_bytes"] // 4,
                "foreign_bytes": 0 if self.well else 6 * GIB * (each["node"] == 1),
                "other_bytes": each["total_bytes"] // 8 - (0 if self.well else 6 * GIB * (each["node"] == 1)),
            }
            for each in ledger
        ]  # fmt: skip
        return {
            "time": now, "busy": busy, "nodes": nodes, "slots": [self._places(slot) for slot in self.slots.values()],
            "drift": [], "disks": [{"path": "/var/lib/numa-launcher", "free_bytes": 1 << 38, "total_bytes": 1 << 40}],
        }  # fmt: skip

    def _places(self, slot: SlotStatus) -> dict[str, Any]:
        off = not self.well and slot.slot == MISPLACED
        thread = {"thread": 4213, "name": "omp-7", "cpus": "200", "planned": slot.cpus}
        sizes = {str(slot.node): 38 * GIB, "1": 6 * GIB} if off else {str(slot.node): 44 * GIB}
        return {
            "slot": slot.slot, "node_bytes": sizes, "off_node_bytes": 6 * GIB * off, "misplaced": [thread] * off,
            "misplaced_threads": int(off),
        }  # fmt: skip

    def row(self, ms: int) -> list[float | None]:
        at = ms / 1000
        return [
            wave(at, 200, 3, 7), 0.0, wave(at, 200, 2400, 3300), wave(at, 170, 1200, 1900), wave(at, 300, 0.2, 0.3),
            wave(at, 300, 1.1, 2.1), round(wave(at, 90, 0, 9)), wave(at, 90, 0, 2), round(wave(at, 120, 20, 50)), 6,
            wave(at, 400, 0.3, 0.8), wave(at, 500, 0.55, 0.75), wave(at, 100, 0.4, 0.8), 120 * GIB, 0.0, 0.0, HOURLY,
        ]  # fmt: skip

    def slot_row(self, ms: int, slot: int) -> list[Any]:
        at = ms / 1000 + 10 * slot
        return [
            wave(at, 60, 150, 260),
            round(wave(at, 80, 2, 9)),
            wave(at, 200, 0.2, 0.8),
            wave(at, 50, 0.4, 0.9),
            "ready",
        ]

    async def history(self, span: str, after: int, slots: str) -> bytes:
        shown = [int(slots)] if slots.isdecimal() else []
        return json.dumps({**self.rows(after, shown), "span": span}).encode()

    def rows(self, after: int, slots: Sequence[int] = (), newest: int | None = None) -> dict[str, Any]:
        """An hour with a gap of four minutes."""
        newest = newest or int(time.time() * 1000) // STEP_MS * STEP_MS
        times = [newest - STEP_MS * back for back in range(HOUR_ROWS - 1, -1, -1) if not 600 <= back < 720]
        columns = [*_COLUMNS, *(f"slot.{slot}.{name}" for slot in slots for name in _SLOT_COLUMNS)]
        found = [
            [
                ms,
                *map(_short, self.row(ms)),
                *(_short(each) for slot in slots for each in self.slot_row(ms, slot)),
            ]
            for ms in times
            if ms > after
        ]
        return {"span": "1h", "step_ms": STEP_MS, "columns": columns, "rows": found, "newest": newest}

    # --- what changed ------------------------------------------------------------------------------

    def events(self, count: int, after: int) -> list[dict[str, Any]]:
        return [event for event in self._events() if event["number"] > after][-count:]

    def _events(self) -> list[dict[str, Any]]:
        base = int(self.began * 1000)
        said = [
            (3400, "info", "reload by root: layout.max_num_seqs 64 -> 96", {"user": "root", "verb": "reload"}),
            (2500, "info", "slot 6: drain requested by anna", {"slot": 6, "user": "anna", "verb": "drain"}),
            (1500, "warning", "slot 2: placement differs from the plan: memory on node 0: 87 %", {"slot": 2}),
            (13, "error", f"slot 3: instance ended: {self.cause.name}: {self.cause.message}", {
                "slot": 3, "generation": 4, "cause": self.cause.name, "remedy": self.cause.remedy,
                "evidence": list(self.cause.evidence),
            }),
            (12.9, "info", "slot 3: backoff, restarting in 3613 s", {"slot": 3, "generation": 4}),
        ]  # fmt: skip
        return [
            {
                "number": base - int(ago * 1000), "time": self.began - ago, "level": level, "logger": "launcher.instances",
                "message": text, "fields": fields,
            }
            for ago, level, text, fields in said
        ]  # fmt: skip


def _figures(share: float) -> dict[str, Any]:
    """Of an hour."""
    return {
        "requests": int(10_204 * share), "completed": int(10_200 * share), "failed": int(4 * share),
        "prompt_tokens": int(9_400_000 * share), "cached_tokens": int(5_700_000 * share),
        "output_tokens": int(4_100_000 * share), "first_byte": [0.2, 0.25, 0.3, 1.2],
    }  # fmt: skip


def _verified(planned: dict[str, Any], differences: tuple[Difference, ...] = ()) -> Verification:
    share = 0.87 if differences else 1.0
    sizes = {planned["node"]: 38 * GIB, 1: 6 * GIB} if differences else {planned["node"]: 44 * GIB}
    return Verification(
        processes=2, threads=130, cpus=planned["cpus"], bound_cpus=planned["omp_cpus"], policies=("bind:0",),
        node_bytes=sizes, bound_share=share, libraries=("libtcmalloc", "libiomp5"), differences=differences, foreign=(),
    )  # fmt: skip


def _cpus(text: str) -> list[int]:
    bounds = [part.partition("-") for part in text.split(",") if part]
    return [cpu for first, _, last in bounds for cpu in range(int(first), int(last or first) + 1)]


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value
