"""A clock that a test moves and sets by hand."""

from __future__ import annotations

from launcher.base.clock import SETTLED_S, Clock, Moment, Reading

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
# Two hours, a month and a half, three years.
STEPS_S = tuple(sign * size for size in (2 * HOUR_S, 45 * DAY_S, 3 * 365 * DAY_S) for sign in (1, -1))


class HandClock(Clock):
    def __init__(self, now: float, elapsed_s: float = 1000.0, last: Reading | None = None) -> None:
        self.at = now
        self.elapsed_s = elapsed_s
        super().__init__(lambda: self.at, lambda: self.elapsed_s, last)

    def restarted(self) -> HandClock:
        """That of the next process."""
        return HandClock(self.at, self.elapsed_s, self.reading)

    def wait(self, seconds: float) -> None:
        """Time passes, and somebody reads the clock each minute or so."""
        while seconds > 0:
            part = min(seconds, HOUR_S)
            self.at += part
            self.elapsed_s += part
            seconds -= part
            self.now()

    def settle(self) -> None:
        self.wait(SETTLED_S)

    def set_by(self, seconds: float) -> Moment:
        """An operator, or NTP, sets the wall clock."""
        self.at += seconds
        return self.now()


def at(now: float) -> Moment:
    """A moment of a clock that nobody set."""
    return Moment(now, now)
