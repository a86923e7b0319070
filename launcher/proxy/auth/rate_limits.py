"""The limits of one API key: concurrent requests, requests and tokens per minute, models.

Pure: `now` is the event loop's time in seconds. A limit per minute is a token bucket that holds one minute's amount and
refills evenly. Tokens are charged by estimate when a request is admitted, and corrected when it has ended: a bucket may
go below zero, and later requests wait for it.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from launcher.proxy.auth.key_record import KeyRecord
from launcher.proxy.errors import HttpError

MINUTE_S = 60.0
FIRST_GUESS_S = 1.0  # duration of a key's request, before one has ended
MEAN_WEIGHT = 0.2  # of the latest request in the mean duration
LONGEST_WAIT_S = 3600
ROUNDING = 1e-6  # of a token: error of float sums


class Limit(StrEnum):
    """The limit that refused a request; the label `limit` of its metric."""

    CONCURRENCY = "concurrency"
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    MODEL = "model"


@dataclass(slots=True)
class Bucket:
    """A token bucket: its level at the time `at` (seconds)."""

    per_minute: int
    level: float
    at: float

    def refill(self, now: float) -> None:
        if now > self.at:
            self.level = min(self.per_minute, self.level + (now - self.at) * self.per_minute / MINUTE_S)
            self.at = now

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` may be taken; an amount beyond its size needs a full bucket."""
        missing = min(amount, self.per_minute) - self.level
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def resize(self, per_minute: int, now: float) -> None:
        self.refill(now)
        spent = self.per_minute - self.level
        self.per_minute, self.level = per_minute, per_minute - spent


@dataclass(slots=True)
class KeySums:
    """Sums of the keys of one name since the daemon's start."""

    accepted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """By outcome; with those in flight they add up to accepted. The dispatcher counts both."""
    refused: Counter[Limit] = field(default_factory=Counter)  # by limit; these count among the rejected, too
    tokens: int = 0

    @property
    def in_flight(self) -> int:
        return self.accepted - self.ended.total()


@dataclass(slots=True)
class KeyLimits:
    """One key's limits, and what is spent of them. Owned by the event loop."""

    record: KeyRecord
    sums: KeySums = field(default_factory=KeySums)  # of the key's current name
    in_flight: int = 0  # requests admitted and not finished
    _models: frozenset[str] = frozenset()
    _requests: Bucket | None = None
    _tokens: Bucket | None = None
    _mean_s: float = FIRST_GUESS_S

    def __post_init__(self) -> None:
        self.follow(self.record, self.sums, 0.0)

    def follow(self, record: KeyRecord, sums: KeySums, now: float) -> None:
        """Apply a record that was read again; what was spent stays spent."""
        self.record, self.sums = record, sums
        self._models = frozenset(record.models)
        self._requests = _follow(self._requests, record.requests_per_minute, now)
        self._tokens = _follow(self._tokens, record.tokens_per_minute, now)

    def allows(self, *names: str) -> bool:
        """Whether the key may use the model of these names (its own and aliases)."""
        return not self._models or not self._models.isdisjoint(names)

    def begin(self, now: float, *, large: bool = False) -> Grant:
        """Admit one request, before its body is read. Raises HttpError: 429 with the seconds to wait.

        `large`: refuse it while no token is left, before its body is received; `charge` may refuse it again.
        """
        most = self.record.concurrency
        if most is not None and self.in_flight >= most:
            raise self._too_many(Limit.CONCURRENCY, most, self._mean_s / most)
        if self._requests is not None:
            self._requests.refill(now)
            if wait := self._requests.wait_s(1):
                raise self._too_many(Limit.REQUESTS, self._requests.per_minute, wait)
        if self._tokens is not None and large:
            self._tokens.refill(now)
            if wait := self._tokens.wait_s(1):
                raise self._too_many(Limit.TOKENS, self._tokens.per_minute, wait)
        if self._requests is not None:
            self._requests.level -= 1
        self.in_flight += 1
        return Grant(self, self.sums, now)

    def _charge(self, grant: Grant, names: tuple[str, ...], now: float, tokens: int) -> None:
        if names and not self.allows(*names):
            self._take_back()
            self.sums.refused[Limit.MODEL] += 1
            why = f"this API key may not use the model `{names[0]}`"
            raise HttpError(403, why, type_="permission_error", param="model", code="model_not_allowed")
        if self._tokens is not None:
            self._tokens.refill(now)
            if wait := self._tokens.wait_s(max(tokens, 1)):
                self._take_back()
                raise self._too_many(Limit.TOKENS, self._tokens.per_minute, wait)
            self._tokens.level -= tokens
        grant.charged = tokens
        grant.admitted = True

    def _take_back(self) -> None:
        """A request that another limit refused does not count for the minute."""
        if self._requests is not None:
            self._requests.level = min(self._requests.per_minute, self._requests.level + 1)

    def _end(self, grant: Grant, tokens: int, now: float) -> None:
        self.in_flight -= 1
        grant.sums.tokens += tokens
        if grant.admitted:
            self._mean_s += MEAN_WEIGHT * (max(0.0, now - grant.started) - self._mean_s)
        if self._tokens is not None:
            self._tokens.refill(now)
            self._tokens.level = min(self._tokens.per_minute, self._tokens.level + grant.charged - tokens)

    def _too_many(self, limit: Limit, most: int, wait_s: float) -> HttpError:
        self.sums.refused[limit] += 1
        seconds = min(LONGEST_WAIT_S, max(1, math.ceil(wait_s - 1e-9)))
        what = "requests at once" if limit is Limit.CONCURRENCY else limit.value.replace("_", " ")
        why = f"this API key may have {most:,} {what}; try again in {seconds} s"
        headers = {"Retry-After": str(seconds)}
        return HttpError(429, why, type_="rate_limit_error", code="rate_limit_exceeded", headers=headers)


@dataclass(slots=True)
class Grant:
    """One admitted request of a key, from `begin` to `finish`."""

    limits: KeyLimits
    sums: KeySums  # of the key's name at that time
    started: float
    charged: int = 0  # tokens
    admitted: bool = False  # by `charge`, too
    ended: bool = False

    def charge(self, names: tuple[str, ...], now: float, tokens: int) -> None:
        """Charge about `tokens` tokens for the model of these names; () without a model. Call `finish` in any case.

        Raises HttpError: 403 for a model that the key may not use, 429 with the seconds to wait.
        """
        self.limits._charge(self, names, now, tokens)

    def finish(self, tokens: int, now: float) -> None:
        """The request has ended and took this many tokens; a second call does nothing."""
        if not self.ended:
            self.ended = True
            self.limits._end(self, tokens, now)


def _follow(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, float(per_minute), now)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now)
    return bucket
