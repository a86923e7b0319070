"""The work that is on one instance and not done yet. An engine prefills in the order of arrival."""

from __future__ import annotations

from launcher.proxy.balancing.demand import Ticket


class Load:
    """Outstanding prefill and decode of one instance. Tokens; seconds where it says so."""

    __slots__ = (
        *("_beyond", "decode", "full", "head_since", "pending", "prefill", "surplus"),
        *("ahead", "ahead_s", "waiting", "waiting_s"),
    )

    def __init__(self) -> None:
        self.pending: dict[Ticket, float] = {}  # bound and without a first token, in order -> uncached tokens
        self.prefill = 0.0  # their sum
        self.head_since = 0.0  # when the first of them began to be computed
        self.decode = 0.0  # tokens still to be produced
        self.waiting = 0  # requests in our queue that wait for just this instance
        self.waiting_s = 0.0  # seconds of prefill of those
        self.ahead = 0  # those of them that this pass over the queue has left waiting so far
        self.ahead_s = 0.0  # seconds of prefill of those
        self.surplus = 0  # requests that the instance says it has beyond ours
        self.full = False  # it says that it has no room for what it has already
        self._beyond = 0  # surplus by its last word alone

    def bind(self, ticket: Ticket, uncached: float, now: float) -> None:
        """A request starts here."""
        if not self.pending:
            self.head_since = now
        self.pending[ticket] = uncached
        self.prefill += uncached
        self.decode += ticket.demand.output_tokens

    def first(self, ticket: Ticket, now: float) -> bool:
        """Its prefill is done, and so is that of all bound before it. False: that was known."""
        if ticket not in self.pending:
            return False
        while ticket in self.pending:
            self._done(next(iter(self.pending)))
        self.head_since = now
        return True

    def produced(self, ticket: Ticket, tokens: int) -> None:
        """So many more tokens of its answer have come; `ticket.tokens` does not count them yet."""
        left = max(0, ticket.demand.output_tokens - ticket.tokens)
        self.decode = max(0.0, self.decode - min(left, tokens))

    def leave(self, ticket: Ticket, now: float) -> None:
        """The request has left, whichever way."""
        if ticket in self.pending:
            if next(iter(self.pending)) is ticket:
                self.head_since = now
            self._done(ticket)
        self.produced(ticket, ticket.demand.output_tokens)
        self.full = False

    def remaining_s(self, now: float, token_s: float) -> float:
        """Seconds of prefill left, at `token_s` seconds per token; what the first has got is counted off.

        The first byte of an answer that is not streamed does not tell when its prefill ended: its time tells.
        """
        while self.pending:
            ticket, tokens = next(iter(self.pending.items()))
            head = tokens * token_s
            since = now - self.head_since
            if since < head:
                return self.prefill * token_s - since
            if ticket.demand.stream:
                return (self.prefill - tokens) * token_s
            self.head_since += head
            self._done(ticket)
        return 0.0

    def expect(self, work_s: float) -> None:
        """One more in our queue waits for just this instance, with so much prefill."""
        self.waiting += 1
        self.waiting_s += work_s

    def expect_no_more(self, work_s: float) -> None:
        """One of those waits for it no longer."""
        self.waiting -= 1
        self.waiting_s = self.waiting_s - work_s if self.waiting else 0.0  # no rounding is carried on

    def told(self, requests: int, ours: int, *, full: bool) -> None:
        """The instance says what it works on; one word alone may be older than what we have done since."""
        beyond = max(0, requests - ours)
        self.surplus = min(beyond, self._beyond)
        self._beyond = beyond
        self.full = full

    def _done(self, ticket: Ticket) -> None:
        self.prefill -= self.pending.pop(ticket)
        if not self.pending:
            self.prefill = 0.0  # no rounding is carried on
