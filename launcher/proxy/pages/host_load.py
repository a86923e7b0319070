"""The load of the host, from the balancer's own counts and what the instances said last: for gateways that ask often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from launcher.balancing.balancer import Balancer
from launcher.balancing.upstreams import Demand, InstanceId, Upstream
from launcher.base.background import Failures, attempt
from launcher.proxy.openai.models import ModelTraits
from launcher.telemetry.engine_metrics import ADAPTERS, KV_USAGE, RUNNING, WAITING, EngineMetrics
from launcher.telemetry.metrics import METRICS_AGE_S

_LOG = logging.getLogger(__name__)


# --- The load of the whole host as one vLLM would report it, for gateways that choose among hosts. The Gateway API
# inference extension's endpoint picker reads these names of vLLM (its model server protocol): gauges, of each family one
# series, of adapters the one with the latest time.

_ADAPTER_LABELS: Final = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


class HostView(Struct, frozen=True):
    running: int
    waiting: int  # in the proxy's queue, and inside the instances
    kv_usage: float  # 0 to 1
    max_adapters: int = 0  # that can run at once
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()


class _Families:
    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(view: HostView, unix_time: float) -> str:
    """Prometheus' text format. The value of the adapters' series is a time, as in vLLM (v1/metrics/loggers.py of 0.32)."""
    adapters = GaugeMetricFamily(ADAPTERS, "LoRA adapters of requests on this host.", labels=_ADAPTER_LABELS)
    names = (",".join(view.waiting_adapters), ",".join(view.running_adapters))
    adapters.add_metric((str(view.max_adapters), *names), unix_time)
    return generate_latest(
        _Families(
            GaugeMetricFamily(WAITING, "Requests that wait on this host.", value=view.waiting),
            GaugeMetricFamily(RUNNING, "Requests that run on this host.", value=view.running),
            GaugeMetricFamily(KV_USAGE, "Share of the KV cache in use on this host.", value=view.kv_usage),
            adapters,
        )
    ).decode()


# vLLM's default of --max-loras, until an instance reports its own.
MAX_ADAPTERS = 1

Reports = Mapping[InstanceId, EngineMetrics]
Adapters = Callable[[], tuple[frozenset[str], frozenset[str]]]  # of requests on instances, and in the queue


class LoadSums(msgspec.Struct, frozen=True):
    """The load of some instances, as `GET /load` shows it."""

    running: int
    waiting: int  # in the proxy's queue, and inside the instances
    concurrency_limit: int  # requests that the ready instances run at once
    ready: int
    kv_usage: float  # 0 to 1
    predicted_ttft_s: float | None  # of a request that came now; None: nothing is learned yet


class ModelLoad(LoadSums, frozen=True):
    """The load of one model's instances."""

    aliases: tuple[str, ...]
    adapters: tuple[str, ...]  # names of its LoRA adapters: models of their own for a client


class InstanceLoad(msgspec.Struct, frozen=True):
    """The load of one instance."""

    slot: int
    generation: int
    model: str
    ready: bool  # it may get requests: it neither drains nor is ejected
    running: int  # those of other clients of it included
    waiting: int  # requests that it has and does not run
    concurrency_limit: int
    kv_usage: float
    kv_tokens: int | None  # capacity of its KV cache; None: it has not reported it


class Load(LoadSums, frozen=True):
    """The load of the whole host."""

    started: float  # when this daemon began, seconds since 1970: another value is another run of it
    models: dict[str, ModelLoad]
    instances: tuple[InstanceLoad, ...]  # by slot and generation


class HostLoad:
    """Reads the balancer; changes nothing."""

    def __init__(
        self, balancer: Balancer, traits: ModelTraits, adapters: Adapters, started: float = 0.0
    ) -> None:
        """`started`: when the daemon began, seconds since 1970."""
        self._balancer = balancer
        self._started = started
        self._traits = traits
        self._adapters = adapters

    def models(self, wanted: str | None) -> tuple[str, ...]:
        """The models that a view shows: all, or the one of this name. Raises HttpError where there is none."""
        return self._traits.names.names if wanted is None else (self._traits.resolve(wanted)[0],)

    def load(self, names: Sequence[str], reports: Reports, prompt_tokens: int | None, now: float) -> Load:
        """`prompt_tokens`: of the request whose first token is predicted; None: as many as are not cached lately."""
        if prompt_tokens is None:
            prompt_tokens = round(self._balancer.costs.typical_uncached)
        return self._load(names, reports, prompt_tokens, now)

    def _load(self, names: Sequence[str], reports: Reports, prompt_tokens: int | None, now: float) -> Load:
        """`prompt_tokens` None: without a prediction."""
        models = {name: self._of(name, reports, prompt_tokens, now) for name in names}
        found = list(models.values())
        usable = [each for each in found if each.ready]
        predicted = [each.predicted_ttft_s for each in usable if each.predicted_ttft_s is not None]
        return Load(
            running=sum(each.running for each in found),
            waiting=sum(each.waiting for each in found) + self._unnamed(names),
            concurrency_limit=sum(each.concurrency_limit for each in found),
            ready=sum(each.ready for each in found),
            kv_usage=max((each.kv_usage for each in usable), default=1.0),
            predicted_ttft_s=max(predicted, default=None),
            started=self._started,
            models=models,
            instances=tuple(
                _instance(upstream, reports.get(upstream.key))
                for upstream in sorted(self._balancer.table, key=lambda upstream: upstream.key)
                if upstream.model in models
            ),
        )

    def view(self, names: Sequence[str], reports: Reports, now: float) -> HostView:
        load = self._load(names, reports, None, now)
        served = {adapter for name in names for adapter in self._traits.adapters_of(name)}
        running, waiting = self._adapters() if served else (frozenset[str](), frozenset[str]())
        return HostView(
            load.running,
            load.waiting,
            load.kv_usage,
            sum(_max_adapters(reports.get(u.key)) for u in self._adapting(names)),
            tuple(sorted(running & served)),
            tuple(sorted(waiting & served)),
        )

    def _adapting(self, names: Iterable[str]) -> list[Upstream]:
        """The ready instances of models with adapters."""
        with_adapters = [name for name in names if next(self._traits.adapters_of(name), None) is not None]
        return [upstream for name in with_adapters for upstream in self._balancer.table.of(name)]

    def _unnamed(self, names: Sequence[str]) -> int:
        """Requests in the queue that any instance may answer; they count for the whole host only."""
        return self._balancer.queue.waiting(None) if len(names) == len(self._traits.names.names) else 0

    def _of(self, name: str, reports: Reports, prompt_tokens: int | None, now: float) -> ModelLoad:
        balancer = self._balancer
        running = inside = 0
        for upstream in balancer.table:
            if upstream.model == name:
                has = _requests(upstream)
                waits = _waiting_inside(upstream, reports.get(upstream.key))
                running, inside = running + has - waits, inside + waits
        ready = balancer.table.of(name)
        usages = [_kv_usage(upstream, reports.get(upstream.key)) for upstream in ready]
        return ModelLoad(
            running=running,
            waiting=inside + balancer.queue.waiting(name),
            concurrency_limit=sum(upstream.max_num_seqs for upstream in ready),
            ready=len(ready),
            kv_usage=sum(usages) / len(usages) if usages else 1.0,
            predicted_ttft_s=self._predicted(name, prompt_tokens, now) if ready else None,
            aliases=self._traits.names.all_of(name)[1:],
            adapters=tuple(sorted(self._traits.adapters_of(name))),
        )

    def _predicted(self, name: str, prompt_tokens: int | None, now: float) -> float | None:
        if prompt_tokens is None:
            return None
        demand = Demand(name, prompt_tokens, self._balancer.output_tokens(None))
        return self._balancer.predicted_ttft(demand, now)


def _instance(upstream: Upstream, report: EngineMetrics | None) -> InstanceLoad:
    has, waits = _requests(upstream), _waiting_inside(upstream, report)
    reported = None if report is None else report.kv_tokens
    return InstanceLoad(
        upstream.slot,
        upstream.generation,
        upstream.model,
        ready=not upstream.draining and not upstream.outliers.out,
        running=has - waits,
        waiting=waits,
        concurrency_limit=upstream.max_num_seqs,
        kv_usage=_kv_usage(upstream, report),
        kv_tokens=reported if upstream.kv_tokens is None else upstream.kv_tokens,
    )


def _requests(upstream: Upstream) -> int:
    """The proxy's, and those that reach the instance another way."""
    return upstream.in_flight + upstream.load.surplus


def _waiting_inside(upstream: Upstream, report: EngineMetrics | None) -> int:
    """Requests that the instance has and does not run: beyond its limit, or, as it reports, for lack of KV cache."""
    has = _requests(upstream)
    reported = 0 if report is None else report.waiting
    return min(has, max(has - upstream.max_num_seqs, reported))


def _kv_usage(upstream: Upstream, report: EngineMetrics | None) -> float:
    """An engine that does not report it: the share of its concurrency limit in use."""
    if report is not None and report.kv_usage is not None:
        return min(1.0, report.kv_usage)
    return min(1.0, _requests(upstream) / upstream.max_num_seqs)


def _max_adapters(report: EngineMetrics | None) -> int:
    return MAX_ADAPTERS if report is None or report.max_adapters is None else report.max_adapters


# --- What the instances said last of their load, asked in the background: nobody who reads it waits for a slow
# instance.


class EngineReports:
    """Owner of the task that asks. `close` ends it."""

    def __init__(
        self, ask: Callable[[], Awaitable[dict[InstanceId, EngineMetrics]]], clock: Callable[[], float]
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._failures = Failures(_LOG, "proxy: read the instances' load")
        self._asked_at: float | None = None
        self._task: asyncio.Task[None] | None = None
        self._known = False
        self._reports: dict[InstanceId, EngineMetrics] = {}

    async def latest(self) -> dict[InstanceId, EngineMetrics]:
        """At most METRICS_AGE_S older than the last call; only the first call waits for the instances."""
        now = self._clock()
        due = self._asked_at is None or now - self._asked_at >= METRICS_AGE_S
        if due and (self._task is None or self._task.done()):
            self._asked_at = now
            self._task = asyncio.create_task(attempt(self._read, self._failures), name="engine reports")
        if not self._known and self._task is not None:
            await asyncio.wait({self._task})
        return self._reports

    async def _read(self) -> None:
        self._reports = await self._ask()
        self._known = True

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
