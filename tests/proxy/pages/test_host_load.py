"""The load of the host: what the balancer counts, corrected by what the instances report."""

from __future__ import annotations

import pytest
from support.balancing import balancer, ticket, up

from launcher.balancing.balancer import Balancer
from launcher.balancing.upstreams import InstanceId
from launcher.base.api_errors import HttpError
from launcher.proxy.openai.models import ModelNames, ModelTraits
from launcher.proxy.pages.host_load import HostLoad, HostView, InstanceLoad
from launcher.telemetry.engine_metrics import EngineMetrics

NOTHING: dict[InstanceId, EngineMetrics] = {}


def report(**values: object) -> EngineMetrics:
    return EngineMetrics(**{"running": 0, "waiting": 0, "generated": 0, "steps": 0, **values})  # type: ignore[arg-type]


def host(
    made: Balancer,
    *names: str,
    adapters: tuple[str, ...] = (),
    running: tuple[str, ...] = (),
    waiting: tuple[str, ...] = (),
) -> HostLoad:
    traits = ModelTraits(ModelNames(names or ("m",), {"alias": "m"}))
    traits.learn("m", adapters=adapters, token_ids=False, sampling_defaults={}, context_tokens=None)
    return HostLoad(made, traits, lambda: (frozenset(running), frozenset(waiting)))


def busy(made: Balancer, count: int, model: str = "m") -> None:
    """So many requests that are past their prefill, or wait."""
    for _ in range(count):
        one = ticket(model=model)
        if made.offer(one, 0.0) is not None:
            made.first_token(one, 0.0)


def test_an_idle_host() -> None:
    load = host(balancer(2, seqs=4)).load(("m",), NOTHING, 100, 0.0)
    assert (load.running, load.waiting, load.concurrency_limit, load.ready, load.kv_usage) == (
        0,
        0,
        8,
        2,
        0.0,
    )
    assert load.predicted_ttft_s == pytest.approx(
        0.15
    )  # as assumed of an engine: 50 ms, and 1 ms for a token
    assert load.models["m"].predicted_ttft_s == load.predicted_ttft_s


def test_the_queue_counts_as_waiting() -> None:
    made = balancer(2, seqs=4)
    busy(made, 11)
    load = host(made).load(("m",), NOTHING, 100, 0.0)
    assert (load.running, load.waiting) == (8, 3)
    assert load.kv_usage == 1.0  # the engines report none: the share of their places in use
    idle = host(balancer(2, seqs=4)).load(("m",), NOTHING, 100, 0.0)
    assert load.predicted_ttft_s is not None
    assert idle.predicted_ttft_s is not None
    assert load.predicted_ttft_s > idle.predicted_ttft_s
    assert made.queue.count == 3  # to predict queues nothing


def test_nothing_is_predicted_before_a_first_token() -> None:
    made = balancer(1)
    made.costs.fit("m").count = 0
    assert host(made).load(("m",), NOTHING, None, 0.0).predicted_ttft_s is None


def test_a_typical_prompt_is_one_of_those_seen() -> None:
    made = balancer(1)
    for _ in range(50):
        made.costs.seen_bound(next(iter(made.table)), 2000.0, 0.0)
    load = host(made).load(("m",), NOTHING, None, 0.0)
    assert load.predicted_ttft_s == pytest.approx(0.05 + 0.001 * made.costs.typical_uncached, abs=0.01)
    assert made.costs.typical_uncached > 1000


def test_what_an_instance_holds_back_waits() -> None:
    made = balancer(1, seqs=4)
    busy(made, 3)
    reports = {(0, 1): report(running=1, waiting=2, kv_usage=0.97)}
    load = host(made).load(("m",), reports, 100, 0.0)
    assert (load.running, load.waiting, load.kv_usage) == (1, 2, 0.97)
    stale = {(0, 1): report(running=4, waiting=9)}
    load = host(made).load(("m",), stale, 100, 0.0)
    assert (load.running, load.waiting) == (0, 3)  # no more than it has by our own count
    of_another = {(0, 2): report(waiting=2)}
    assert host(made).load(("m",), of_another, 100, 0.0).running == 3


def test_requests_of_others_run_too() -> None:
    made = balancer(1, seqs=4)
    upstream = next(iter(made.table))
    for _ in range(2):
        made.reconcile(upstream, 5, 0)
    load = host(made).load(("m",), NOTHING, 100, 0.0)
    assert (load.running, load.waiting) == (4, 1)


def test_a_draining_instance_runs_and_takes_nothing() -> None:
    made = balancer(2, seqs=4)
    busy(made, 4)
    first = next(u for u in made.table if u.in_flight)
    made.table.drain(*first.key)
    load = host(made).load(("m",), {first.key: report(kv_usage=0.9)}, 100, 0.0)
    assert (load.running, load.concurrency_limit, load.ready) == (4, 4, 1)
    other = next(u for u in made.table if u is not first)
    assert load.kv_usage == other.in_flight / 4


def test_without_an_instance_the_host_is_full() -> None:
    load = host(balancer(0)).load(("m",), NOTHING, 100, 0.0)
    assert (load.ready, load.concurrency_limit, load.kv_usage, load.predicted_ttft_s) == (0, 0, 1.0, None)


def test_several_models_are_summed_and_the_worst_one_tells_how_full_it_is() -> None:
    made = balancer(1, seqs=4)
    made.add(up(1, model="other", seqs=2))
    busy(made, 1)
    busy(made, 3, "other")
    made.offer(ticket(model=None), 0.0)
    loads = host(made, "m", "other", "never started")
    load = loads.load(loads.models(None), NOTHING, 100, 0.0)
    total = made.queue.count + sum(u.in_flight for u in made.table)
    assert load.running + load.waiting == total == 5
    assert (load.ready, load.concurrency_limit, load.kv_usage) == (2, 6, 1.0)
    assert load.models["m"].kv_usage < 1.0
    assert load.models["other"].waiting == 1
    alone = loads.load(loads.models("alias"), NOTHING, 100, 0.0)
    assert list(alone.models) == ["m"]
    assert alone.running == load.models["m"].running
    with pytest.raises(HttpError, match="does not exist"):
        loads.models("nobody")


def test_the_view_has_the_adapters_of_its_models() -> None:
    made = balancer(2)
    loads = host(made, adapters=("sql", "law"), running=("sql", "of another model"), waiting=("law",))
    reports = {(0, 1): report(max_adapters=4)}
    # Slot 1 has not reported its limit: vLLM's default.
    assert loads.view(("m",), reports, 0.0) == HostView(0, 0, 0.0, 5, ("sql",), ("law",))
    assert loads.models("law") == ("m",)
    assert host(made).view(("m",), reports, 0.0) == HostView(0, 0, 0.0)


def test_every_instance_is_told_with_what_it_has() -> None:
    made = balancer(2, seqs=4)
    made.add(up(3, generation=5, model="other", seqs=2, kv_tokens=7000))
    busy(made, 3)
    busy(made, 3, "other")
    first, second = (u for u in made.table if u.model == "m")
    reports = {first.key: report(waiting=1, kv_usage=0.9, kv_tokens=5000)}
    loads = host(made, "m", "other")
    told = loads.load(loads.models(None), reports, 100, 0.0).instances
    assert told[0] == InstanceLoad(0, 1, "m", True, first.in_flight - 1, 1, 4, 0.9, 5000)
    assert told[1] == InstanceLoad(1, 1, "m", True, second.in_flight, 0, 4, second.in_flight / 4, None)
    assert told[2] == InstanceLoad(3, 5, "other", True, 2, 0, 2, 1.0, 7000)
    assert first.in_flight + second.in_flight == 3
    assert [each.slot for each in loads.load(("other",), reports, 100, 0.0).instances] == [3]


def test_an_instance_that_gets_no_new_requests_is_not_ready() -> None:
    made = balancer(3, seqs=4, eject_failures=1)
    busy(made, 3)
    made.table.drain(0, 1)
    made.failed(next(u for u in made.table if u.slot == 2), 0.0)
    load = host(made).load(("m",), NOTHING, 100, 0.0)
    assert [(each.slot, each.ready) for each in load.instances] == [(0, False), (1, True), (2, False)]
    assert sum(each.running for each in load.instances) == load.running == 3


def test_a_reader_learns_names_and_sees_a_restart() -> None:
    made = balancer(1)
    load = host(made, adapters=("sql", "law")).load(("m",), NOTHING, 100, 0.0)
    assert (load.models["m"].aliases, load.models["m"].adapters) == (("alias",), ("law", "sql"))
    started = HostLoad(
        made, ModelTraits(ModelNames(("m",))), lambda: (frozenset(), frozenset()), 1_795_000_000.5
    )
    assert started.load(("m",), NOTHING, 100, 0.0).started == 1_795_000_000.5
