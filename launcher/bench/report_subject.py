"""What the report is about: a result, its loads, and the load that its headline figures are of. Pure."""

from __future__ import annotations

import msgspec

from launcher.bench.figures import GOODPUT, OUTPUT_TOKENS, TOTAL_TOKENS, Runs
from launcher.bench.result import BenchResult


class Subject(msgspec.Struct, frozen=True):
    """A result on the page."""

    letter: str
    """"" where the page has one result."""
    result: BenchResult
    loads: list[Runs]

    @property
    def best(self) -> Runs | None:
        """The load of most goodput, or without an SLO of most output tokens (of embeddings: of all tokens)."""
        usable = [runs for runs in self.loads if runs.usable]
        if not usable:
            return None
        order = GOODPUT, OUTPUT_TOKENS, TOTAL_TOKENS
        return max(usable, key=lambda runs: tuple(runs.value(figure) or 0 for figure in order))

    @property
    def total(self) -> float:
        """Total tokens a second at the best load; 0 without one."""
        return (self.best.value(TOTAL_TOKENS) or 0.0) if self.best else 0.0

    @property
    def per_core(self) -> float | None:
        return self.total / self.result.cores if self.result.cores else None
