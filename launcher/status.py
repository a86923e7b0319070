"""From a slot's owner to what the operator sees of it: the types of ``GET /v1/status``, and how they are filled."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from launcher.engines.stack import Stack
from launcher.instances.causes import Cause
from launcher.instances.eta import eta
from launcher.instances.lifecycle import State
from launcher.instances.progress import Counters
from launcher.instances.seat_keeper import SeatKeeper
from launcher.instances.verify import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class Zentorch:
    """`found`: installed beside the engine (its version). `active`: this instance computes with it."""

    found: str | None
    active: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotStatus:
    """One slot. Times are seconds since the epoch."""

    slot: int
    model: str
    state: str
    phase: str
    """How far a starting instance has come."""
    intent: str
    since: float
    pid: int | None
    generation: int
    restarts: int
    in_flight: int
    socket: int
    node: int | None
    cpus: str
    omp_cpus: str
    membind: str
    kv_cache_bytes: int | None
    address: str | None
    responsive: bool | None
    next_start: float | None
    """When a slot in back-off starts again."""
    last_cause: Cause | None
    verified: Verification | None
    zentorch: Zentorch
    eta: float | None = None
    """When what is under way is likely over; null when nothing is, or nobody can say."""
    last_cause_at: float | None = None
    last_cause_generation: int | None = None
    """The life that it ended; `logs` names the life of each line."""
    load: Counters | None = None
    """What the engine counted when it was last looked at."""
    tokens_per_s: float | None = None
    """Generated, between the last two looks."""
    stalled_s: float | None = None
    """How long it has had work and not moved; null while it moves."""
    deadline: float | None = None
    """When it is over at the latest, or insisted upon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """``GET /v1/status``."""

    slots: tuple[SlotStatus, ...]
    ready: int
    endpoint: str
    version: str
    pid: int
    since: float
    binding: str
    """How memory is bound: membind, preferred or none."""
    stack: dict[str, str | None]
    """Versions found: vllm, torch, zentorch, tcmalloc."""
    requests: dict[str, Any]
    """The front door's accounting: accepted = completed + client_aborted + rejected + failed + in_flight."""
    warnings: tuple[str, ...]


def slot_status(keeper: SeatKeeper, in_flight: int, stack: Stack) -> SlotStatus:
    """One slot's row. Monotonic times become times of day."""
    seat, life, slot = keeper.seat, keeper.life, keeper.slot
    offset = time.time() - time.monotonic()
    place = slot.placement
    deadline = seat.deadline + offset if seat.deadline is not None else None
    ends = eta(seat, in_flight=in_flight, start_s=keeper.start_s)
    return SlotStatus(
        slot=slot.id,
        model=slot.model.name,
        state=seat.state.value,
        phase=life.phase if seat.state is State.STARTING else "",
        intent=seat.intent.value,
        since=seat.since + offset,
        pid=life.process.pid if life.process is not None else None,
        generation=seat.generation,
        restarts=seat.restarts,
        in_flight=in_flight,
        socket=place.socket,
        node=place.node,
        cpus=str(place.cpus),
        omp_cpus="|".join(str(rank) for rank in place.omp_cpus),
        membind=str(place.membind),
        kv_cache_bytes=slot.kv_cache_bytes,
        address=str(life.address) if life.address is not None else None,
        responsive=life.responsive,
        next_start=deadline if seat.state is State.BACKOFF else None,
        last_cause=seat.last_cause,
        verified=life.verification,
        zentorch=Zentorch(found=stack.zentorch, active=life.zentorch),
        last_cause_at=seat.cause_at + offset if seat.last_cause is not None else None,
        last_cause_generation=seat.cause_generation if seat.last_cause is not None else None,
        load=life.progress.counted,
        tokens_per_s=life.progress.tokens_per_s,
        stalled_s=_stalled_s(keeper),
        eta=ends + offset if ends is not None else None,
        deadline=deadline,
    )


def _stalled_s(keeper: SeatKeeper) -> float | None:
    look = keeper.life.progress.last
    if look is None:
        return None
    still = look.at - keeper.life.progress.moved_at
    return still if still > 0 else None
