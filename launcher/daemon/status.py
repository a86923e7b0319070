"""The types of ``GET /v1/status``, and how they are filled from the slot controllers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from launcher.cpuset import CpuSet
from launcher.engines.software_versions import Stack
from launcher.instances.causes import Cause
from launcher.instances.eta import eta
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import State
from launcher.instances.verify import Verification
from launcher.telemetry.rolling_quantiles import Quantiles
from launcher.telemetry.vllm_metrics import EngineMetrics
from launcher.tuning.remembered import MeasuredLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Zentorch:
    """Whether AMD's kernels do the work."""

    found: str | None
    """The version installed beside the engine; null: none is."""
    active: bool | None
    """Whether this instance uses it; null: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Anonymous memory of an instance's processes (weights, KV cache, heap), when its placement was last verified."""

    total_bytes: int
    """On all nodes."""
    on_node_bytes: int
    """On the nodes that the plan binds it to."""
    share: float | None
    """The second of the first, 0 to 1; null where nothing is bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """One slot. Times are seconds since the epoch."""

    slot: int
    """Its number."""
    model: str
    """The name of the model that it serves."""
    state: str
    """starting, ready, draining, stopping, backoff, failed, stopped or held."""
    phase: str
    """How far a starting instance has come."""
    intent: str
    """What was asked of it last: run, drain, stop, hold or quarantine."""
    since: float
    """When it came into this state."""
    pid: int | None
    """Of the instance's first process; null while there is none."""
    generation: int
    """Number of the slot's instance, from 1."""
    restarts: int
    """Starts after the first, asked for or not."""
    in_flight: int
    """Requests that the endpoint has on it."""
    socket: int
    """The socket of its cores."""
    node: int | None
    """Their NUMA node; null on a machine without."""
    cpus: str
    """Its cpus, a list as the kernel writes it."""
    omp_cpus: str
    """Cpus of its OpenMP threads, one list for each rank, parted by |."""
    membind: str
    """NUMA nodes of its memory."""
    kv_cache_bytes: int | None
    """Planned size of its KV cache."""
    address: str | None
    """Where it listens."""
    responsive: bool | None
    """Whether the last probe was answered in time."""
    unwatched: str | None = None
    """Why its running instance is not being watched: a hang would not be noticed; null while it is, or none runs."""
    next_start: float | None
    """When a slot in back-off starts again."""
    last_cause: Cause | None
    """Why an instance last ended unrequested: `name`, `message`, `remedy`, `retry`, `evidence`."""
    verified: Verification | None
    """Where its threads and pages were when last verified: `ok`, `processes`, `threads`, `cpus`, `bound_cpus`
    (that have a thread bound to them alone), `policies`, `node_bytes`, `bound_share`, `libraries`, `differences` (`what`,
    `planned`, `found`), `problems` (the same as text), `foreign` (processes of others on its cpus)."""
    zentorch: Zentorch
    """Whether AMD's kernels do the work: `found` (version), `active`."""
    looked_at: float | None = None
    """When a probe of its instance last succeeded; null before the first."""
    eta: float | None = None
    """When the current transition will likely end; null without one, or where it is unknown."""
    last_cause_at: float | None = None
    """When that was."""
    last_cause_generation: int | None = None
    """The generation that it ended; `logs` names the generation of each line."""
    load: EngineMetrics | None = None
    """The engine's counters at the last probe: `running` and `waiting` requests, `generated` tokens, `steps`,
    `kv_usage` (0 to 1), `kv_tokens` (capacity of the KV cache), `prefix_queries` and `prefix_hits` (tokens), `rounded`
    (the engine prints too few digits of `steps` to tell progress by them); null for an engine without metrics."""
    tokens_per_s: float | None = None
    """Generated, between the last two probes."""
    stalled_s: float | None = None
    """How long it has had requests without progress; null while it makes progress."""
    deadline: float | None = None
    """When it is over at the latest, or insisted upon."""
    first_token: Quantiles | None = None
    """How long clients waited for a stream's first token in the last minutes, time in the queue included: `p50_s`,
    `p99_s`, `count`, `window_s`; null where none had one."""
    resident: Resident | None = None
    """Memory of its processes: `total_bytes`, `on_node_bytes`, `share`; null before the first verification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``GET /v1/status``."""

    slots: tuple[SlotStatus, ...]
    """One object for each slot, by number."""
    ready: int
    """Slots that are ready."""
    endpoint: str
    """URL of the first listener; empty while there is none."""
    version: str
    """numa-launcher's."""
    build: str
    """Which code runs: python (the sources), compiled (libraries of scripts/compile), or stale (libraries of other
    sources are present and ignored; the sources run)."""
    pid: int
    """The daemon's."""
    since: float
    """When the daemon started."""
    binding: str
    """How memory is bound: membind, preferred or none."""
    stack: dict[str, str | None]
    """Versions found: vllm, torch, zentorch; the path of tcmalloc."""
    requests: dict[str, Any]
    """The proxy's accounting: accepted = completed + client_aborted + rejected + failed + in_flight."""
    warnings: tuple[str, ...]
    """Of the plan and the machine."""
    measured_layout: MeasuredLayout | None = None
    """What `tune` measured on this machine; null where nothing was."""


def slot_status(
    controller: SlotController, in_flight: int, stack: Stack, first_token: Quantiles | None = None
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
        address=str(instance.address) if instance.address is not None else None,
        responsive=instance.responsive,
        unwatched=controller.unwatched,
        looked_at=instance.probed_at + offset if instance.probed_at is not None else None,
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
