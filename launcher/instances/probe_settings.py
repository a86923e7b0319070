"""How often an instance is probed, and when a probe or its silence counts against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from launcher.config.schema import Config

# Between two probes of a loading instance.
READY_POLL_S: Final = 0.5
# Added to the interval and to the probes' own limits: a probe this late is missing, not slow.
UNWATCHED_S: Final = 30.0
# Between the first and the second negative answer of the health path.
RECHECK_S: Final = 0.5
# Between two looks at where the threads may run; one takes about 5 us for each thread.
THREADS_INTERVAL_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Times in seconds."""

    probe_interval_s: float
    tail_lines: int
    """Lines of output kept for each slot."""
    ready_poll_s: float = READY_POLL_S
    recheck_s: float = RECHECK_S
    stall_timeout_s: float = 120.0
    canary_interval_s: float = 300.0
    verify_interval_s: float = 300.0
    threads_interval_s: float = THREADS_INTERVAL_S
    probe_timeout_s: float = 10.0

    @classmethod
    def of(cls, config: Config) -> Self:
        supervision = config.supervision
        return cls(
            supervision.probe_interval_s, config.logging.tail_lines,
            stall_timeout_s=supervision.stall_timeout_s, canary_interval_s=supervision.canary_interval_s,
            verify_interval_s=supervision.verify_interval_s, probe_timeout_s=supervision.probe_timeout_s,
        )  # fmt: skip

    @property
    def unwatched_s(self) -> float:
        """An instance whose last successful probe is older than this is not being watched."""
        return self.probe_interval_s + 2 * self.probe_timeout_s + UNWATCHED_S
