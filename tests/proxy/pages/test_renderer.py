"""The proxy's own pages, with engines behind them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.balancing import balancer
from support.fakes import SOON_S
from support.keys import head_with, make, put
from support.proxy_under_test import until
from support.requests import request_of
from support.scripted_engine import Call, FakeEngine, Script, answer_chat

from launcher.base import http_json
from launcher.base.api_errors import HttpError
from launcher.keys.api_keys import ApiKeys, KeyEntry
from launcher.proxy.error_forms import body_of
from launcher.proxy.http1.requests import parse_request
from launcher.proxy.openai.models import ModelNames, ModelTraits
from launcher.proxy.pages import renderer
from launcher.proxy.pages import renderer as merged_metrics
from launcher.proxy.pages import renderer as model_list
from launcher.proxy.pages import renderer as scraper
from launcher.proxy.pages.host_load import HostLoad
from launcher.proxy.pages.renderer import Instance, MergedMetrics, PageRenderer, Sources, describe, read_list
from launcher.proxy.request.events import Event, Faulted, HeadReceived, PageReady, Refused
from launcher.proxy.routes import Api, Match, match, split_target
from launcher.telemetry import metrics
from launcher.telemetry.timings import Timings


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> object:
        return json.loads(self.body)


@dataclass
class Pages:
    """A page renderer with engines."""

    folder: Path
    stack: AsyncExitStack
    renderer: PageRenderer
    instances: list[Instance]
    posted: list[Event]
    stopping: list[bool] = field(default_factory=list)

    async def engine(
        self,
        slot: int,
        script: Script = answer_chat,
        *,
        generation: int = 1,
        model: str = "m",
        ready: bool = True,
    ) -> FakeEngine:
        engine = FakeEngine(self.folder / f"{slot}.{generation}.sock", script)
        await self.stack.enter_async_context(engine)
        self.instances.append(Instance(slot, generation, model, engine.address, ready, str(slot // 2)))
        return engine

    async def ask(self, method: str, target: str, key: KeyEntry | None = None) -> Answer:
        """A request for a page, with this key."""
        found = match(method, split_target(target)[0])
        assert isinstance(found, Match)
        request = request_of(split_target(target)[0])
        request.head = parse_request(
            b"%b %b HTTP/1.1\r\nHost: h\r\n\r\n" % (method.encode(), target.encode())
        )
        request.match, request.key = found, key
        self.posted.clear()
        try:
            self.renderer.render(request, HeadReceived(), 0.0)
        except HttpError as error:
            assert target == "/health"
            return Answer(error.status, error.headers, body_of(Api.OPENAI, error))
        task = request.pending
        assert (task is None) == (target == "/health")
        if isinstance(task, asyncio.Task):
            await asyncio.wait({task})
            await asyncio.sleep(0)
        (event,) = self.posted
        if isinstance(event, Refused):
            return Answer(event.error.status, event.error.headers, body_of(Api.OPENAI, event.error))
        assert isinstance(event, PageReady)
        head = event.answer.head
        return Answer(head.status, {"Content-Type": str(head.get(b"content-type"))}, event.answer.body)


Open = Callable[..., Awaitable[Pages]]


@pytest.fixture
async def open_pages(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def make_pages(*names: str, aliases: Mapping[str, str] | None = None) -> Pages:
            instances: list[Instance] = []
            stopping: list[bool] = []
            made_balancer = balancer(2, seqs=4)
            traits = ModelTraits(ModelNames(names or ("m",), aliases))
            sources = Sources(
                instances=lambda: instances,
                values=lambda: {metrics.ACCEPTED: {(): 3}},
                timings=Timings(),
                load=HostLoad(made_balancer, traits, lambda: (frozenset(), frozenset())),
                stopping=lambda: bool(stopping),
                retry_after_s=lambda: 4,
            )
            posted: list[Event] = []
            made = PageRenderer(traits, sources, lambda _request, event: posted.append(event))
            stack.push_async_callback(made.close)
            return Pages(tmp_path, stack, made, instances, posted, stopping)

        yield make_pages


@pytest.fixture
async def pages(open_pages: Open) -> Pages:
    return await open_pages()


def lists(*entries: dict[str, object]) -> Script:
    async def script(call: Call) -> None:
        await call.json({"object": "list", "data": list(entries)})

    return script


def counts(*values: float, running: float = 1) -> Script:
    """Each page has the next value of a counter."""
    pages = list(values)

    async def script(call: Call) -> None:
        value = pages.pop(0) if len(pages) > 1 else pages[0]
        page = (
            "# HELP vllm:generation_tokens_total Tokens.\n# TYPE vllm:generation_tokens_total counter\n"
            f'vllm:generation_tokens_total{{model_name="m"}} {value}\n'
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {running}\n"
        ).encode()
        await call.raw(
            f"HTTP/1.1 200 OK\r\nContent-Length: {len(page)}\r\nConnection: close\r\n\r\n".encode() + page
        )

    return script


# --- health -------------------------------------------------------------------------------------


async def test_health(pages: Pages) -> None:
    answer = await pages.ask("GET", "/health")
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "4"
    assert answer.json() == {
        "error": {
            "message": "no instance is ready",
            "type": "service_unavailable",
            "param": None,
            "code": "no_instance_ready",
        }
    }
    await pages.engine(0)
    await pages.engine(1, ready=False)
    answer = await pages.ask("GET", "/health")
    assert (answer.status, answer.json()) == (200, {"status": "ok", "ready": 1})
    pages.stopping.append(True)
    assert (await pages.ask("GET", "/health")).status == 503


# --- models -------------------------------------------------------------------------------------


async def test_models_are_merged_and_keep_their_fields(open_pages: Open) -> None:
    pages = await open_pages(
        "a",
        "org/b",
        "never",
        aliases={"gpt-4o": "a", "gpt-4o-mini": "a"},
    )
    a = {"id": "a", "object": "model", "owned_by": "vllm", "max_model_len": 4096, "permission": []}
    for slot in range(2):
        await pages.engine(slot, lists(a), model="a")
    await pages.engine(2, lists({"id": "/models/b.gguf", "x": 1}), model="org/b")
    b = {"id": "org/b", "x": 1}
    aliases = [{**a, "id": "gpt-4o"}, {**a, "id": "gpt-4o-mini"}]
    whole = {"object": "list", "data": [a, *aliases, b]}
    assert (await pages.ask("GET", "/v1/models")).json() == whole
    assert (await pages.ask("GET", "/v1/models/org/b")).json() == b
    assert (await pages.ask("GET", "/v1/models/org%2Fb")).json() == b
    assert (await pages.ask("GET", "/v1/models/gpt-4o?x=1")).json() == aliases[0]
    head = await pages.ask("HEAD", "/v1/models/a")
    assert (head.status, head.headers["Content-Type"]) == (200, "application/json")
    answer = await pages.ask("GET", "/v1/models/x")
    assert answer.status == 404
    assert b'"code":"model_not_found"' in answer.body
    assert (await pages.ask("GET", "/v1/models/never")).status == 503
    pages.instances.clear()
    assert (await pages.ask("GET", "/v1/models")).json() == whole  # menus do not flicker while it restarts


async def test_models_are_asked_once_a_second(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await pages.engine(0)
    for _ in range(3):
        await pages.ask("GET", "/v1/models")
    assert len(engine.calls) == 1
    monkeypatch.setattr(model_list, "MODELS_AGE_S", 0.0)
    await pages.ask("GET", "/v1/models")
    assert len(engine.calls) == 2


async def test_a_draining_instance_is_not_asked_for_models(pages: Pages) -> None:
    engine = await pages.engine(0, ready=False)
    assert (await pages.ask("GET", "/v1/models")).json() == {"object": "list", "data": []}
    assert not engine.calls


async def test_a_key_with_an_allow_list_sees_its_models(open_pages: Open, tmp_path: Path) -> None:
    ann, record = make("ann", models=("gpt-4o",))
    bob, bob_record = make("bob")
    put(tmp_path / "keys", record, bob_record)
    keys = ApiKeys(str(tmp_path / "keys"))
    pages = await open_pages("a", "b", aliases={"gpt-4o": "a"})
    await pages.engine(0, lists({"id": "a"}), model="a")
    await pages.engine(1, lists({"id": "b"}), model="b")
    limited, free = keys.check(head_with(None, ann), 0.0), keys.check(head_with(None, bob), 0.0)

    async def listed(key: KeyEntry | None) -> list[str]:
        answer = await pages.ask("GET", "/v1/models", key)
        return [entry["id"] for entry in json.loads(answer.body)["data"]]

    assert await listed(limited) == ["a", "gpt-4o"]
    assert await listed(free) == ["a", "gpt-4o", "b"]
    assert (await pages.ask("GET", "/v1/models/b", limited)).status == 404
    assert (await pages.ask("GET", "/v1/models/b", free)).status == 200


async def test_a_page_whose_client_left_is_not_delivered(pages: Pages) -> None:
    left = asyncio.Event()

    async def hang(call: Call) -> None:
        await call.until_left()
        left.set()

    engine = await pages.engine(0, hang)
    request = request_of("/metrics")
    pages.renderer.render(request, HeadReceived(), 0.0)
    task = request.pending
    assert isinstance(task, asyncio.Task)
    assert task.get_name() == "render /metrics"
    await until(lambda: bool(engine.calls))
    task.cancel()
    async with asyncio.timeout(SOON_S):
        await left.wait()
    assert pages.posted == []


async def test_what_goes_wrong_in_a_page_is_delivered(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ZeroDivisionError()

    async def fail() -> str:
        raise fault

    monkeypatch.setattr(MergedMetrics, "page", lambda *_: fail())
    pages.renderer.render(request_of("/metrics"), HeadReceived(), 0.0)
    await until(lambda: bool(pages.posted))
    (event,) = pages.posted
    assert isinstance(event, Faulted)
    assert event.error is fault


async def test_a_page_has_a_deadline(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "PAGE_TIMEOUT_S", 0.02)

    async def hang(call: Call) -> None:
        await call.until_left()

    await pages.engine(0, hang)
    answer = await pages.ask("GET", "/metrics")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "4")


def test_describe() -> None:
    def described(body: bytes) -> dict[str, object] | None:
        return describe("m", read_list(body))

    assert described(b'{"data":[{"id":"lora"},{"id":"m","y":2}]}') == {"id": "m", "y": 2}
    assert described(b'{"data":[{"id":"other","y":2}]}') == {"id": "m", "y": 2}
    for bad in (b"", b"{}", b'{"data":[]}', b"[]", b"\xff"):
        assert described(bad) is None


# --- metrics ------------------------------------------------------------------------------------


async def tokens(pages: Pages) -> dict[str, float]:
    """The token counter by slot."""
    answer = await pages.ask("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    found = families.get("vllm:generation_tokens")
    return {} if found is None else {sample.labels["slot"]: sample.value for sample in found.samples}


async def test_metrics_are_ours_and_theirs(pages: Pages) -> None:
    for slot in (0, 3):
        await pages.engine(slot, counts(slot + 5.0))
    answer = await pages.ask("GET", "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    running = families["vllm:num_requests_running"].samples
    assert [sample.labels for sample in running] == [
        {"slot": "0", "model": "m", "numa_node": "0"},
        {"slot": "3", "model": "m", "numa_node": "1"},
    ]
    assert families["numa_launcher_requests_accepted"].samples[0].value == 3
    assert await tokens(pages) == {"0": 5, "3": 8}


async def test_instances_are_asked_once_a_second(pages: Pages) -> None:
    engine = await pages.engine(0)
    for _ in range(3):
        await pages.ask("GET", "/metrics")
        await pages.renderer.loads()
    assert len(engine.calls) == 1


async def test_counters_never_fall(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged_metrics, "METRICS_AGE_S", 0.0)
    await pages.engine(0, counts(100, 150))
    await pages.engine(1, counts(7))
    assert await tokens(pages) == {"0": 100, "1": 7}
    assert await tokens(pages) == {"0": 150, "1": 7}
    pages.instances.pop(0)  # slot 0 restarts: its sum stands, its gauges go
    assert await tokens(pages) == {"1": 7, "0": 150}
    assert b'num_requests_running{slot="0"' not in (await pages.ask("GET", "/metrics")).body
    await pages.engine(0, counts(0, 160), generation=2)
    assert await tokens(pages) == {"1": 7, "0": 150}
    assert await tokens(pages) == {"1": 7, "0": 310}


async def test_an_instance_that_does_not_answer_is_left_out(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraper, "FETCH_TIMEOUT_S", 0.5)

    async def hang(call: Call) -> None:
        await call.until_left()

    async def fail(call: Call) -> None:
        await call.json({"detail": "no"}, 500)

    async def garbage(call: Call) -> None:
        await call.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        await call.until_left()

    async def cut(call: Call) -> None:
        call.cut()

    for slot, script in enumerate((hang, fail, garbage, cut)):
        await pages.engine(slot, script)
    await pages.engine(7, counts(1))
    pages.instances.append(Instance(8, 1, "m", FakeEngine(pages.folder / "nobody").address))
    assert await tokens(pages) == {"7": 1}


async def test_a_page_that_never_ends_is_left_out(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_json, "MAX_PAGE_BYTES", 1000)

    async def endless(call: Call) -> None:
        await call.raw(b"HTTP/1.1 200 OK\r\n\r\n" + b"x 1\n" * 1000)
        await call.until_left()

    await pages.engine(0, endless)
    assert await tokens(pages) == {}


# --- for gateways -------------------------------------------------------------------------------


async def test_the_host_view_has_the_four_families_and_nothing_else(pages: Pages) -> None:
    await pages.engine(0, counts(5.0))
    answer = await pages.ask("GET", "/metrics?view=host")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(answer.body.decode()))
    assert {family.name: len(family.samples) for family in families} == dict.fromkeys(
        (
            "vllm:num_requests_waiting",
            "vllm:num_requests_running",
            "vllm:kv_cache_usage_perc",
            "vllm:lora_requests_info",
        ),
        1,
    )
    for target in ("/metrics?view=host&model=m", "/metrics/host", "/metrics/host?model=m"):
        assert (await pages.ask("GET", target)).body[:60] == answer.body[:60]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/metrics?view=", 400),
        ("/metrics?view=slots", 400),
        ("/metrics?view=host&model=x", 404),
        ("/load?model=x", 404),
        ("/load?prompt_tokens=", 400),
        ("/load?prompt_tokens=-1", 400),
        ("/load?prompt_tokens=%C2%B2", 400),
        ("/load?prompt_tokens=1000000000", 400),
        ("/load?other=1", 200),
    ],
)
async def test_a_query_of_a_gateway_is_checked(pages: Pages, target: str, status: int) -> None:
    assert (await pages.ask("GET", target)).status == status


async def test_load_predicts_for_a_prompt_of_this_size(pages: Pages) -> None:
    load = json.loads((await pages.ask("GET", "/load?prompt_tokens=1000")).body)
    model_list, instances, started = load.pop("models"), load.pop("instances"), load.pop("started")
    assert model_list == {"m": {**load, "aliases": [], "adapters": []}}
    assert [(each["slot"], each["concurrency_limit"]) for each in instances] == [(0, 4), (1, 4)]
    assert isinstance(started, float)
    assert load == {
        "running": 0,
        "waiting": 0,
        "concurrency_limit": 8,
        "ready": 2,
        "kv_usage": 0.0,
        "predicted_ttft_s": pytest.approx(1.05),
    }


async def test_gateways_do_not_make_the_instances_work(pages: Pages) -> None:
    engine = await pages.engine(0, counts(5.0))
    for _ in range(5):
        await pages.ask("GET", "/load")
        await pages.ask("GET", "/metrics?view=host")
    assert len(engine.calls) == 1
