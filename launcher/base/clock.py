"""Time for decisions about money and deletion: the wall clock, compared with elapsed time.

The wall clock can be set: by an operator, by NTP after a start without a battery, in a virtual machine after a pause. Who
counts spending in a period, deletes what is old, or bills seconds asks `Clock`, and obeys three rules after a step:

- what was counted in a period counts on until the time that the period had left has elapsed: `Period`;
- nothing is deleted by a time that the clock was only set to, for a week: `Clock.delete_before`;
- seconds are differences of `Moment.steady`.

What is shown or entered has the wall clock's time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from launcher.base.files import replace_file

# A difference between the two clocks beyond this, between two readings, is a step: NTP steps by more than 0.128 s (ntpd)
# or at all only at its start (chrony), and slews anything less.
STEP_S: Final = 5.0
# Of the time between two readings: chrony slews by up to 8.3 % (maxslewrate).
_SLEW: Final = 0.1
SETTLED_S: Final = 600.0
"""Nothing is deleted until the clock has not been set for so long, the time since the start included."""
BELIEVED_S: Final = 7 * 86_400.0
"""A time that the clock was set to is the right one once nobody has set it again for so long."""
# Rounding errors of floats at Unix times are some 0.1 µs.
_ROUNDING_S: Final = 0.001

_LOG = logging.getLogger(__name__)


def boot_time() -> float:
    """Seconds since the machine's start, those in suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Moment(NamedTuple):
    wall: float
    """Unix time as the machine has it now."""
    steady: float
    """Unix time as it would be had the clock not been set since the start: it never jumps and never falls."""
    steps: int = 0
    """How often the clock was set since the start."""

    @property
    def was_set(self) -> bool:
        """Whether the wall clock has another time than it would have had."""
        return abs(self.wall - self.steady) > STEP_S


class Reading(NamedTuple):
    """State of a clock; the next process of the same start of the machine begins with it. In seconds since that start, or
    by which Unix time is ahead of them."""

    at: float
    ahead: float
    believed_ahead: float
    settled_from: float


class Clock:
    """One for a process; any thread may read it. To be read every minute or more often: a longer gap hides small steps."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = boot_time,
        last: Reading | None = None,
    ) -> None:
        """`last`: of the process before. A clock that was set since is a step."""
        self._wall, self._elapsed = wall, elapsed
        self._lock = threading.Lock()
        now = elapsed()
        if last is None or last.at > now:
            ahead = wall() - now
            last = Reading(now, ahead, ahead, now)
        self._read_at, self._ahead, self._believed_ahead, self._settled_from = last
        self._steady_ahead = last.ahead
        self._steps = 0

    @property
    def reading(self) -> Reading:
        """The last one."""
        with self._lock:
            return Reading(self._read_at, self._ahead, self._believed_ahead, self._settled_from)

    def now(self) -> Moment:
        with self._lock:
            at, wall = self._elapsed(), self._wall()
            change = wall - at - self._ahead
            if abs(change) <= STEP_S + _SLEW * (at - self._read_at):
                self._steady_ahead += change
                self._believed_ahead += change
            else:
                self._steps += 1
                self._settled_from = at
                _LOG.warning(
                    "the system clock was set %s by %.0f s: nothing old is deleted for %.0f s, and budgets count on",
                    "forward" if change > 0 else "back", abs(change), SETTLED_S,
                )  # fmt: skip
            self._read_at = at
            self._ahead = wall - at
            if at - self._settled_from >= BELIEVED_S:
                self._believed_ahead = self._ahead
            return Moment(wall, self._steady_ahead + at, self._steps)

    def wall(self) -> float:
        """Unix time, for what is entered or shown."""
        return self._wall()

    def delete_before(self, kept_s: float) -> float | None:
        """What is older than this Unix time may be deleted; None: nothing, the clock was set a moment ago."""
        now = self.now()
        last = self.reading
        if last.at - last.settled_from < SETTLED_S:
            return None
        return min(now.wall, last.believed_ahead + last.at) - kept_s


Bounds = Callable[[float], tuple[int, int]]
"""Begin (inclusive) and end (exclusive) of the period around a Unix time."""


class Period:
    """The period [begin, end) around the wall clock's time, in which something is counted.

    When the clock is set, `move` waits for the owner to read the sums of the period that the clock is in now. Until the
    time that the period before had left has elapsed, the new one `carries`: what was counted before counts on. So neither a
    wrong clock nor its correction makes an amount available twice, and a period that a wrong clock began has no effect
    longer than it would last."""

    __slots__ = ("_bounds", "_until", "begin", "carries", "end", "steps")

    def __init__(self, bounds: Bounds, now: Moment) -> None:
        """If the clock was set before `now`, this is the period that it was set from, and waits for its sums."""
        self._bounds = bounds
        self.begin, self.end = bounds(now.steady)
        self._until = float(self.end)
        self.carries = False
        self.steps = now.steps if self.begin <= now.wall < self.end else now.steps - 1

    def is_due(self, now: Moment) -> bool:
        """Whether to `move` now; False while the sums must be read because the clock was set."""
        return now.steps == self.steps and (
            not self.begin <= now.wall < self.end or (self.carries and self._is_over(now))
        )

    def move(self, now: Moment) -> bool:
        """To the period around the wall clock's time. True: what was counted before does not count any longer."""
        self.steps = now.steps
        inside = self.begin <= now.wall < self.end
        if inside and not (self.carries and self._is_over(now)):
            return False
        if not inside:
            self.begin, self.end = self._bounds(now.wall)
        self.carries = not self._is_over(now)
        if not self.carries:
            self._until = now.steady + (self.end - now.wall)
        return not self.carries

    def _is_over(self, now: Moment) -> bool:
        return now.steady >= self._until - _ROUNDING_S


# --- The clock's last reading, kept for the daemon's next process: a restart while the clock is wrong opens no new
# periods, and deletes nothing. A reading of an earlier start of the machine says nothing.

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class _Kept(msgspec.Struct):
    boot: str
    reading: Reading


def load_reading(path: Path, boot_id: Path = _BOOT_ID) -> Reading | None:
    """None: there is none of this start of the machine."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
        return kept.reading if kept.boot == boot_id.read_text().strip() else None
    except (OSError, ValueError):
        return None


def store_reading(path: Path, reading: Reading, boot_id: Path = _BOOT_ID) -> None:
    """Raises OSError."""
    kept = _Kept(boot_id.read_text().strip(), reading)
    replace_file(path, msgspec.json.encode(kept), folder_mode=0o755)
