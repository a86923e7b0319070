"""One request's record, how it ended, and the sums over all. accepted = the four outcomes + in flight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from launcher.printable import MAX_QUOTED, cut


class Outcome(StrEnum):
    """How an accepted request ended; exactly one of these."""

    COMPLETED = "completed"  # an instance's whole answer was delivered, its 4xx included
    CLIENT_ABORTED = "client_aborted"  # the client left first
    REJECTED = "rejected"  # our own refusal: limits, no such model, no ready instance
    FAILED = "failed"  # a 5xx, or an answer that broke after its first byte


@dataclass(slots=True)
class Exchange:
    """What is known of one request; the access log's line is made of it. Never holds prompt text."""

    request_id: str
    method: str
    path: str
    started: float  # loop time, seconds
    counted: bool = False  # accepted: on an application route
    status: int = 0
    model: str | None = None
    adapter: str | None = None  # the LoRA adapter of the model that was asked for
    slot: int | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    attempts: int = 0
    bound: float | None = None  # when an instance was first asked
    first_byte: float | None = None
    stored: str | None = None  # the id of a stored response that the instance now keeps
    continued: int = 0  # times that a cut stream went on elsewhere
    key: str | None = None  # name of the API key
    overflowed: bool = False  # it went to the external endpoint
    outcome: Outcome | None = None
    reason: str | None = None  # why it failed

    def fields(self, now: float) -> dict[str, object]:
        """Fields of the access log; names are those of docs, prefixed so that LogRecord's own stay."""
        return {
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path if len(self.path) <= MAX_QUOTED else cut(self.path),
            "status": self.status,
            "model": self.model,
            "adapter": self.adapter,
            "slot": self.slot,
            "duration_s": round(now - self.started, 6),
            "queued_s": None if self.bound is None else round(self.bound - self.started, 6),
            "first_byte_s": None if self.first_byte is None else round(self.first_byte - self.started, 6),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "attempts": self.attempts,
            "continued": self.continued,
            "key": self.key,
            "overflowed": self.overflowed,
            "outcome": self.outcome,
            "reason": self.reason,
        }


@dataclass(slots=True)
class SlotCounters:
    """Sums of one slot, over its generations."""

    model: str
    sent: int = 0  # attempts, so a retried request counts on each slot it reached
    broken: int = 0  # attempts that failed before the first byte
    ejected: int = 0  # times that failures took it out of rotation
    outcomes: Counter[Outcome] = field(default_factory=Counter)


@dataclass(slots=True)
class Counters:
    """Sums since the start of the daemon."""

    accepted: int = 0
    retried: int = 0
    cut: Counter[str] = field(
        default_factory=Counter
    )  # streams that broke after their first byte, by what became
    queue_rejected: Counter[str] = field(default_factory=Counter)
    connections_refused: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    slots: dict[int, SlotCounters] = field(default_factory=dict)

    @property
    def in_flight(self) -> int:
        """Accepted and not ended."""
        return self.accepted - self.outcomes.total()

    def accept(self, exchange: Exchange) -> None:
        """Count a request on an application route."""
        exchange.counted = True
        self.accepted += 1

    def slot(self, slot: int, model: str) -> SlotCounters:
        """The sums of one slot."""
        found = self.slots.get(slot)
        if found is None or found.model != model:
            found = self.slots[slot] = SlotCounters(model)
        return found

    def end(self, exchange: Exchange, outcome: Outcome) -> None:
        """Count one accepted request's end; a second call for it is a fault of ours."""
        if exchange.outcome is not None:
            raise AssertionError(f"request {exchange.request_id} ended twice")
        exchange.outcome = outcome
        self.outcomes[outcome] += 1
        if exchange.slot is not None and exchange.slot in self.slots:
            self.slots[exchange.slot].outcomes[outcome] += 1
