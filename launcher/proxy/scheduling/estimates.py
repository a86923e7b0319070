"""What is learned by watching: means, a line, a rate. Each forgets, so a changed machine is learned anew."""

from __future__ import annotations

from math import exp

PREFILL = (0.05, 0.001)  # first token after 50 ms + 1 ms per prompt token, until some have been seen
TYPICAL_PROMPT = 500.0  # tokens; how far from 0 that guess is meant
WINDOW_S = 30.0  # of the rates at which work comes and goes


class Mean:
    """Mean of the last samples, each new one weighing at least 1/`memory`; `prior` until there are some."""

    __slots__ = ("_memory", "count", "value")

    def __init__(self, prior: float, memory: int) -> None:
        self.value = prior
        self.count = 0
        self._memory = memory

    def add(self, sample: float) -> None:
        """One more."""
        self.count += 1
        self.value += (sample - self.value) / min(self.count, self._memory)


class Line:
    """y = base + slope * x, least squares over about the last `memory` samples, both never negative.

    `prior` is (base, slope); it weighs as two samples at x = 0 and x = `scale`, and fades like any other.
    """

    __slots__ = ("_keep", "_n", "_x", "_xx", "_xy", "_y", "base", "count", "slope")

    def __init__(self, prior: tuple[float, float], scale: float, memory: int) -> None:
        self.base, self.slope = prior
        self.count = 0
        self._keep = 1.0 - 1.0 / memory
        self._n, self._x, self._xx = 2.0, scale, scale * scale
        end = self.base + self.slope * scale
        self._y, self._xy = self.base + end, scale * end

    def add(self, x: float, y: float) -> None:
        """One more pair."""
        keep = self._keep
        self.count += 1
        self._n = n = self._n * keep + 1.0
        self._x = sx = self._x * keep + x
        self._y = sy = self._y * keep + y
        self._xx = xx = self._xx * keep + x * x
        self._xy = xy = self._xy * keep + x * y
        spread = n * xx - sx * sx
        if spread <= 1e-9 * n * xx or xx <= 0.0:
            return  # all x alike: no slope can be told
        slope = (n * xy - sx * sy) / spread
        base = (sy - slope * sx) / n
        if base < 0.0 or slope <= 0.0:  # through the origin
            base, slope = 0.0, xy / xx
        self.base, self.slope = base, slope

    def at(self, x: float) -> float:
        """y for x."""
        return self.base + self.slope * x


class Rate:
    """Events, or amounts, per second over about the last `window_s` seconds."""

    __slots__ = ("_count", "_last", "_since", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._count = 0.0
        self._since: float | None = None
        self._last = 0.0

    def add(self, now: float, amount: float = 1.0) -> None:
        """One more, now."""
        if self._since is None:
            self._since = self._last = now
        self._count = self._count * exp((self._last - now) / self._window_s) + amount
        self._last = now

    def per_s(self, now: float) -> float:
        """The rate; 0.0 while there was none. A young one is not mistaken for a slow one."""
        if self._since is None:
            return 0.0
        seen = max(1.0, now - self._since)
        covered = self._window_s * (1.0 - exp(-seen / self._window_s))
        return self._count * exp((self._last - now) / self._window_s) / covered
