"""The limits of one API key: concurrent requests, requests and tokens per minute, models, its budget.

Pure: `now` is the event loop's time in seconds. A limit per minute is a token bucket that holds one minute's amount and
refills evenly. Tokens are charged by estimate when a request is admitted, and corrected when it has ended: a bucket may
go below zero, and later requests wait for it.
"""

from __future__ import annotations

import math
from collections import Counter
from enum import StrEnum

from msgspec import Struct, field

from launcher.accounts.budgets import Budgets, Refusal, Reservation, Why
from launcher.accounts.spending import Spent
from launcher.base.api_errors import HttpError
from launcher.keys.key_record import KeyRecord

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
    BUDGET = "budget"


class Bucket(Struct):
    """A token bucket: what was spent of it at the time `at` (seconds). None: it is never empty."""

    per_minute: int | None = None
    spent: float = 0.0
    at: float = 0.0

    def take(self, amount: float, now: float) -> None:
        """A negative amount is given back."""
        if self.per_minute is None:
            return
        spent = self.spent
        if now > self.at:
            spent = max(0.0, spent - (now - self.at) * self.per_minute / MINUTE_S)
            self.at = now
        self.spent = spent + amount if amount >= 0.0 else max(0.0, spent + amount)

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be taken; an amount beyond its size needs a full bucket."""
        if self.per_minute is None:
            return 0.0
        self.take(0.0, now)
        missing = min(amount, self.per_minute) + self.spent - self.per_minute
        return missing * MINUTE_S / self.per_minute if missing > ROUNDING else 0.0

    def resize(self, per_minute: int | None, now: float) -> None:
        """What was spent stays spent."""
        self.take(0.0, now)
        if self.per_minute is None:
            self.spent, self.at = 0.0, now
        self.per_minute = per_minute


class KeySums(Struct):
    """Sums of the keys of one name since the daemon's start."""

    accepted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """By outcome; with those in flight they add up to accepted. The dispatcher counts both."""
    refused: Counter[Limit] = field(default_factory=Counter)  # by limit; these count among the rejected, too
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    @property
    def in_flight(self) -> int:
        return self.accepted - self.ended.total()


class KeyLimits(Struct):
    """One key's limits, and what is spent of them. Owned by the event loop."""

    record: KeyRecord
    sums: KeySums = field(default_factory=KeySums)  # of the key's current name
    in_flight: int = 0  # requests admitted and not finished
    models: frozenset[str] = frozenset()
    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    mean_s: float = FIRST_GUESS_S  # duration of a request

    def __post_init__(self) -> None:
        self.follow(self.record, self.sums, 0.0)

    def follow(self, record: KeyRecord, sums: KeySums, now: float) -> None:
        """Apply a record that was read again."""
        self.record, self.sums, self.models = record, sums, frozenset(record.models)
        self.requests.resize(record.requests_per_minute, now)
        self.tokens.resize(record.tokens_per_minute, now)

    def allows(self, *names: str) -> bool:
        """Whether the key may use the model of these names (its own and aliases)."""
        return not self.models or not self.models.isdisjoint(names)

    def begin(self, now: float, *, large: bool = False) -> Grant:
        """Admit one request, before its body is read. Raises HttpError: 429 with the seconds to wait.

        `large`: refuse it while no token is left, before its body is received; `charge` may refuse it again.
        """
        most = self.record.concurrency
        if most is not None and self.in_flight >= most:
            raise self.too_many(Limit.CONCURRENCY, most, self.mean_s / most)
        if wait := self.requests.wait_s(1, now):
            raise self.too_many(Limit.REQUESTS, self.requests.per_minute, wait)
        if large and (wait := self.tokens.wait_s(1, now)):
            raise self.too_many(Limit.TOKENS, self.tokens.per_minute, wait)
        self.requests.spent += 1
        self.in_flight += 1
        return Grant(self, self.sums, now)

    def too_many(self, limit: Limit, most: int | None, wait_s: float) -> HttpError:
        self.sums.refused[limit] += 1
        seconds = min(LONGEST_WAIT_S, max(1, math.ceil(wait_s - 1e-9)))
        what = "requests at once" if limit is Limit.CONCURRENCY else limit.value.replace("_", " ")
        why = f"this API key may have {most:,} {what}; try again in {seconds} s"
        headers = {"Retry-After": str(seconds)}
        return HttpError(429, why, type_="rate_limit_error", code="rate_limit_exceeded", headers=headers)


class Grant(Struct):
    """One admitted request of a key, from `begin` to `finish`."""

    limits: KeyLimits
    sums: KeySums  # of the key's name at that time
    started: float
    charged: int = 0  # tokens
    reservation: Reservation | None = None  # of the key's budget
    admitted: bool = False  # by `charge`, too
    ended: bool = False

    def charge(self, names: tuple[str, ...], now: float, tokens: int) -> None:
        """Charge about `tokens` tokens for the model of these names; () without a model. Call `finish` in any case.

        Raises HttpError: 403 for a model that the key may not use, 429 with the seconds to wait. The request does not
        count for the minute then.
        """
        limits = self.limits
        if names and not limits.allows(*names):
            limits.requests.take(-1, now)
            limits.sums.refused[Limit.MODEL] += 1
            why = f"this API key may not use the model `{names[0]}`"
            raise HttpError(403, why, type_="permission_error", param="model", code="model_not_allowed")
        if limits.tokens.per_minute is not None and (wait := limits.tokens.wait_s(max(tokens, 1), now)):
            limits.requests.take(-1, now)
            raise limits.too_many(Limit.TOKENS, limits.tokens.per_minute, wait)
        limits.tokens.spent += tokens
        self.charged = tokens
        self.admitted = True

    def reserve(self, budgets: Budgets, name: str, most: Spent, now: float) -> None:
        """Reserve the most that the request can spend of the budget of its key's name. Raises HttpError as
        `check_budget`. The request does not count for the minute then."""
        found = budgets.admit(name, most)
        if isinstance(found, Refusal):
            self.admitted = False
            raise self._over_budget(found, now)
        self.reservation = found

    def check_budget(self, budgets: Budgets, name: str, now: float) -> None:
        """Raises HttpError: 429 where the budget is spent, or reserved by running requests; 503 where nobody knows."""
        refusal = budgets.refusal(name)
        if refusal is not None:
            raise self._over_budget(refusal, now)

    def _over_budget(self, refusal: Refusal, now: float) -> HttpError:
        self.limits.requests.take(-1, now)
        self.limits.sums.refused[Limit.BUDGET] += 1
        headers = {"Retry-After": str(max(1, math.ceil(refusal.wait_s)))}
        if refusal.why is Why.RESERVED:
            return HttpError(
                429, refusal.message, type_="rate_limit_error", code="rate_limit_exceeded", headers=headers
            )
        status, kind, code = 503, "service_unavailable", "budget_unknown"
        if refusal.why is Why.SPENT:
            status, kind, code = 429, "insufficient_quota", "insufficient_quota"
        return HttpError(status, refusal.message, type_=kind, code=code, headers=headers, repeatable=False)

    def finish(self, tokens: int, now: float, *, output: int = 0) -> None:
        """The request has ended and took this many tokens, `output` of them generated; a second call does nothing."""
        if self.ended:
            return
        self.ended = True
        if self.reservation is not None:
            self.reservation.release()
        limits = self.limits
        limits.in_flight -= 1
        limits.tokens.take(tokens - self.charged, now)
        self.sums.prompt_tokens += tokens - output
        self.sums.output_tokens += output
        if self.admitted:
            limits.mean_s += MEAN_WEIGHT * (max(0.0, now - self.started) - limits.mean_s)
