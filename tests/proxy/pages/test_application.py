"""The pages of our own, with engines behind them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fakes import SOON_S
from prometheus_client.parser import text_string_to_metric_families
from proxy.auth.test_api_keys import make, put
from proxy.scripted_engine import Call, FakeEngine, Script, answer_chat

from launcher.config.schema import Model, Proxy
from launcher.proxy.auth.api_keys import ApiKeys
from launcher.proxy.auth.key_record import id_of
from launcher.proxy.errors import HttpError
from launcher.proxy.pages import models
from launcher.proxy.pages.application import Application, InProcess, Sources
from launcher.proxy.pages.models import describe, read_list
from launcher.proxy.routes import Match, match, split_target
from launcher.proxy.upstream import scraper
from launcher.proxy.upstream.scraper import Instance
from launcher.telemetry import engine_pages, metrics


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> object:
        return json.loads(self.body)


@dataclass
class Backroom:
    """An application with engines, and a proxy that is made up."""

    folder: Path
    stack: AsyncExitStack
    inside: InProcess
    application: Application
    instances: list[Instance]
    keys: ApiKeys
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

    async def ask(self, method: str, target: str, key_id: str | None = None) -> Answer:
        """A request for a page, let in with this key."""
        found = match(method, split_target(target)[0])
        assert isinstance(found, Match)
        try:
            page = await self.application.page(found, key_id)
        except HttpError as refusal:
            return Answer(refusal.status, refusal.headers, refusal.body())
        return Answer(200, {"Content-Type": page.content_type}, page.body)

    async def send(self, method: str, target: str, *lines: str, body: bytes = b"") -> Answer:
        """One request to what forwards to the overflow endpoint, over a connection of its own, which is closed then."""
        sock = await self.inside.connect()
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        head = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *lines]
        head += [f"Content-Length: {len(body)}"] if body else []
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + body)
        async with asyncio.timeout(SOON_S):
            raw = await reader.read()
        writer.close()
        top, _, rest = raw.partition(b"\r\n\r\n")
        first, *fields = top.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
        return Answer(int(first.split()[1]), headers, rest)


def let_in(key: str) -> str:
    """What tells the application which key a request was let in with."""
    return f"Numa-Launcher-Key: {id_of(key)}"


Open = Callable[..., Awaitable[Backroom]]


@pytest.fixture
async def open_room(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as stack:

        async def make_room(*models: Model, keys: str | None = None, **settings: object) -> Backroom:
            instances: list[Instance] = []
            stopping: list[bool] = []
            sources = Sources(
                instances=lambda: instances,
                values=lambda: {metrics.ACCEPTED: {(): 3}},
                timings=metrics.Timings(),
                stopping=lambda: bool(stopping),
                retry_after_s=lambda: 4,
            )
            known = ApiKeys(keys)
            application = Application(
                Proxy(**settings),  # type: ignore[arg-type]
                models or (Model(name="m", path="/m"),),
                known,
                sources,
            )
            inside = InProcess(application)
            await inside.start()
            stack.push_async_callback(application.close)
            stack.push_async_callback(inside.close)
            return Backroom(tmp_path, stack, inside, application, instances, known, stopping)

        yield make_room


@pytest.fixture
async def room(open_room: Open) -> Backroom:
    return await open_room()


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


async def test_health(room: Backroom) -> None:
    answer = await room.ask("GET", "/health")
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
    await room.engine(0)
    await room.engine(1, ready=False)
    answer = await room.ask("GET", "/health")
    assert (answer.status, answer.json()) == (200, {"status": "ok", "ready": 1})
    room.stopping.append(True)
    assert (await room.ask("GET", "/health")).status == 503


# --- models -------------------------------------------------------------------------------------


async def test_models_are_merged_and_keep_their_fields(open_room: Open) -> None:
    room = await open_room(
        Model(name="a", path="/a", aliases=("gpt-4o", "gpt-4o-mini")),
        Model(name="org/b", path="/b"),
        Model(name="never", path="/n"),
    )
    a = {"id": "a", "object": "model", "owned_by": "vllm", "max_model_len": 4096, "permission": []}
    for slot in range(2):
        await room.engine(slot, lists(a), model="a")
    await room.engine(2, lists({"id": "/models/b.gguf", "x": 1}), model="org/b")
    b = {"id": "org/b", "x": 1}
    aliases = [{**a, "id": "gpt-4o"}, {**a, "id": "gpt-4o-mini"}]
    whole = {"object": "list", "data": [a, *aliases, b]}
    assert (await room.ask("GET", "/v1/models")).json() == whole
    assert (await room.ask("GET", "/v1/models/org/b")).json() == b
    assert (await room.ask("GET", "/v1/models/org%2Fb")).json() == b
    assert (await room.ask("GET", "/v1/models/gpt-4o?x=1")).json() == aliases[0]
    head = await room.ask("HEAD", "/v1/models/a")
    assert (head.status, head.headers["Content-Type"]) == (200, "application/json")
    answer = await room.ask("GET", "/v1/models/x")
    assert answer.status == 404
    assert b'"code":"model_not_found"' in answer.body
    assert (await room.ask("GET", "/v1/models/never")).status == 503
    room.instances.clear()
    assert (await room.ask("GET", "/v1/models")).json() == whole  # menus do not flicker while it restarts


async def test_models_are_asked_once_a_second(room: Backroom, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await room.engine(0)
    for _ in range(3):
        await room.ask("GET", "/v1/models")
    assert len(engine.calls) == 1
    monkeypatch.setattr(models, "MODELS_AGE_S", 0.0)
    await room.ask("GET", "/v1/models")
    assert len(engine.calls) == 2


async def test_a_draining_instance_is_not_asked_for_models(room: Backroom) -> None:
    engine = await room.engine(0, ready=False)
    assert (await room.ask("GET", "/v1/models")).json() == {"object": "list", "data": []}
    assert not engine.calls


async def test_a_key_with_an_allow_list_sees_its_models(open_room: Open, tmp_path: Path) -> None:
    ann, record = make("ann", models=("gpt-4o",))
    bob, bob_record = make("bob")
    put(tmp_path / "keys", record, bob_record)
    room = await open_room(
        Model(name="a", path="/a", aliases=("gpt-4o",)),
        Model(name="b", path="/b"),
        keys=str(tmp_path / "keys"),
    )
    await room.engine(0, lists({"id": "a"}), model="a")
    await room.engine(1, lists({"id": "b"}), model="b")

    async def listed(key_id: str) -> list[str]:
        answer = await room.ask("GET", "/v1/models", key_id)
        return [entry["id"] for entry in json.loads(answer.body)["data"]]

    assert await listed(id_of(ann)) == ["a", "gpt-4o"]
    assert await listed(id_of(bob)) == ["a", "gpt-4o", "b"]
    assert (await room.ask("GET", "/v1/models/b", id_of(ann))).status == 404
    assert (await room.ask("GET", "/v1/models/b", id_of(bob))).status == 200
    for key_id in (None, bob, "aaaaaaaa"):  # nobody was let in with these
        assert (await room.ask("GET", "/v1/models", key_id)).status == 401
        assert (await room.ask("GET", "/v1/models/b", key_id)).status == 401
    put(tmp_path / "keys", record)
    room.keys.reload(0.0)
    assert (await room.ask("GET", "/v1/models", id_of(bob))).status == 401  # revoked on the way


def test_describe() -> None:
    def described(body: bytes) -> dict[str, object] | None:
        return describe("m", read_list(body))

    assert described(b'{"data":[{"id":"lora"},{"id":"m","y":2}]}') == {"id": "m", "y": 2}
    assert described(b'{"data":[{"id":"other","y":2}]}') == {"id": "m", "y": 2}
    for bad in (b"", b"{}", b'{"data":[]}', b"[]", b"\xff"):
        assert described(bad) is None


# --- metrics ------------------------------------------------------------------------------------


async def tokens(room: Backroom) -> dict[str, float]:
    """The token counter by slot."""
    answer = await room.ask("GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    found = families.get("vllm:generation_tokens")
    return {} if found is None else {sample.labels["slot"]: sample.value for sample in found.samples}


async def test_metrics_are_ours_and_theirs(room: Backroom) -> None:
    for slot in (0, 3):
        await room.engine(slot, counts(slot + 5.0))
    answer = await room.ask("GET", "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}
    running = families["vllm:num_requests_running"].samples
    assert [sample.labels for sample in running] == [
        {"slot": "0", "model": "m", "numa_node": "0"},
        {"slot": "3", "model": "m", "numa_node": "1"},
    ]
    assert families["numa_launcher_requests_accepted"].samples[0].value == 3
    assert await tokens(room) == {"0": 5, "3": 8}


async def test_instances_are_asked_once_a_second(room: Backroom) -> None:
    engine = await room.engine(0)
    for _ in range(3):
        await room.ask("GET", "/metrics")
        await room.application.loads()
    assert len(engine.calls) == 1


async def test_counters_never_fall(room: Backroom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "METRICS_AGE_S", 0.0)
    await room.engine(0, counts(100, 150))
    await room.engine(1, counts(7))
    assert await tokens(room) == {"0": 100, "1": 7}
    assert await tokens(room) == {"0": 150, "1": 7}
    room.instances.pop(0)  # slot 0 restarts: its sum stands, its gauges go
    assert await tokens(room) == {"1": 7, "0": 150}
    assert b'num_requests_running{slot="0"' not in (await room.ask("GET", "/metrics")).body
    await room.engine(0, counts(0, 160), generation=2)
    assert await tokens(room) == {"1": 7, "0": 150}
    assert await tokens(room) == {"1": 7, "0": 310}


async def test_an_instance_that_does_not_answer_is_left_out(
    room: Backroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraper, "FETCH_TIMEOUT_S", 0.05)

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
        await room.engine(slot, script)
    await room.engine(7, counts(1))
    room.instances.append(Instance(8, 1, "m", FakeEngine(room.folder / "nobody").address))
    assert await tokens(room) == {"7": 1}


async def test_a_page_that_never_ends_is_left_out(room: Backroom, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_pages, "MAX_PAGE_BYTES", 1000)

    async def endless(call: Call) -> None:
        await call.raw(b"HTTP/1.1 200 OK\r\n\r\n" + b"x 1\n" * 1000)
        await call.until_left()

    await room.engine(0, endless)
    assert await tokens(room) == {}


# --- the way in ---------------------------------------------------------------------------------


async def test_close_ends_what_is_open(open_room: Open) -> None:
    room = await open_room()
    sock = await room.inside.connect()
    await room.inside.close()
    reader, writer = await asyncio.open_unix_connection(sock=sock)
    assert await reader.read() == b""
    writer.close()


async def test_not_started() -> None:
    sources = Sources(list, dict, metrics.Timings(), lambda: False, lambda: 1)
    application = Application(Proxy(), [Model(name="m", path="/m")], ApiKeys(None), sources)
    with pytest.raises(RuntimeError, match="not started"):
        await InProcess(application).connect()
    await application.close()


async def test_the_socket_is_the_callers(room: Backroom) -> None:
    sock = await room.inside.connect()
    assert sock.family == socket.AF_UNIX
    assert sock.gettimeout() == 0.0
    sock.close()
