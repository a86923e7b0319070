"""The sums over all requests. accepted = the four outcomes + in flight."""

from __future__ import annotations

from collections import Counter

from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.record import Request


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
