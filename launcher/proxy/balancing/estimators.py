"""What is learned by watching: means, a line, a rate. Each forgets, so a changed machine is learned anew."""

from __future__ import annotations

from math import exp

PREFILL = (0.05, 0.001)  # first token after 50 ms + 1 ms per prompt token, until some have been seen
TYPICAL_PROMPT = 500.0  # tokens; how far from 0 that guess is meant
PRIOR_FADES = 0.8  # what is left of a guess's weight after one sample more
LEAST_SLOPE = 1e-7  # so that more work is never as good as less
REACH = 2.0  # times the largest x lately: what lies beyond is no better known than what lies there
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
    """y = base + slope * x, least squares over about the last `memory` samples; base never negative, slope positive.

    `prior` is (base, slope), for x about `scale`. A sample below it lowers all of it by the same part, and it fades
    by PRIOR_FADES with each: a guess a hundred times too high is left after a handful of samples. A sample
    beyond REACH times the largest so far weighs no more than one there would: one alone must not be the slope.
    """

    __slots__ = (
        "_far",
        "_keep",
        "_n",
        "_prior",
        "_scale",
        "_weight",
        "_x",
        "_xx",
        "_xy",
        "_y",
        "base",
        "count",
        "slope",
    )

    def __init__(self, prior: tuple[float, float], scale: float, memory: int) -> None:
        self.base, self.slope = self._prior = prior
        self.count = 0
        self._keep = 1.0 - 1.0 / memory
        self._scale, self._weight = scale, 1.0
        self._far = 4.0 * scale  # the largest x lately; at first as far as the guess may be trusted
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        """One more pair."""
        keep = self._keep
        self.count += 1
        reach = REACH * self._far
        much = (reach / x) ** 2 if x > reach else 1.0
        self._far = max(min(x, reach), self._far * keep)
        self._n = self._n * keep + much
        self._x = self._x * keep + much * x
        self._y = self._y * keep + much * y
        self._xx = self._xx * keep + much * x * x
        self._xy = self._xy * keep + much * x * y
        base, slope = self._prior
        expected = base + slope * x
        if y < expected:
            part = y / expected
            self._prior = base, slope = base * part, slope * part
        self._weight = weight = self._weight * PRIOR_FADES
        end = self._scale
        n = self._n + 2.0 * weight  # the prior is a sample at 0 and one at the end of its scale
        sx = self._x + end * weight
        sy = self._y + (2.0 * base + slope * end) * weight
        xx = self._xx + end * end * weight
        xy = self._xy + end * (base + slope * end) * weight
        spread = n * xx - sx * sx
        if spread <= 1e-9 * n * xx or xx <= 0.0:
            return  # all x alike: no slope can be told
        slope = (n * xy - sx * sy) / spread
        base = (sy - slope * sx) / n
        if slope < LEAST_SLOPE:  # flat
            base, slope = sy / n, LEAST_SLOPE
        elif base < 0.0:  # through the origin
            base, slope = 0.0, max(LEAST_SLOPE, xy / xx)
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
