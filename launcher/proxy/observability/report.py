"""The proxy's own figures: sums for `status`, values for /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from launcher.proxy.balancing.upstreams import Upstream
from launcher.proxy.downstream import slow_clients
from launcher.proxy.observability.exchange import Outcome
from launcher.proxy.observability.values import of_keys, of_overflow
from launcher.telemetry import metrics

if TYPE_CHECKING:
    from launcher.proxy.auth.api_keys import ApiKeys
    from launcher.proxy.dispatch.desk import Desk
    from launcher.proxy.downstream.upload_memory import UploadMemory


def stats(desk: Desk) -> dict[str, object]:
    """The sums since the start, and per slot and key; `slots` is keyed by the slot as text, for JSON."""
    tally = desk.tally
    working = _per_slot(desk.fleet.table)
    return {
        "accepted": tally.accepted,
        "in_flight": tally.in_flight,
        **{outcome.value: tally.outcomes[outcome] for outcome in Outcome},
        "retried": tally.retried,
        "continued": tally.cut["continued"],
        "waiting": desk.fleet.waiting,
        "slots": {
            str(slot): {
                "model": sums.model,
                "sent": sums.sent,
                "broken": sums.broken,
                "in_flight": working.get(slot, 0),
                **{outcome.value: sums.outcomes[outcome] for outcome in Outcome},
            }
            for slot, sums in sorted(tally.slots.items())
        },
    }


def values(desk: Desk, keys: ApiKeys, uploads: UploadMemory, connections: int) -> metrics.Values:
    """The sums as the values of telemetry.metrics.TABLE."""
    tally, fleet, scheduler = desk.tally, desk.fleet, desk.fleet.scheduler
    rows = list(fleet.table)
    working = _per_slot(rows)
    ready = {(row.slot, row.model): row for row in rows if not row.draining}
    slots = {(str(slot), sums.model): (slot, sums) for slot, sums in sorted(tally.slots.items())}
    names = desk.names.names
    waiting: Counter[str] = Counter(model for relay in fleet.queued if (model := relay.exchange.model))
    counts = Counter(row.model for row in ready.values())
    return {
        metrics.ACCEPTED: {(): tally.accepted},
        metrics.ENDED: {(outcome.value,): tally.outcomes[outcome] for outcome in Outcome},
        metrics.IN_FLIGHT: {(): tally.in_flight},
        metrics.RETRIED: {(): tally.retried},
        metrics.SLOT_SENT: {labels: sums.sent for labels, (_, sums) in slots.items()},
        metrics.SLOT_BROKEN: {labels: sums.broken for labels, (_, sums) in slots.items()},
        metrics.SLOT_ENDED: {
            (*labels, outcome.value): sums.outcomes[outcome]
            for labels, (_, sums) in slots.items()
            for outcome in Outcome
        },
        metrics.SLOT_IN_FLIGHT: {labels: working.get(slot, 0) for labels, (slot, _) in slots.items()},
        metrics.SLOT_READY: {
            labels: float((slot, sums.model) in ready) for labels, (slot, sums) in slots.items()
        },
        metrics.SLOT_EJECTED: {
            (str(slot), model): float(row.outliers.ejected_until is not None)
            for (slot, model), row in ready.items()
        },
        metrics.SLOT_EJECTIONS: {labels: sums.ejected for labels, (_, sums) in slots.items()},
        metrics.SLOT_WEIGHT: {
            (str(slot), model): row.outliers.weight for (slot, model), row in ready.items()
        },
        metrics.READY: {(name,): counts[name] for name in names},
        metrics.QUEUED: {(name,): waiting[name] for name in names},
        metrics.QUEUED_BYTES: {(): scheduler.queue.bytes},
        metrics.QUEUE_REJECTED: {
            (reason,): tally.queue_rejected[reason] for reason in ("requests", "bytes", "deadline")
        },
        metrics.PARKED: {(name,): 0 if counts[name] else waiting[name] for name in names},
        metrics.CONTINUED: {(how,): tally.cut[how] for how in ("continued", "unfit", "failed")},
        metrics.UPLOAD_BYTES: {(): uploads.used},
        metrics.UPLOADS_WAITING: {(): uploads.waiting},
        metrics.UPLOADS_REFUSED: {(): uploads.refused},
        metrics.CONNECTIONS: {(): connections},
        metrics.CONNECTIONS_REFUSED: {(): tally.connections_refused},
        metrics.SLOW_CLIENTS: {(): len(desk.slow_clients)},
        metrics.SLOW_CLIENT_BYTES: {(): desk.slow_clients.bytes},
        metrics.SLOW_CLIENTS_GIVEN_UP: {
            (reason,): desk.slow_clients.given_up[reason] for reason in slow_clients.REASONS
        },
        **of_keys(keys, (outcome.value for outcome in Outcome)),
        **of_overflow(desk.overflow),
    }


def _per_slot(upstreams: Iterable[Upstream]) -> dict[int, int]:
    working: dict[int, int] = {}
    for upstream in upstreams:
        working[upstream.slot] = working.get(upstream.slot, 0) + upstream.in_flight
    return working
