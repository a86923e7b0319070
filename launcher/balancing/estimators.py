"""Estimators: a mean, a linear fit, rates. Each forgets old samples, so that it follows a changing machine."""

from __future__ import annotations

from math import exp
from typing import Final

# Until samples come: the first token after 50 ms + 1 ms per prompt token.
PREFILL_BASE_S: Final = 0.05
PREFILL_TOKEN_S: Final = 0.001
TYPICAL_PROMPT: Final = 500.0  # tokens; these are meant for prompts up to about this size
PRIOR_FADES: Final = 0.8  # what one more sample leaves of the prior's weight
LEAST_SLOPE: Final = 1e-7  # more work is never as fast as less
LEAST_Y: Final = 1e-4  # smaller ones count as this, where errors are relative
REACH: Final = 2.0  # times the largest x of late: beyond, a sample weighs as if it were there
WINDOW_S: Final = 30.0  # of the rates at which work comes and goes


class Mean:
    """Mean of the last samples, each new one weighing at least 1/`memory`; `prior` until there are some."""

    def __init__(self, prior: float, memory: int) -> None:
        self.value: float = prior
        self.count: int = 0
        self._prior: float = prior
        self._memory: int = memory

    def add(self, sample: float) -> int:
        """The sample's number, for `take_back`."""
        count = self.count = self.count + 1
        self.value += (sample - self.value) / (min(self._memory, count))
        return count

    def take_back(self, sample: float, number: int) -> None:
        """As if this sample, never negative as none is, had not come; exact unless older ones were taken back since."""
        memory, count = self._memory, self.count
        # The last of n samples weighs 1/n, and so do all before it; beyond `memory` 1/memory, and leaves 1 - 1/memory of
        # the others' weight.
        weight = (1.0 - 1.0 / memory) ** max(0, count - max(min(number, count), memory)) / min(memory, count)
        self.count -= 1
        if self.count < 1:
            self.value, self.count = self._prior, 0
        else:
            self.value = max(0.0, (self.value - weight * sample) / (1.0 - weight))


class LinearFit:
    """y = base + slope * x, least squares over about the last `memory` samples; base never negative, slope positive.

    `base` and `slope` are the first guess (the prior), for x up to about `scale`. A sample below the prior scales it
    down, and the prior fades by PRIOR_FADES with each sample: one that is a hundred times too high is gone after a
    handful of samples. A sample beyond REACH times the largest x so far weighs no more than one there: a single sample
    must not set the slope.
    """

    def __init__(
        self,
        base: float = PREFILL_BASE_S,
        slope: float = PREFILL_TOKEN_S,
        scale: float = TYPICAL_PROMPT,
        memory: int = 200,
    ) -> None:
        """The defaults are those of a prefill: seconds to the first token over tokens of the prompt."""
        self._prior: tuple[float, float] = (base, slope)
        self.base: float = base
        self.slope: float = slope
        self.count: int = 0
        self._keep: float = 1.0 - 1.0 / memory
        self._scale: float = scale
        self._weight: float = 1.0
        self._far: float = 4.0 * scale  # the largest x of late; at first, how far the prior may be trusted
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
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
        # The prior is a sample at 0 and one at the end of its scale.
        n = self._n + 2.0 * weight
        sx = self._x + end * weight
        sy = self._y + (2.0 * base + slope * end) * weight
        xx = self._xx + end * end * weight
        xy = self._xy + end * (base + slope * end) * weight
        spread = n * xx - sx * sx
        if spread <= 1e-9 * n * xx or xx <= 0.0:
            return  # all x are alike: they have no slope
        slope = (n * xy - sx * sy) / spread
        base = (sy - slope * sx) / n
        if slope < LEAST_SLOPE:
            base, slope = sy / n, LEAST_SLOPE
        elif base < 0.0:
            # Through the origin.
            base, slope = 0.0, max(LEAST_SLOPE, xy / xx)
        self.base, self.slope = base, slope

    def at(self, x: float) -> float:
        return self.base + self.slope * x


class RelativeFit:
    """y = base + slope * x with the least relative errors: small x count as much as large ones."""

    def __init__(self, memory: int = 100) -> None:
        self.count: int = 0
        self.base: float = 0.0
        self.slope: float = 0.0
        self._keep: float = 1.0 - 1.0 / memory
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, x: float, y: float) -> None:
        keep = self._keep
        self.count += 1
        # A single sample that is far too small must not outweigh all others.
        expected = max(self.at(x), y / 2, LEAST_Y)
        weight = 1.0 / (expected * expected)
        self._n = self._n * keep + weight
        self._x = self._x * keep + weight * x
        self._y = self._y * keep + weight * y
        self._xx = self._xx * keep + weight * x * x
        self._xy = self._xy * keep + weight * x * y
        spread = self._n * self._xx - self._x * self._x
        slope = 0.0
        if spread > 1e-9 * self._n * self._xx:
            slope = (self._n * self._xy - self._x * self._y) / spread
        base = (self._y - slope * self._x) / self._n
        if slope < LEAST_SLOPE:
            base, slope = self._y / self._n, LEAST_SLOPE
        elif base < 0.0:
            # Through the origin.
            base, slope = 0.0, self._xy / self._xx
        self.base, self.slope = base, slope

    def at(self, x: float) -> float:
        return self.base + self.slope * x


class Quantile:
    """The value that `part` of the samples of late do not exceed, followed in steps; samples are positive."""

    def __init__(self, part: float, prior: float, step: float, least: float, most: float) -> None:
        self.value: float = prior
        self._up: float = 1.0 + step * part
        self._down: float = 1.0 - step * (1.0 - part)
        self._least: float = least
        self._most: float = most

    def add(self, sample: float) -> None:
        value = self.value * (self._up if sample > self.value else self._down)
        self.value = min(self._most, max(self._least, value))


class Arrivals:
    """Requests, and amounts of work, per second over about the last `window_s` seconds."""

    def __init__(self, window_s: float) -> None:
        self._window_s: float = window_s
        self._count: float = 0.0
        self._amount: float = 0.0
        self._since: float | None = None
        self._last: float = 0.0

    def add(self, now: float, amount: float = 0.0) -> None:
        if self._since is None:
            self._since = self._last = now
        fade = exp((self._last - now) / self._window_s)
        self._count = self._count * fade + 1.0
        self._amount = self._amount * fade + amount
        self._last = now

    def take_back(self, then: float, amount: float = 0.0) -> None:
        """As if what was added `then` had not come."""
        fade = exp((then - self._last) / self._window_s)
        self._count = max(0.0, self._count - fade)
        self._amount = max(0.0, self._amount - amount * fade)

    def per_s(self, now: float) -> float:
        """Requests per second; 0.0 while there was none."""
        return self._rate(self._count, now)

    def amount_per_s(self, now: float) -> float:
        return self._rate(self._amount, now)

    def _rate(self, total: float, now: float) -> float:
        if self._since is None:
            return 0.0
        # A young rate covers only its own age, one second at least: being young does not make it low.
        seen = max(1.0, now - self._since)
        covered = self._window_s * (1.0 - exp(-seen / self._window_s))
        return total * exp((self._last - now) / self._window_s) / covered
