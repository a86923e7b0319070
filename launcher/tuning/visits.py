"""What the runner needs of a way to measure: a candidate that starts, and its measurements."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from launcher.tuning.model import Candidate, Measurement, Visit


class NotStartedError(Exception):
    """The candidate did not become ready. The text is the cause."""


class MeasurementFailedError(Exception):
    """A repeat gave no figures. The text is the cause."""


class Session(Protocol):
    """A candidate that has started."""

    def measure(self, repeat: int, seed: int) -> Measurement:
        """Raises MeasurementFailedError."""


class Visits(Protocol):
    def start(self, candidate: Candidate, visit: Visit) -> AbstractContextManager[Session]:
        """The candidate runs within the context; raises NotStartedError."""
