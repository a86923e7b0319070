"""How long a search takes: before its first visit, and corrected by every one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.tuning.model import Candidate, Settings, Verdict, VisitResult
from launcher.tuning.search import replay


@dataclass(frozen=True, slots=True)
class Forecast:
    """The visits that may follow, at most: losers that leave early make the search shorter."""

    visits: int
    visit_s: float
    """One visit: a start and its measurements."""

    @property
    def seconds(self) -> float:
        return self.visits * self.visit_s


def forecast(history: Sequence[VisitResult], candidates: Sequence[Candidate], settings: Settings) -> Forecast:
    """From the last measured starts and measurements; before the first visit from the settings' assumptions."""
    search, step = replay(history, candidates, settings)
    allowance = search.allowance
    return Forecast(0 if isinstance(step, Verdict) else allowance.to_come, allowance.visit_s)
