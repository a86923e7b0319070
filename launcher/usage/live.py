"""Live figures of cost: what the machine has cost since the daemon's start, and what tokens cost in the last hour. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from launcher.config.usage_schema import Cost
from launcher.usage.bill import HOUR_S, bill
from launcher.usage.compare import per_million, units
from launcher.usage.cost import Observed


@dataclass(frozen=True, slots=True, kw_only=True)
class CostNow:
    """Costs in the currency's unit."""

    currency: str
    """Currency of [cost]."""
    per_million_output: float | None
    """Allocated cost of a million output tokens in `seconds`; null if there were none."""
    seconds: int
    """The last hour, or less after a start of the daemon."""
    today: float | None
    """Bill since midnight in the zone of [usage], or since the ledger's begin; null if the ledger cannot be read."""
    today_utilisation: float | None
    """Share of the slots' time with requests, since then; null if unknown."""


class _Sample(NamedTuple):
    at: int  # Unix seconds
    spent: int  # picos
    output_tokens: int


class Meter:
    """Counts the bill up, second by second, so that a new price applies from now on only."""

    def __init__(self, now: float) -> None:
        self._counted_until = int(now)
        self.spent = 0
        """Picos since the start."""
        self._samples: deque[_Sample] = deque()

    def count(self, cost: Cost, now: float, joules: float | None = None) -> None:
        """`joules`: measured since the last count."""
        seconds = max(0, int(now) - self._counted_until)
        self._counted_until += seconds
        self.spent += bill(cost, seconds, joules).total

    def sample(self, now: float, output_tokens: int) -> None:
        """`output_tokens`: served here since some fixed time."""
        if self._samples and output_tokens < self._samples[-1].output_tokens:
            self._samples.clear()  # the ledger began again: its file was broken
        self._samples.append(_Sample(int(now), self.spent, output_tokens))
        while len(self._samples) > 2 and self._samples[1].at <= int(now) - HOUR_S:
            self._samples.popleft()

    def now(self, cost: Cost, today: Observed | None) -> CostNow:
        """`today`: the ledger's sums since midnight."""
        busy = None if today is None or today.busy_s is None else min(1.0, today.busy_s / today.seconds)
        first, last = self._ends()
        return CostNow(
            currency=cost.currency,
            per_million_output=per_million(
                last.spent - first.spent, last.output_tokens - first.output_tokens
            ),
            seconds=last.at - first.at,
            today=None if today is None else units(bill(cost, today.seconds, today.joules).total),
            today_utilisation=busy,
        )

    def _ends(self) -> tuple[_Sample, _Sample]:
        return (self._samples[0], self._samples[-1]) if self._samples else (_EMPTY, _EMPTY)


_EMPTY: Final = _Sample(0, 0, 0)
