"""The histograms, and the last times to the first token. A request pays for three observations, a stream for five."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable
from functools import partial
from typing import Final

from launcher.telemetry.quantiles import RollingQuantiles

# --- A histogram that a request pays a bisection for; prometheus_client only renders it. ---


class Histogram:
    """Counts of observations by upper bound, and their sum."""

    __slots__ = ("bounds", "counts", "created", "help", "name", "sum")

    def __init__(self, name: str, help_: str, bounds: tuple[float, ...], created: float) -> None:
        """`bounds`: ascending, without +Inf. `created`: seconds since the epoch."""
        self.name = name
        self.help = help_
        self.bounds: list[float] = list(bounds)
        # Of each bound, and of what is above all of them.
        self.counts: list[int] = [0] * (len(bounds) + 1)
        self.sum: float = 0.0
        self.created = created

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


class Histograms:
    """One histogram for each value of a label."""

    __slots__ = ("_bounds", "_created", "_found", "help", "label", "name")

    def __init__(
        self, name: str, help_: str, bounds: tuple[float, ...], created: float, *, label: str
    ) -> None:
        self.name = name
        self.help = help_
        self.label = label
        self._bounds = bounds
        self._created = created
        self._found: dict[str, Histogram] = {}

    def of(self, value: str) -> Histogram:
        found = self._found.get(value)
        if found is None:
            found = self._found[value] = Histogram(self.name, self.help, self._bounds, self._created)
        return found

    def items(self) -> Iterable[tuple[str, Histogram]]:
        return self._found.items()


# Seconds: from a cached answer to a long generation.
_DURATION_BUCKETS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
# Powers of two, 16 ms to 512 s: bounds of native histograms of every resolution, so a change to those keeps them.
FIRST_TOKEN_BOUNDS: Final = tuple(2.0**power for power in range(-6, 10))


class Timings:
    """The histograms, and the last times to the first token."""

    def __init__(self) -> None:
        created = time.time()
        make = partial(Histogram, bounds=_DURATION_BUCKETS, created=created)
        self.queued = make(
            "numa_launcher_queue_seconds", "Time from a request's arrival to its start on an instance."
        )
        self.first_byte = make(
            "numa_launcher_first_byte_seconds",
            "Time from a request's arrival to the first byte of its response, of a stream to its first token; of requests "
            "that end as completed or client_aborted.",
        )
        self.duration = make(
            "numa_launcher_request_duration_seconds",
            "Time from a request's arrival to its end; of requests that end as completed.",
        )
        self.prediction_error = make(
            "numa_launcher_ttft_prediction_error_seconds",
            "Difference between the time to the first token that was predicted when a stream arrived and the measured one.",
        )
        self.first_tokens = Histograms(
            "numa_launcher_first_token_seconds",
            "Time from a stream's arrival to its first token, time in the queue included; of streams only.",
            FIRST_TOKEN_BOUNDS,
            created,
            label="model",
        )
        self.first_token = RollingQuantiles()  # by slot, of streams: for `status`, no metric

    def all(self) -> tuple[Histogram | Histograms, ...]:
        return (self.queued, self.first_byte, self.prediction_error, self.first_tokens, self.duration)

    def take_first_token(self, slot: int | None, model: str, seconds: float, now: float) -> None:
        """Of a stream. `now`: the event loop's time."""
        self.first_token.take(slot, seconds, now)
        self.first_tokens.of(model).observe(seconds)
