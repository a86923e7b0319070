"""The overflow endpoints in order, and which of them takes a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from launcher.accounts.spending import Spent
from launcher.base.clock import Clock
from launcher.base.money_limits import DailyCap
from launcher.config import schema
from launcher.keys.key_record import KeyRecord
from launcher.proxy.openai.prompts import TokenBounds, bounds_of
from launcher.proxy.request.actions import Outcome, OverflowReason
from launcher.proxy.request.most_tokens import MostTokens
from launcher.proxy.request.record import Request
from launcher.proxy.upstream.overflow_endpoint import (
    Health,
    Left,
    OverflowCall,
    OverflowCost,
    OverflowEndpoint,
)

OVERFLOW_PATHS: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
"""What every OpenAI-compatible endpoint has, and what keeps nothing between requests."""
# For keys made with `--overflow predicted`, at an endpoint whose `when` is "full".
DEFAULT_LIMIT_S: Final = 4.0


class Overflow:
    """All endpoints."""

    def __init__(
        self,
        settings: Sequence[schema.Overflow],
        connect_timeout_s: float,
        caps: Mapping[str, DailyCap] = MappingProxyType({}),
        clock: Clock | None = None,
    ) -> None:
        """`caps`: by the endpoint's name. Raises LauncherError when a key's file can't be read, or a URL has no port or
        host."""
        named = len(settings) > 1
        self._endpoints = {
            each.endpoint: OverflowEndpoint(
                each,
                connect_timeout_s,
                OverflowCost(each, caps.get(each.endpoint)),
                named=named or each.name is not None,
            )
            for each in settings
        }
        self._limits = {each.endpoint: each.predicted_s for each in settings}
        self._clock = clock or Clock()
        models = dict.fromkeys(model for each in settings for model in each.models)
        self._of = {
            model: tuple(self._endpoints[each.endpoint] for each in settings if model in each.models)
            for model in models
        }

        self._least = {model: self._least_of(model, None) for model in models}

    def __iter__(self) -> Iterator[OverflowEndpoint]:
        return iter(self._endpoints.values())

    def most_spent(self, request: Request, most: MostTokens) -> Spent:
        """The most that a request can spend at an endpoint that may take it."""
        record = None if request.key is None else request.key.record
        tokens = picos = 0
        if request.path in OVERFLOW_PATHS and _allows(record, OverflowReason.FULL):
            for endpoint in self._of.get(request.model or "", ()):
                output = max(most.output, most.unlimited * endpoint.cost.most_output)
                tokens = max(tokens, most.prompt + output)
                if endpoint.cost.prices is not None:
                    picos = max(picos, endpoint.cost.prices.amount(most.prompt, 0, output))
        return Spent(tokens, picos)

    def limit_s(self, path: str, model: str | None, record: KeyRecord | None) -> float | None:
        """The least predicted time to the first token beyond which an endpoint takes such a request; None: none does."""
        if path not in OVERFLOW_PATHS:
            return None
        if record is None or (record.overflow is None and not record.local_only):
            return self._least.get(model or "")  # nearly always
        return self._least_of(model or "", record) if _allows(record, OverflowReason.PREDICTED) else None

    def _least_of(self, model: str, record: KeyRecord | None) -> float | None:
        limits = (
            [self._limit_s(endpoint, record) for endpoint in self._of[model]] if model in self._of else []
        )
        return min((limit for limit in limits if limit is not None), default=None)

    def _limit_s(self, endpoint: OverflowEndpoint, record: KeyRecord | None) -> float | None:
        limit = self._limits[endpoint.name]
        if limit is None and record is not None and record.overflow == "predicted":
            return DEFAULT_LIMIT_S
        return limit

    def takes(self, request: Request, reason: OverflowReason, now: float) -> str | None:
        """Name of the endpoint that a request may be sent to now: the first that serves its model, has not had it, is below
        its limits and has not just failed; else, of a request that would be refused, the first that has just failed.
        Limits that keep a request here are counted."""
        self._begin_days()
        record = None if request.key is None else request.key.record
        if request.path not in OVERFLOW_PATHS or not _allows(record, reason):
            return None
        full: list[OverflowEndpoint] = []
        chosen = self._choose(request, self._asked(request, record, reason), reason, now, full)
        if chosen is not None:
            return chosen.name
        if reason is OverflowReason.FULL:
            for endpoint in full:
                endpoint.ended[request.model or "", Outcome.REJECTED] += 1
        return None

    def _choose(
        self,
        request: Request,
        candidates: Iterable[OverflowEndpoint],
        reason: OverflowReason,
        now: float,
        full: list[OverflowEndpoint],
    ) -> OverflowEndpoint | None:
        """The endpoint; those that have `max_requests` are added to `full`."""
        failed: list[OverflowEndpoint] = []
        for endpoint in candidates:
            health = endpoint.health(now)
            if endpoint.full:
                full.append(endpoint)
            elif health is Health.FAILED:
                failed.append(endpoint)
            elif health is Health.GOOD and _affords(endpoint, request):
                return endpoint
        if reason is OverflowReason.FULL:
            return next((endpoint for endpoint in failed if _affords(endpoint, request)), None)
        return None

    def _asked(
        self, request: Request, record: KeyRecord | None, reason: OverflowReason
    ) -> Iterator[OverflowEndpoint]:
        for endpoint in self._of.get(request.model or "", ()):
            if endpoint.name in request.overflow_tried:
                continue
            limit = self._limit_s(endpoint, record)
            predicted = request.latest_s
            if reason is OverflowReason.FULL or (
                limit is not None and predicted is not None and predicted > limit
            ):
                yield endpoint

    def begin(self, request: Request) -> OverflowCall:
        """A request goes to the endpoint that `takes` named."""
        return self._endpoints[request.overflow].begin(request.model or "", request.path, _bounds(request))

    def endpoint(self, name: str) -> OverflowEndpoint:
        return self._endpoints[name]

    def end(self, call: OverflowCall, left: Left, now: float) -> tuple[int, bool]:
        """A request has left its endpoint: picos that it cost, and whether they are by the usage that the endpoint says."""
        return call.endpoint.end(call, left, now, self._begin_days())

    def tick(self, now: float) -> None:
        """`now`: the event loop's time."""
        for endpoint in self._endpoints.values():
            endpoint.pool.sweep(now)
        self._begin_days()

    def _begin_days(self) -> float:
        """Begin the next day of the caps where it is time to; returns Unix time."""
        now = self._clock.now()
        for endpoint in self._endpoints.values():
            endpoint.cost.tick(now)
        return now.wall

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.pool.close()


def _affords(endpoint: OverflowEndpoint, request: Request) -> bool:
    return not endpoint.capped or endpoint.affords(request.path, _bounds(request))


def _bounds(request: Request) -> TokenBounds:
    """Read once: a body of 8 MiB takes 10 ms."""
    if request.token_bounds is None:
        request.token_bounds = bounds_of(request.body)
    return request.token_bounds


def _allows(record: KeyRecord | None, reason: OverflowReason) -> bool:
    """Whether a key's requests may leave this host for a reason."""
    if record is None:
        return True
    if record.local_only or record.overflow == "never":
        return False
    return reason is OverflowReason.FULL or record.overflow != "full"
