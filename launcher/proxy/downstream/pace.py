"""A least rate that bytes must keep, of an upload or of an answer that its client takes."""

from __future__ import annotations


class Pace:
    """How far one transfer is behind its least rate. Each byte pays for its share of a second, none in advance:
    neither single bytes now and then nor a large beginning keep a connection open for ever."""

    __slots__ = ("_rate", "paid_until")

    def __init__(self, rate: int, now: float) -> None:
        """`rate` in bytes a second."""
        self._rate = rate
        self.paid_until = now  # the bytes that moved suffice up to this time

    def behind_s(self, now: float, moved: int) -> float:
        """Seconds that it is behind, after so many more bytes."""
        self.paid_until = min(now, self.paid_until + max(0, moved) / self._rate)
        return now - self.paid_until

    def excuse(self, seconds: float) -> None:
        """The peer could not move bytes for so long: we did not let it."""
        self.paid_until += seconds
