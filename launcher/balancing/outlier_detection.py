"""Which instances may get requests, and how many: ejection, half-open return (as in Envoy), stragglers."""

from __future__ import annotations

from typing import Final

from launcher.balancing.estimators import Mean

# Times slower than the siblings' median: more than the noise of one machine. Below RECOVERED it is a sibling again.
STRAGGLER: Final = 1.5
RECOVERED: Final = 1.2
# First tokens seen before an instance is judged.
ENOUGH: Final = 20


class OutlierDetection:
    """Failures in a row and slowness of one instance, and what follows from them."""

    def __init__(self) -> None:
        # Ejection. Failures in a row; after the pause (half open) a single request tries the instance: its ticket number.
        self.failures: int = 0
        self.ejected_until: float | None = None
        self.half_open: bool = False
        self.trial: int | None = None
        # Stragglers. Measured time to the first token over the time expected from its siblings' speed.
        self.slowness: Mean = Mean(1.0, 50)
        self.straggler: bool = False

    @property
    def out(self) -> bool:
        """Whether it is ejected, or only a trial may use it."""
        return bool(self.ejected_until) or self.half_open

    @property
    def admits(self) -> bool:
        """Whether it may get a request."""
        return self.ejected_until is None and not (self.half_open and self.trial is not None)

    def end_pause(self, now: float) -> None:
        """Half open, once the time of its ejection is over."""
        if self.ejected_until is not None and now >= self.ejected_until:
            self.ejected_until = None
            self.half_open = True
            self.trial = None

    def bound(self, number: int) -> None:
        """A request starts on it: the trial, when it is half open."""
        if self.half_open:
            self.trial = number

    def left(self, number: int) -> None:
        """A request has left it. If that was the trial, another one may try."""
        if self.trial == number:
            self.trial = None

    def eject(self, until: float) -> None:
        """No requests until then; after that a single request tries it."""
        self.ejected_until = until
        self.half_open = False

    def responded(self) -> None:
        """It answers: back in full rotation, but earlier failures still count."""
        self.half_open = False

    def succeeded(self) -> None:
        """It gave a whole answer: earlier failures no longer count."""
        self.failures = 0
        self.half_open = False

    def failed(self, now: float, limit: int, pause_s: float) -> bool:
        """A request failed through its fault. True when that ejects it: `limit` in a row, or the trial."""
        self.failures += 1
        if self.failures < limit and not self.half_open:
            return False
        self.eject(now + pause_s)
        return True

    def judge(self, median: float) -> bool:
        """Compare with the siblings' median slowness. True when the verdict has changed."""
        ratio = self.slowness.value / median if median > 0.0 else 1.0
        lags = ratio >= RECOVERED if self.straggler else self.slowness.count >= ENOUGH and ratio > STRAGGLER
        changed = lags is not self.straggler
        self.straggler = lags
        return changed

    @property
    def weight(self) -> float:
        """The share of a sibling's load that it gets: less than 1 for a straggler."""
        return 1.0 / max(1.0, self.slowness.value) if self.straggler else 1.0
