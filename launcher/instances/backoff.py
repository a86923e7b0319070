"""How long to wait before the next start, and when to stop trying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from launcher.config.schema import Supervision


@dataclass(frozen=True, slots=True)
class Limits:
    """The times and counts that the lifecycle obeys; all in seconds but `crash_limit`."""

    ready_timeout_s: float
    drain_timeout_s: float
    stop_timeout_s: float
    backoff_initial_s: float
    backoff_max_s: float
    crash_window_s: float
    crash_limit: int

    @classmethod
    def of(cls, config: Supervision) -> Limits:
        return cls(
            config.ready_timeout_s, config.drain_timeout_s, config.stop_timeout_s, config.backoff_initial_s,
            config.backoff_max_s, config.crash_window_s, config.crash_limit,
        )  # fmt: skip


# Between two tries of a start for which the daemon itself lacks descriptors, memory or threads.
SHORTAGE_DELAY_S: Final = 5.0
# Up to a fifth is taken off the delay, so that slots that died together do not load together.
JITTER: Final = 0.2


def restart_delay(crash_count: int, jitter: float, limits: Limits) -> float:
    """Seconds before the start after the `crash_count`-th crash (1, 2, …) in the window.

    Doubles from `backoff_initial_s` to `backoff_max_s`; `jitter` in [0, 1) shortens it by up to 20 %."""
    delay = min(limits.backoff_max_s, limits.backoff_initial_s * 2.0 ** min(crash_count - 1, 30))
    return delay * (1 - JITTER * jitter)
