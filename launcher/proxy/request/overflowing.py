"""Whether a request goes to an overflow endpoint, to the next one, or back to the queue here."""

from __future__ import annotations

from typing import Protocol

from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.openai.stream_options import UsageAsk
from launcher.proxy.request.actions import OverflowReason, State
from launcher.proxy.request.model_traits import ModelTraits
from launcher.proxy.request.record import Request

# Of a request that is written again, for a continuation or the overflow endpoint: up to 40 ms.
MAX_REWRITTEN_BYTES = 8 << 20


class Overflow(Protocol):
    def takes(self, request: Request, reason: OverflowReason, now: float) -> str | None:
        """Name of the overflow endpoint that a request may be sent to now; None: it stays here."""


class Overflowing:
    """Changes the request where it goes."""

    def __init__(self, overflow: Overflow | None, traits: ModelTraits) -> None:
        self._overflow = overflow
        self._traits = traits

    def starts(self, request: Request, reason: OverflowReason, now: float) -> bool:
        """Whether an overflow endpoint takes it. A head that went out was that of another response."""
        if self._overflow is None or request.head_sent or request.adapter is not None:
            return False
        if len(request.body) > MAX_REWRITTEN_BYTES:
            return False
        endpoint = self._overflow.takes(request, reason, now)
        if endpoint is None:
            return False
        request.ticket = None
        request.overflow, request.overflow_reason = endpoint, reason
        if not self._traits.asks_usage(request.model, endpoint):
            request.usage_ask = UsageAsk.NO
        request.state = State.SENT
        return True

    def continues(self, request: Request, now: float) -> bool:
        """Whether another overflow endpoint takes what one did not answer."""
        reason = request.overflow_reason
        return reason is not None and not request.committed and self.starts(request, reason, now)

    @staticmethod
    def stays(request: Request, ticket: Ticket | None) -> bool:
        """Whether it can be queued here after all, with the ticket that it had: it was predicted to be late."""
        if ticket is None:
            return False
        ticket.limit_s = request.local_ticket = None
        request.ticket, request.state = ticket, State.QUEUED
        request.overflow, request.overflow_reason = "", None
        return True
