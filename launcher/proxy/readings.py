"""What others read of the proxy: counts for `status`, the history and the ledger, and the values of its metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec import Struct

from launcher.accounts.budgets import Budgets, BudgetState
from launcher.balancing.admission_queue import AdmissionQueue
from launcher.balancing.balancer import Balancer
from launcher.base.watched_file import FileState, WatchedFiles
from launcher.config.schema import Proxy
from launcher.keys.api_keys import ApiKeys
from launcher.proxy.dispatch.instances import Instances
from launcher.proxy.dispatch.traffic import Occupied
from launcher.proxy.downstream.clients import Clients
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.downstream.uploads import UploadMemory
from launcher.proxy.observability import stats
from launcher.proxy.observability import stats as totals
from launcher.proxy.observability.stats import Counters
from launcher.proxy.request.record import Request
from launcher.proxy.upstream.overflow import Overflow
from launcher.telemetry.machine_metrics import Values
from launcher.telemetry.quantiles import Quantiles
from launcher.telemetry.timings import Timings

# --- What `GET /v1/status` says of queue, tokens and keys: sums since the proxy's start, and the queue now.


class QueueState(Struct, frozen=True, kw_only=True):
    """Requests that wait for an instance."""

    requests: int
    """Their number."""
    bytes: int
    """Sum of their bodies."""
    oldest_s: float | None
    """Time since the arrival of the oldest one; null: the queue is empty."""
    limit_requests: int
    """`queue_max_requests`: more are refused, or sent to an overflow endpoint."""
    limit_bytes: int
    """`queue_max_bytes`, likewise."""


class TokenTotals(Struct, frozen=True, kw_only=True):
    """Tokens of the requests that ended since the daemon's start."""

    prompt: int
    """Of prompts, cached ones included."""
    cached: int
    """Of these, found in an instance's prefix cache."""
    output: int
    """Generated."""


class KeyTotals(Struct, frozen=True, kw_only=True):
    """Requests of one API key since the daemon's start."""

    accepted: int
    """Requests that were admitted or refused."""
    in_flight: int
    """Requests that have not ended."""
    tokens: int
    """Prompt and output tokens of those that have ended."""
    prompt_tokens: int
    """The prompts' part of them."""
    output_tokens: int
    """The generated part of them."""


def queue_state(queue: AdmissionQueue, waiting: Collection[Request], now: float) -> QueueState:
    """`now`: the event loop's time."""
    oldest = min((request.started for request in waiting), default=None)
    return QueueState(
        requests=len(waiting), bytes=queue.bytes, oldest_s=None if oldest is None else now - oldest,
        limit_requests=queue.max_requests, limit_bytes=queue.max_bytes,
    )  # fmt: skip


def tokens_by_model(counters: Counters) -> dict[str, TokenTotals]:
    return {
        model: TokenTotals(prompt=sums.prompt, cached=sums.cached, output=sums.output)
        for model, sums in sorted(counters.tokens.items())
    }


def token_sum(models: Iterable[TokenTotals]) -> TokenTotals:
    every = list(models)
    return TokenTotals(
        prompt=sum(of.prompt for of in every), cached=sum(of.cached for of in every),
        output=sum(of.output for of in every),
    )  # fmt: skip


def key_totals(keys: ApiKeys) -> dict[str, KeyTotals]:
    """By name of the key; empty where no keys are needed."""
    return {
        name: KeyTotals(
            accepted=of.accepted,
            in_flight=of.in_flight,
            tokens=of.tokens,
            prompt_tokens=of.prompt_tokens,
            output_tokens=of.output_tokens,
        )
        for name, of in sorted(keys.sums.items())
    }


class Parts(Struct, frozen=True, kw_only=True):
    """Of the proxy: what is read."""

    proxy: Proxy
    balancer: Balancer
    instances: Instances
    clients: Clients
    slow_clients: SlowClients
    upload_memory: UploadMemory
    counters: Counters
    timings: Timings
    keys: ApiKeys
    budgets: Budgets | None
    overflow: Overflow | None
    files: WatchedFiles


class Readings:
    """Reads the proxy's parts; changes nothing."""

    def __init__(
        self,
        parts: Parts,
        names: tuple[str, ...],
        more_values: Callable[[], Values],
        clock: Callable[[], float],
    ) -> None:
        """`names`: of the models. `more_values`: of metrics that others measure. `clock`: the event loop's."""
        self._parts = parts
        self._names = names
        self._more_values = more_values
        self._clock = clock

    def stats(self) -> dict[str, object]:
        """The sums, for `status --json`."""
        parts = self._parts
        return stats.stats(parts.counters, parts.balancer.table, len(parts.instances.waiting))

    def totals(self, then: float) -> totals.Totals:
        parts = self._parts
        return totals.totals(parts.counters, parts.overflow, parts.timings.first_token.since(then))

    def occupancy(self) -> dict[int, Occupied]:
        """Seconds since the proxy's start that each slot was ready, and busy; sums over its instances, which never fall."""
        return self._parts.instances.occupancy()

    def budgets(self) -> list[BudgetState]:
        """Of API keys, by name."""
        self._parts.keys.look(self._clock())
        budgets = self._parts.budgets
        return [] if budgets is None else budgets.states()

    def first_token(self, slot: int | None = None) -> Quantiles | None:
        """How long clients of a slot, or of all, waited lately for a stream's first token, time in the queue included."""
        lately, now = self._parts.timings.first_token, self._clock()
        return lately.overall(now) if slot is None else lately.quantiles(slot, now)

    def queue(self) -> QueueState:
        return queue_state(self._parts.balancer.queue, self._parts.instances.waiting, self._clock())

    def tokens(self) -> dict[str, TokenTotals]:
        """Of ended requests, by model."""
        return tokens_by_model(self._parts.counters)

    def keys(self) -> dict[str, KeyTotals]:
        """By name."""
        return key_totals(self._parts.keys)

    def files(self) -> tuple[FileState, ...]:
        """Of the files that are read again when they change."""
        self._parts.files.look(self._clock())
        return self._parts.files.states()

    def values(self) -> Values:
        """Of telemetry.metrics.TABLE."""
        parts = self._parts
        own = stats.values(
            parts.counters,
            upstreams=list(parts.balancer.table),
            names=self._names,
            waiting=parts.instances.ages(self._clock()),
            queue_max=parts.proxy.queue_max_requests,
            queued_bytes=parts.balancer.queue.bytes,
            uploads=parts.upload_memory,
            connections=len(parts.clients),
            certificate_end=parts.clients.certificate_end,
            slow_clients=parts.slow_clients,
            keys=parts.keys,
            budgets=parts.budgets,
            overflow=parts.overflow,
            files=self.files(),
        )
        return {**own, **self._more_values()}
