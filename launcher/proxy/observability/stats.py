"""The sums for `status`, and the values for /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from launcher.accounts.budgets import Budgets
from launcher.balancing.upstreams import Upstream
from launcher.base.money import PICOS
from launcher.base.watched_file import FileCondition, FileState
from launcher.keys.api_keys import ApiKeys
from launcher.proxy.downstream import slow_clients as slow
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.downstream.uploads import UploadMemory
from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.record import Request
from launcher.proxy.upstream.overflow import Overflow
from launcher.telemetry import metrics
from launcher.telemetry.machine_metrics import Values

# --- The sums over all requests. accepted = the outcomes + in flight. ---


class SlotCounters:
    """Sums of one slot, over its generations."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.sent = 0  # attempts, so a retried request counts on each slot it reached
        self.broken = 0  # attempts that failed before the first byte
        self.ejected = 0  # times that failures took it out of rotation
        self.outcomes: Counter[Outcome] = Counter()


class TokenSums:
    """Tokens of one model's ended requests."""

    def __init__(self) -> None:
        self.prompt = 0  # the cached ones included
        self.cached = 0
        self.output = 0


class Counters:
    def __init__(self) -> None:
        self.accepted = 0
        self.ended = 0
        self.retried = 0
        self.connections_refused = 0
        # Streams that broke after their first byte, by what became of them.
        self.cut: Counter[str] = Counter()
        self.queue_rejected: Counter[str] = Counter()
        self.outcomes: Counter[Outcome] = Counter()
        self.slots: dict[int, SlotCounters] = {}
        self.tokens: dict[str, TokenSums] = {}  # by model; exactly what the ledger's entries say

    @property
    def in_flight(self) -> int:
        return self.accepted - self.ended

    def accept(self) -> None:
        self.accepted += 1

    def retry(self, _request: Request, _event: object, _now: float) -> None:
        self.retried += 1

    def refuse_connection(self) -> None:
        self.connections_refused += 1

    def slot(self, slot: int, model: str) -> SlotCounters:
        found = self.slots.get(slot)
        if found is None or found.model != model:
            found = self.slots[slot] = SlotCounters(model)
        return found

    def end(self, request: Request, outcome: Outcome) -> None:
        """Count one accepted request's end; a second call for it is a fault of the proxy."""
        if request.counted:
            raise AssertionError(f"request {request.request_id} ended twice")
        request.counted = True
        self.ended += 1
        self.outcomes[outcome] += 1
        if request.slot is not None and request.slot in self.slots:
            self.slots[request.slot].outcomes[outcome] += 1

    def count_tokens(self, model: str, prompt: int, cached: int, output: int) -> None:
        sums = self.tokens.get(model)
        if sums is None:
            sums = self.tokens[model] = TokenSums()
        sums.prompt += prompt
        sums.cached += cached
        sums.output += output


def stats(counters: Counters, upstreams: Iterable[Upstream], waiting: int) -> dict[str, object]:
    """The sums since the start, and per slot and key; `slots` is keyed by the slot as text, for JSON."""
    working = _per_slot(upstreams)
    return {
        "accepted": counters.accepted,
        "in_flight": counters.in_flight,
        **{outcome.value: counters.outcomes[outcome] for outcome in Outcome},
        "retried": counters.retried,
        "continued": counters.cut["continued"],
        "waiting": waiting,
        "slots": {
            str(slot): {
                "model": sums.model,
                "sent": sums.sent,
                "broken": sums.broken,
                "in_flight": working.get(slot, 0),
                **{outcome.value: sums.outcomes[outcome] for outcome in Outcome},
            }
            for slot, sums in sorted(counters.slots.items())
        },
    }


def values(
    counters: Counters,
    *,
    upstreams: Sequence[Upstream],
    names: Iterable[str],
    waiting: Mapping[str, Sequence[float]],
    queue_max: int,
    queued_bytes: int,
    uploads: UploadMemory,
    connections: int,
    certificate_end: float | None,
    slow_clients: SlowClients,
    keys: ApiKeys,
    budgets: Budgets | None,
    overflow: Overflow | None,
    files: Sequence[FileState] = (),
) -> Values:
    """The sums as the values of telemetry.metrics.TABLE. `waiting`: ages of queued requests by model, seconds.
    `certificate_end`: of the TLS certificate, seconds since the epoch."""
    working = _per_slot(upstreams)
    ready = {(row.slot, row.model): row for row in upstreams if not row.draining}
    slots = {(str(slot), sums.model): (slot, sums) for slot, sums in sorted(counters.slots.items())}
    counts = Counter(row.model for row in ready.values())
    return {
        metrics.ACCEPTED: {(): counters.accepted},
        metrics.ENDED: {(outcome.value,): counters.outcomes[outcome] for outcome in Outcome},
        metrics.IN_FLIGHT: {(): counters.in_flight},
        metrics.RETRIED: {(): counters.retried},
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
        metrics.QUEUED: {(name,): len(waiting.get(name, ())) for name in names},
        metrics.QUEUED_BYTES: {(): queued_bytes},
        metrics.QUEUE_OLDEST: {(name,): max(waiting.get(name, ()), default=0.0) for name in names},
        metrics.QUEUE_MAX: {(): queue_max},
        metrics.QUEUE_REJECTED: {
            (reason,): counters.queue_rejected[reason] for reason in ("requests", "bytes", "deadline")
        },
        metrics.PARKED: {(name,): 0 if counts[name] else len(waiting.get(name, ())) for name in names},
        metrics.CONTINUED: {(how,): counters.cut[how] for how in ("continued", "unfit", "failed")},
        metrics.UPLOAD_BYTES: {(): uploads.used},
        metrics.UPLOADS_WAITING: {(): uploads.waiting},
        metrics.UPLOADS_REFUSED: {(): uploads.refused},
        metrics.CONNECTIONS: {(): connections},
        metrics.CERTIFICATE_END: {} if certificate_end is None else {(): certificate_end},
        metrics.FILE_USABLE: {
            (file.what,): float(file.state in {FileCondition.IN_USE, FileCondition.EXPIRING})
            for file in files
        },
        metrics.CONNECTIONS_REFUSED: {(): counters.connections_refused},
        metrics.SLOW_CLIENTS: {(): len(slow_clients)},
        metrics.SLOW_CLIENT_BYTES: {(): slow_clients.bytes},
        metrics.SLOW_CLIENTS_GIVEN_UP: {(reason,): slow_clients.given_up[reason] for reason in slow.REASONS},
        **of_tokens(counters, names),
        **of_budgets(budgets),
        **of_keys(keys, (outcome.value for outcome in Outcome)),
        **of_overflow(overflow),
    }


def _per_slot(upstreams: Iterable[Upstream]) -> dict[int, int]:
    working: dict[int, int] = {}
    for upstream in upstreams:
        working[upstream.slot] = working.get(upstream.slot, 0) + upstream.in_flight
    return working


def of_tokens(counters: Counters, names: Iterable[str]) -> Values:
    """Tokens of ended requests by model."""
    sums = {(name,): counters.tokens.get(name) or TokenSums() for name in names}
    return {
        metrics.PROMPT_TOKENS: {labels: of.prompt for labels, of in sums.items()},
        metrics.CACHED_TOKENS: {labels: of.cached for labels, of in sums.items()},
        metrics.OUTPUT_TOKENS: {labels: of.output for labels, of in sums.items()},
    }


def of_keys(keys: ApiKeys, outcomes: Iterable[str]) -> Values:
    """Per name of a key; nothing where no keys are needed. `outcomes` are shown also while they are 0."""
    if not keys.required:
        return {}
    shown, sums = tuple(outcomes), sorted(keys.sums.items())
    return {
        metrics.UNAUTHORIZED: {(): keys.unauthorized},
        metrics.KEY_ACCEPTED: {(name,): of.accepted for name, of in sums},
        metrics.KEY_ENDED: {(name, outcome): of.ended[outcome] for name, of in sums for outcome in shown},
        metrics.KEY_REFUSED: {
            (name, limit): count for name, of in sums for limit, count in of.refused.items()
        },
        metrics.KEY_IN_FLIGHT: {(name,): of.in_flight for name, of in sums},
        metrics.KEY_TOKENS: {(name,): of.tokens for name, of in sums},
        metrics.KEY_PROMPT_TOKENS: {(name,): of.prompt_tokens for name, of in sums},
        metrics.KEY_OUTPUT_TOKENS: {(name,): of.output_tokens for name, of in sums},
    }


def of_budgets(budgets: Budgets | None) -> Values:
    """Per name of a key with a budget; nothing for one of which it is unknown."""
    ratios = {} if budgets is None else budgets.ratios()
    return {metrics.KEY_BUDGET_SPENT: {(name,): ratio for name, ratio in ratios.items()}}


def of_overflow(overflow: Overflow | None) -> Values:
    """Per endpoint, and model that may go there; nothing where there is no overflow."""
    if overflow is None:
        return {}
    endpoints = list(overflow)
    caps = [(each.name, each.cost.cap) for each in endpoints]
    capped = [(name, cap) for name, cap in caps if cap is not None]
    return {
        metrics.OVERFLOW_SENT: {
            (each.name, model): each.sent[model] for each in endpoints for model in each.models
        },
        metrics.OVERFLOW_ENDED: {
            (each.name, model, outcome): each.ended[model, outcome]
            for each in endpoints
            for model in each.models
            for outcome in Outcome
        },
        metrics.OVERFLOW_IN_FLIGHT: {(each.name,): each.in_flight for each in endpoints},
        metrics.OVERFLOW_COST: {
            (each.name,): each.cost.spent / PICOS for each in endpoints if each.cost.prices is not None
        },
        metrics.OVERFLOW_CAPPED: {(each.name,): each.cost.refused for each in endpoints},
        metrics.OVERFLOW_WITHOUT_USAGE: {(each.name,): each.cost.odd for each in endpoints},
        metrics.OVERFLOW_SPENT: {(name,): cap.settled / PICOS for name, cap in capped},
        metrics.OVERFLOW_RESERVED: {(name,): cap.reserved / PICOS for name, cap in capped},
        metrics.OVERFLOW_MAX_PER_DAY: {(name,): cap.cap / PICOS for name, cap in capped},
    }


# --- The counters in one value, for who reads them every few seconds: no labels, no text. ---


class Totals(NamedTuple):
    """Since the proxy's start, but for the last two."""

    accepted: int
    failed: int
    prompt_tokens: int  # of ended requests
    output_tokens: int
    overflowed: int  # attempts at overflow endpoints
    overflow_spent: float | None  # in the currency's unit; None without prices
    queue_rejected: int
    in_flight: int
    first_tokens: tuple[float, ...]  # seconds, of streams whose first token came lately


def totals(counters: Counters, overflow: Overflow | None, first_tokens: tuple[float, ...]) -> Totals:
    endpoints = [] if overflow is None else list(overflow)
    priced = [endpoint.cost.spent for endpoint in endpoints if endpoint.cost.prices is not None]
    return Totals(
        accepted=counters.accepted,
        failed=counters.outcomes[Outcome.FAILED],
        prompt_tokens=sum(sums.prompt for sums in counters.tokens.values()),
        output_tokens=sum(sums.output for sums in counters.tokens.values()),
        overflowed=sum(endpoint.sent.total() for endpoint in endpoints),
        overflow_spent=sum(priced) / PICOS if priced else None,
        queue_rejected=counters.queue_rejected.total(),
        in_flight=counters.in_flight,
        first_tokens=first_tokens,
    )
