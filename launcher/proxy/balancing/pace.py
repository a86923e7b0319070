"""What predictions of first tokens learn about the instances of one model. Times in seconds; prompts in estimated tokens."""

from __future__ import annotations

from typing import Final

from launcher.proxy.balancing.cost_model import KNOWN, OUTPUT, TOKEN_S
from launcher.proxy.balancing.estimators import LinearFit, Mean, Quantile, RelativeFit
from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.balancing.upstreams import Upstream

# Between a first token and the next request's start: the same turn of the event loop.
SAME_TURN_S: Final = 0.001
# Part of the first tokens that come no later than a prediction "at worst". At the start: 30 % later.
WORST: Final = 0.98
KNOWN_TURNS: Final = 20  # ends seen before the time between them is trusted
WORST_PRIOR: Final = 1.3


class Pace:
    """All instances of a model; one that lags its siblings counts in their speed."""

    def __init__(self) -> None:
        # First tokens of prefills that had no other before them, over tokens.
        self._alone: RelativeFit = RelativeFit()
        # From one first token to the next of an instance that had no pause in between, over tokens.
        self._busy: LinearFit = LinearFit(memory=100)
        # From one end to the next of an instance that runs as many as it can.
        self._turn_s: Mean = Mean(0.0, 100)
        self.step_s: Mean = Mean(TOKEN_S, 50)
        self.output_tokens: Mean = Mean(OUTPUT, 100)  # that those bound of late are expected to have
        # Measured ÷ predicted of those that were queued: the median before its correction, the worst after it.
        self.median: Quantile = Quantile(0.5, 1.0, 0.03, 0.4, 2.5)
        self.worst: Quantile = Quantile(WORST, WORST_PRIOR, 0.1, 1.0, 3.0)

    def alone(self, upstream: Upstream) -> tuple[float, float]:
        """Base and seconds per token of a prefill that begins at once."""
        found = self._alone if self._alone.count >= KNOWN else upstream.fit
        return found.base * upstream.lag, found.slope * upstream.lag

    def busy(self, upstream: Upstream) -> tuple[float, float]:
        """The same of one that follows others without a pause."""
        found = self._busy if self._busy.count >= KNOWN else upstream.fit
        return found.base * upstream.lag, found.slope * upstream.lag

    def place_s(self, upstream: Upstream) -> float:
        """How long a request keeps its place on an instance that runs as many as it can."""
        if self._turn_s.count >= KNOWN_TURNS:
            return self._turn_s.value * upstream.max_num_seqs * upstream.lag
        return self.step_s.value * self.output_tokens.value

    def seen_free_place(self, upstream: Upstream, now: float) -> None:
        """One of its requests has left it."""
        load = upstream.load
        last, since = load.last_end, load.full_since
        if last is not None and since is not None and since <= last + SAME_TURN_S:
            self._turn_s.add((now - last) / upstream.lag)
        load.last_end, load.full_since = now, None

    def seen_first_token(
        self, ticket: Ticket, upstream: Upstream, began: float, tokens: float, now: float
    ) -> None:
        """`began`: since when that instance worked on these `tokens`, its own and those of others before it."""
        lag, last = upstream.lag, upstream.load.last_first
        upstream.load.last_first = now
        if ticket.work == ticket.uncached:
            self._alone.add(ticket.uncached, (now - ticket.bound_at) / lag)
        if last is not None and 0.0 <= began - last <= SAME_TURN_S:
            self._busy.add(tokens, (now - last) / lag)
        if ticket.unscaled_s and ticket.predicted_s and not ticket.tried:
            took = now - ticket.arrived
            self.median.add(took / ticket.unscaled_s)
            self.worst.add(took / ticket.predicted_s)

    def seen_end(self, ticket: Ticket, now: float) -> None:
        if ticket.tokens > 1 and ticket.first_token_at is not None:
            self.step_s.add((now - ticket.first_token_at) / (ticket.tokens - 1))
