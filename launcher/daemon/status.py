"""The types of ``GET /v1/status``, and how they are filled from the slot controllers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec import Struct

import launcher
from launcher.accounts.cost import CostNow
from launcher.accounts.report_values import UsageToday
from launcher.base.build import build
from launcher.base.cpuset import CpuSet
from launcher.base.watched_file import FileState
from launcher.engines.causes import Cause
from launcher.engines.software import Stack
from launcher.instances.instance import eta
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import State
from launcher.instances.verify import Verification
from launcher.measure.tune.remembered import MeasuredLayout
from launcher.proxy.readings import KeyTotals, QueueState, TokenTotals
from launcher.telemetry import machine_metrics as names
from launcher.telemetry.engine_metrics import EngineMetrics
from launcher.telemetry.machine_metrics import Values
from launcher.telemetry.quantiles import Quantiles


class Zentorch(Struct, frozen=True, kw_only=True):
    """ZenTorch of an instance."""

    found: str | None
    """Version installed with the engine; null: not installed."""
    active: bool | None
    """Whether this instance uses it; null: unknown."""


class Resident(Struct, frozen=True, kw_only=True):
    """Anonymous memory of an instance's processes (weights, KV cache, heap), when its placement was last verified."""

    total_bytes: int
    """On all nodes."""
    on_node_bytes: int
    """On the planned nodes."""
    share: float | None
    """`on_node_bytes` ÷ `total_bytes`; null if memory is not bound."""


class SlotStatus(Struct, frozen=True, kw_only=True):
    """One slot. Times are seconds since the epoch."""

    slot: int
    """Number of the slot."""
    model: str
    """Name of its model."""
    state: str
    """starting, ready, draining, stopping, backoff, failed, stopped or held."""
    phase: str
    """Progress of a starting instance."""
    intent: str
    """Last request for it: run, drain, stop, hold or quarantine."""
    since: float
    """Begin of this state."""
    pid: int | None
    """Main process of the instance; null without one."""
    generation: int
    """Number of the slot's instance, from 1."""
    restarts: int
    """Starts after the first, requested or not."""
    in_flight: int
    """Requests that the proxy has sent to it and that have not ended."""
    socket: int
    """Socket of its lowest CPU; an instance of several ranks may have cores of others."""
    node: int | None
    """NUMA node of its lowest CPU; null on a machine without NUMA."""
    cpus: str
    """CPU list, in the kernel's format."""
    omp_cpus: str
    """CPU lists of its OpenMP threads, one per rank, separated by |."""
    membind: str
    """NUMA nodes of its memory."""
    kv_cache_bytes: int | None
    """Planned size of its KV cache."""
    address: str | None
    """Address on which the instance listens."""
    responsive: bool | None
    """Whether the last probe was answered in time."""
    unwatched: str | None = None
    """Why a running instance is not watched (a hang would not be noticed); null if it is, or none runs."""
    outdated: str | None = None
    """Why a running instance is not what would start now: other files of its model, or an earlier configuration; null if it
    is."""
    next_start: float | None
    """Next start of a slot in back-off."""
    last_cause: Cause | None
    """Last unrequested end of an instance: `name`, `message`, `remedy`, `retry`, `evidence`."""
    verified: Verification | None
    """Last check of threads and pages: `ok`, `processes`, `threads`, `cpus`, `bound_cpus`
    (with a thread bound to them alone), `policies`, `node_bytes`, `bound_share`, `libraries`, `differences` (`what`,
    `planned`, `found`), `problems` (the same as text), `foreign` (other processes on its CPUs), `misplaced_threads` (how
    many may run outside its CPUs), `ranks` (of several tensor-parallel ranks: `rank`, `pid`, `name`, `cpus`, `planned_cpus`,
    `node`, `policies`, `node_bytes`, `bound_share`)."""
    zentorch: Zentorch
    """ZenTorch: `found` (version), `active`."""
    max_num_seqs: int | None = None
    """Requests that its instance runs at once: the proxy's limit, whether [[models]] or engine.args sets it; null from a
    daemon before this field."""
    looked_at: float | None = None
    """Last successful probe of the instance; null before the first."""
    eta: float | None = None
    """Likely end of the current transition; null without one, or if unknown."""
    last_cause_at: float | None = None
    """Time of `last_cause`."""
    last_cause_generation: int | None = None
    """Generation of the instance that ended."""
    load: EngineMetrics | None = None
    """The engine's counters at the last probe: `running` and `waiting` requests, `generated` tokens, `steps`,
    `kv_usage` (0 to 1), `kv_tokens` (capacity of the KV cache), `prefix_queries` and `prefix_hits` (tokens), `rounded`
    (the engine prints too few digits of `steps` to show progress), `max_adapters` (LoRA adapters at
    once); null for an engine without metrics."""
    tokens_per_s: float | None = None
    """Tokens generated per second, between the last two probes."""
    stalled_s: float | None = None
    """Seconds with requests but without progress; null while there is progress."""
    deadline: float | None = None
    """Latest end of the current transition; then it is forced."""
    first_token: Quantiles | None = None
    """Time to first token of streams in the last `window_s`, queueing included: `p50_s`, `p99_s`, `count`; null
    without streams."""
    resident: Resident | None = None
    """Memory of its processes: `total_bytes`, `on_node_bytes`, `share`; null before the first verification."""


class Status(Struct, frozen=True, kw_only=True):
    """``GET /v1/status``."""

    slots: tuple[SlotStatus, ...]
    """The slots, by number."""
    ready: int
    """Number of ready slots."""
    endpoint: str
    """URL of the first listener; empty without one."""
    endpoints: tuple[str, ...] = ()
    """URLs of all listeners."""
    absent_endpoints: tuple[str, ...] = ()
    """Those of `endpoints` whose address no interface of this host has: nobody reaches them until one has."""
    version: str
    """Version of numa-launcher."""
    build: str
    """Which code runs: python (sources), compiled (libraries), or stale (sources, because the libraries are older)."""
    pid: int
    """Process id of the daemon."""
    since: float
    """Start of the daemon."""
    binding: str
    """How memory is bound: membind, preferred or none."""
    stack: dict[str, str | None]
    """Versions of vllm, torch, zentorch; path of tcmalloc."""
    requests: dict[str, Any]
    """Counters of the proxy: accepted = completed + refused + client_aborted + rejected + failed + in_flight."""
    queue: QueueState
    """Requests that wait for an instance: `requests`, `bytes`, `oldest_s`, `limit_requests`, `limit_bytes`."""
    first_token: Quantiles | None = None
    """Time to first token of all streams in the last `window_s`, as of a slot; null without streams."""
    tokens: TokenTotals
    """Tokens of ended requests since the daemon's start: `prompt`, `cached` (a part of `prompt`), `output`."""
    tokens_by_model: dict[str, TokenTotals]
    """The same by model."""
    keys: dict[str, KeyTotals]
    """By API key: `accepted`, `in_flight` (requests), `tokens`, `prompt_tokens`, `output_tokens`; empty without keys."""
    warnings: tuple[str, ...]
    """Warnings about the plan and the machine."""
    files: tuple[FileState, ...] = ()
    """Files that are read again when they change: certificate and keys."""
    no_listener: str | None = None
    """Why the daemon listens nowhere: systemd handed over the control socket only; null if it listens, or will."""
    unapplied: str | None = None
    """How the configuration file differs from what is in force, and how the last reload went; null if it does not."""
    measured_layout: MeasuredLayout | None = None
    """Layout that `tune` measured on this machine; null without one."""
    usage: UsageToday | None = None
    """Requests and tokens since midnight: `since`, `requests`, `prompt_tokens`, `output_tokens`; null without a usage
    ledger that can be read at once."""
    cost: CostNow | None = None
    """Live costs: `currency`, `per_million_output` (allocated cost of a million output tokens in the last `seconds`, at most
    an hour; null if there were none), `today` (bill since midnight), `today_utilisation`; null without a price in [cost]."""


def on_clock(began: float, running: float, wall: float) -> float:
    """When something began, on the wall clock as it is now: it may have been set since. `began` and `running` (now) are a
    monotonic clock's."""
    return wall - (running - began)


def slot_status(
    controller: SlotController,
    in_flight: int,
    stack: Stack,
    first_token: Quantiles | None = None,
    outdated: str | None = None,
) -> SlotStatus:
    """One slot's row. Monotonic times become times of day."""
    slot_state, instance, slot = controller.slot_state, controller.instance, controller.slot
    offset = time.time() - time.monotonic()
    place = slot.placement
    deadline = slot_state.deadline + offset if slot_state.deadline is not None else None
    ends = eta(slot_state, in_flight=in_flight, start_s=controller.start_s)
    return SlotStatus(
        slot=slot.id,
        model=slot.model.name,
        state=slot_state.state.value,
        phase=instance.phase if slot_state.state is State.STARTING else "",
        intent=slot_state.intent.value,
        since=slot_state.since + offset,
        pid=instance.process.pid if instance.process is not None else None,
        generation=slot_state.generation,
        restarts=slot_state.restarts,
        in_flight=in_flight,
        socket=place.socket,
        node=place.node,
        cpus=str(place.cpus),
        omp_cpus="|".join(str(rank) for rank in place.omp_cpus),
        membind=str(place.membind),
        kv_cache_bytes=slot.kv_cache_bytes,
        max_num_seqs=slot.effective.max_num_seqs,
        address=str(instance.address) if instance.address is not None else None,
        responsive=instance.responsive,
        unwatched=controller.unwatched,
        outdated=outdated,
        looked_at=instance.probed_at + time.time() - controller.running()
        if instance.probed_at is not None
        else None,
        next_start=deadline if slot_state.state is State.BACKOFF else None,
        last_cause=None if slot_state.last_cause is None else slot_state.last_cause.of_slot(slot.id),
        verified=instance.verification,
        zentorch=Zentorch(found=stack.zentorch, active=instance.zentorch),
        last_cause_at=slot_state.cause_at + offset if slot_state.last_cause is not None else None,
        last_cause_generation=slot_state.cause_generation if slot_state.last_cause is not None else None,
        load=instance.progress.counted,
        tokens_per_s=instance.progress.tokens_per_s,
        stalled_s=_stalled_s(controller),
        eta=ends + offset if ends is not None else None,
        deadline=deadline,
        first_token=first_token,
        resident=_resident(place.membind, instance.verification),
    )


def _resident(nodes: CpuSet, found: Verification | None) -> Resident | None:
    if found is None:
        return None
    on_node = sum(size for node, size in found.node_bytes.items() if node in nodes)
    return Resident(
        total_bytes=sum(found.node_bytes.values()), on_node_bytes=on_node, share=found.bound_share
    )


def _stalled_s(controller: SlotController) -> float | None:
    last = controller.instance.progress.last
    if last is None:
        return None
    stalled_s = last.at - controller.instance.progress.moved_at
    return stalled_s if stalled_s > 0 else None


# --- The supervisor's part of the metrics page: slots, their instances, their failures, the build. ---

_Labels = tuple[str, ...]
_STATES: Final = tuple(state.value for state in State)


def daemon_values(stack: Stack, since: float) -> Values:
    """`since`: start of the daemon, seconds since the epoch."""
    versions = (stack.vllm or "", stack.torch or "", stack.zentorch or "")
    return {
        names.BUILD_INFO: {(launcher.__version__, build(), *versions): 1.0},
        names.START_TIME: {(): since},
    }


def failure_values(failures: Mapping[str, int], causes: Iterable[str]) -> Values:
    """`failures`: of all slots, by cause. Each of the known `causes` has a sample from the start, so that its first failure
    is an increase."""
    return {names.FAILURES: {(cause,): failures.get(cause, 0) for cause in (*causes, *failures)}}


def slot_values(controllers: Iterable[SlotController]) -> Values:
    slots = {(str(each.slot.id), each.slot.model.name): each for each in controllers}
    offset = time.time() - time.monotonic()
    states = {labels: each.slot_state for labels, each in slots.items()}
    return {
        names.SLOT_STATE: {
            (*labels, name): float(state.state.value == name)
            for labels, state in states.items()
            for name in _STATES
        },
        names.SLOT_RESTARTS: {labels: state.restarts for labels, state in states.items()},
        names.SLOT_FAILURES: {labels: each.failures.total() for labels, each in slots.items()},
        names.SLOT_LAST_FAILURE: {
            (*labels, state.last_cause.name): state.cause_at + offset
            for labels, state in states.items()
            if state.last_cause is not None
        },
        **_of_instances(
            {labels: each for labels, each in slots.items() if each.instance.process is not None}
        ),
    }


def _of_instances(running: Mapping[_Labels, SlotController]) -> Values:
    instances = {labels: each.instance for labels, each in running.items()}
    return {
        names.SLOT_WATCHED: {labels: float(each.unwatched is None) for labels, each in running.items()},
        names.SLOT_RESPONSIVE: {
            labels: float(each.responsive)
            for labels, each in instances.items()
            if each.responsive is not None
        },
        names.SLOT_STALLED: {
            labels: max(0.0, each.progress.last.at - each.progress.moved_at)
            for labels, each in instances.items()
            if each.progress.last is not None
        },
        names.SLOT_ZENTORCH: {
            labels: float(each.zentorch) for labels, each in instances.items() if each.zentorch is not None
        },
        **_placement(
            {labels: each.verification for labels, each in instances.items() if each.verification is not None}
        ),
    }


def _placement(found: Mapping[_Labels, Verification]) -> Values:
    return {
        names.SLOT_PLACED: {labels: float(each.ok) for labels, each in found.items()},
        names.SLOT_MISPLACED: {labels: each.misplaced_threads for labels, each in found.items()},
        names.SLOT_MEMORY: {
            (*labels, str(node)): size
            for labels, each in found.items()
            for node, size in each.node_bytes.items()
        },
        names.SLOT_MEMORY_ON_NODE: {
            labels: each.bound_share for labels, each in found.items() if each.bound_share is not None
        },
    }
