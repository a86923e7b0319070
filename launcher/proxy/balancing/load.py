"""The unfinished work of one instance. An engine prefills in the order of arrival."""

from __future__ import annotations


class Load:
    """Outstanding prefill of one instance, and who waits for it. Tokens; seconds where the name ends in `_s`."""

    def __init__(self) -> None:
        # Requests without a first token, in the order in which they were bound: ticket number -> (uncached tokens, stream).
        self.pending: dict[int, tuple[float, bool]] = {}
        # The sum of their uncached tokens, and when the prefill of the first of them began.
        self.prefill: float = 0.0
        self.head_since: float = 0.0
        self.last_first: float | None = None  # when its last first token came
        # Ticket number -> when it was bound, or had its first token, and the tokens that its response is expected to have.
        self.running: dict[int, tuple[float, int]] = {}
        # When its last request ended, and since when it has run as many as it can (None: it runs fewer).
        self.last_end: float | None = None
        self.full_since: float | None = None
        # Queued requests that wait for just this instance, and how many of them this pass over the queue has left waiting.
        self.waiting: int = 0
        self.waiting_s: float = 0.0
        self.ahead: int = 0
        self.ahead_s: float = 0.0
        # Requests the instance reports beyond the proxy's own: in its last two reports, and in its last one.
        self.surplus: int = 0
        self._beyond: int = 0
        self.full: bool = False  # the instance reports that its KV cache is too small for the requests it has

    def bind(self, number: int, uncached: float, now: float, output_tokens: int = 0, *, stream: bool) -> None:
        self.running[number] = (now, output_tokens)
        if not self.pending:
            self.head_since = now
        self.pending[number] = (uncached, stream)
        self.prefill += uncached

    def first_token(self, number: int, now: float) -> bool:
        """Its prefill is done, and so is that of all bound before it. False: that was known."""
        if (found := self.running.get(number)) is not None:
            self.running[number] = (now, found[1])
        if number not in self.pending:
            return False
        while number in self.pending:
            self._remove(next(iter(self.pending)))
        self.head_since = now
        return True

    def leave(self, number: int, now: float) -> None:
        self.running.pop(number, None)
        if number in self.pending:
            if next(iter(self.pending)) == number:
                self.head_since = now
            self._remove(number)
        self.full = False

    def pending_streams(self) -> int:
        return sum(stream for _, stream in self.pending.values())

    def remaining_s(self, now: float, token_s: float) -> float:
        """Seconds of prefill left at `token_s` seconds per token; time already spent on the first is subtracted.

        The first byte of an answer that is not streamed does not mark the end of its prefill: elapsed time does.
        """
        while self.pending:
            number, (tokens, stream) = next(iter(self.pending.items()))
            head = tokens * token_s
            since = now - self.head_since
            if since < head:
                return self.prefill * token_s - since
            if stream:
                return (self.prefill - tokens) * token_s
            self.head_since += head
            self._remove(number)
        return 0.0

    def expect(self, prefill_s: float) -> None:
        self.waiting += 1
        self.waiting_s += prefill_s

    def expect_no_more(self, prefill_s: float) -> None:
        self.waiting -= 1
        # Rounding errors must not add up.
        self.waiting_s = self.waiting_s - prefill_s if self.waiting else 0.0

    def reported(self, requests: int, ours: int, *, full: bool) -> None:
        """The instance reports its requests. A single report may be older than what the proxy has done since."""
        beyond = max(0, requests - ours)
        self.surplus = min(beyond, self._beyond)
        self._beyond = beyond
        self.full = full

    def _remove(self, number: int) -> None:
        self.prefill -= self.pending.pop(number)[0]
        if not self.pending:
            self.prefill = 0.0  # rounding errors must not add up
