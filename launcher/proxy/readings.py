"""What others read of the proxy: counts for `status`, the history and the ledger, and the values of its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.config.schema import Proxy
from launcher.proxy.auth.api_keys import ApiKeys
from launcher.proxy.balancing.balancer import Balancer
from launcher.proxy.dispatch.instances import Instances
from launcher.proxy.dispatch.occupancy import Occupied
from launcher.proxy.downstream.clients import Clients
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.downstream.upload_memory import UploadMemory
from launcher.proxy.observability import figures, stats, totals
from launcher.proxy.observability.counters import Counters
from launcher.proxy.upstream.overflow import Overflow
from launcher.telemetry.rolling_quantiles import Quantiles
from launcher.telemetry.spec import Values
from launcher.telemetry.timings import Timings
from launcher.usage.budgets import Budgets, BudgetState


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
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

    def queue(self) -> figures.QueueState:
        return figures.queue_state(self._parts.balancer.queue, self._parts.instances.waiting, self._clock())

    def tokens(self) -> dict[str, figures.TokenTotals]:
        """Of ended requests, by model."""
        return figures.tokens_by_model(self._parts.counters)

    def keys(self) -> dict[str, figures.KeyTotals]:
        """By name."""
        return figures.key_totals(self._parts.keys)

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
        )
        return {**own, **self._more_values()}
