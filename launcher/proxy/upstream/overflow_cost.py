"""What requests at one overflow endpoint cost: reserved before they are sent, settled by what the endpoint says."""

from __future__ import annotations

import datetime as dt
import logging
from typing import Final

from launcher.config.schema import Overflow
from launcher.money import TokenPrices, to_text, token_prices
from launcher.proxy.openai.token_bounds import MAX_TOKENS, SaidUsage, TokenBounds
from launcher.usage.daily_cap import DailyCap

_LOG = logging.getLogger(__name__)
_NO_OUTPUT: Final = frozenset({"/v1/embeddings"})


def has_output(path: str) -> bool:
    """Whether responses of a route have output tokens."""
    return path not in _NO_OUTPUT


def prices_of(settings: Overflow) -> TokenPrices | None:
    if settings.input is None or settings.output is None:
        return None
    return token_prices(settings.input, settings.output, settings.cached)


class OverflowCost:
    """Prices and daily cap of one endpoint. Amounts in picos."""

    def __init__(self, settings: Overflow, cap: DailyCap | None) -> None:
        """`cap`: None where `max_per_day` is not set. An endpoint with `max_per_day` but without a cap is never used."""
        self._name = settings.endpoint
        self.prices = prices_of(settings)
        self.cap = cap
        self._closed = cap is None and settings.max_per_day is not None
        self.most_output = settings.max_output_tokens
        self.spent = 0
        """Of the requests that ended."""
        self.refused = 0
        """Requests that the cap kept here."""
        self.odd = 0
        """Responses whose usage is missing or impossible: they cost what was reserved."""
        self.exceeded = 0
        """Responses that cost more than was reserved."""

    def bound(self, path: str, tokens: TokenBounds) -> int:
        """The most that a request may cost."""
        prices = self.prices
        if prices is None:
            return 0
        each = self.most_output if tokens.output is None else tokens.output
        output = min(tokens.choices * each, MAX_TOKENS) if has_output(path) else 0
        return tokens.prompt * max(prices.prompt, prices.cached) + output * prices.output

    def admits(self, amount: int) -> bool:
        """Whether the cap leaves so much. A refusal is counted, the day's first one is said."""
        cap = self.cap
        if cap is None and not self._closed:
            return True
        if cap is not None and cap.admits(amount):
            return True
        self.refused += 1
        if cap is not None and cap.refuse():
            self._say_reached(cap)
        return False

    def reserve(self, amount: int) -> None:
        if self.cap is not None:
            self.cap.reserve(amount)

    def settle(self, reserved: int, amount: int) -> None:
        self.spent += amount
        if self.cap is not None:
            self.cap.settle(reserved, amount)

    def of(self, path: str, tokens: TokenBounds, reserved: int, said: SaidUsage | None) -> int | None:
        """What a response cost by its usage; None where that is missing, or more than the request allowed."""
        prices = self.prices
        if prices is None:
            return 0
        if said is None or said.prompt > tokens.prompt:
            return None
        if tokens.output is not None and has_output(path) and said.output > tokens.output * tokens.choices:
            return None
        amount = prices.amount(said.prompt, said.cached, said.output)
        if amount > reserved:
            self._note_exceeded()
        return amount

    def note_odd(self) -> None:
        self.odd += 1
        if self.odd == 1:
            _LOG.warning(
                "overflow endpoint %s: a response says no usage, or more than its request allowed; such responses count at "
                "the most that they may cost",
                self._name, extra={"endpoint": self._name},
            )  # fmt: skip

    def _note_exceeded(self) -> None:
        self.exceeded += 1
        if self.exceeded == 1:
            _LOG.warning(
                "overflow endpoint %s: a response cost more than was reserved; raise its max_output_tokens, which is %d",
                self._name, self.most_output, extra={"endpoint": self._name},
            )  # fmt: skip

    def tick(self, wall: float) -> None:
        """Begin the next day at midnight; `wall`: Unix time."""
        cap = self.cap
        if cap is None or wall < cap.ends:
            return
        stopped = cap.reached or not cap.known
        cap.next_day(wall)
        if stopped:
            _LOG.info(
                "overflow endpoint %s: available again, a new day began", self._name,
                extra={"endpoint": self._name},
            )  # fmt: skip

    def _say_reached(self, cap: DailyCap) -> None:
        until = dt.datetime.fromtimestamp(cap.ends, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        settled, reserved, most = (
            to_text(amount, cap.currency) for amount in (cap.settled, cap.reserved, cap.cap)
        )
        why = (
            f"its max_per_day is spent or reserved ({settled} spent, {reserved} reserved, of {most})"
            if cap.known
            else "what it cost today is not known, because the usage ledger cannot be read"
        )
        _LOG.warning(
            "overflow endpoint %s: %s; its requests stay here until %s", self._name, why, until,
            extra={"endpoint": self._name},
        )  # fmt: skip
