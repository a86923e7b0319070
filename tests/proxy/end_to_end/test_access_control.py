"""Keys, certificates, origins, aliases and overflow: who may ask what."""

from __future__ import annotations

import asyncio
import io
import json
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from support.certificates import certify
from support.keys import new_key
from support.proxy_under_test import Build, until
from support.scripted_engine import DONE, Call, answer_chat

from launcher.base.watched_file import FileCondition
from launcher.config.schema import Model, Overflow, Proxy
from launcher.keys import key_record
from launcher.proxy.request.decisions import MAX_REWRITTEN_BYTES
from launcher.proxy.server import ProxyServer
from launcher.telemetry import metrics


async def test_no_key_no_answer(build: Build, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    key = new_key(keys, "app")
    proxy = await build(api_keys_file=str(keys))
    engine = await proxy.engine(0)
    async with proxy.chat() as answer:
        assert answer.status == 401
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert (await answer.json())["error"]["code"] == "invalid_api_key"
    assert engine.calls == []
    for open_path in ("/health", "/load", "/metrics?view=host", "/metrics/host"):
        async with proxy.client.get(open_path) as answer:
            assert answer.status == 200
    head = {"Authorization": f"Bearer {key}"}
    body = json.dumps({"model": "m", "messages": []})
    async with proxy.client.post("/v1/chat/completions", data=body, headers=head) as answer:
        assert answer.status == 200
    (call,) = (call for call in engine.calls if call.target == "/v1/chat/completions")
    assert call.header("Authorization") is None
    async with proxy.client.get("/v1/models", headers=head) as answer:
        assert [entry["id"] for entry in (await answer.json())["data"]] == ["m"]
    async with proxy.client.get("/metrics") as answer:
        page = await answer.text()
    assert 'numa_launcher_key_requests_ended_total{key="app",outcome="completed"} 1.0' in page
    assert key not in page


@pytest.mark.parametrize(
    "lines",
    [
        ("Connection: authorization", "Authorization: Bearer {ann}"),
        ("Connection: x-api-key, keep-alive", "X-Api-Key: {ann}"),
        ("Connection: authorization", "Authorization: Bearer {ann}", "X-Api-Key: {bob}"),
        ("Authorization: Bearer {ann}", "Authorization: Bearer {bob}"),
        ("Authorization: Bearer {ann}", "Numa-Launcher-Key: {bob_id}"),
        ("Connection: numa-launcher-key", "Authorization: Bearer {ann}"),
    ],
)
@pytest.mark.parametrize("target", ["/v1/models", "/v1/models/other"])
async def test_a_page_is_for_the_key_that_was_let_in(
    build: Build, tmp_path: Path, target: str, lines: tuple[str, ...]
) -> None:
    """Fields that `Connection` names stay here, and a page must not take their absence for no limits."""
    keys = tmp_path / "keys"
    named = {"ann": new_key(keys, "ann", models=("m",)), "bob": new_key(keys, "bob")}
    named["bob_id"] = key_record.id_of(named["bob"])
    proxy = await build("m", "other", api_keys_file=str(keys))
    await proxy.engine(0)
    await proxy.engine(1, lists_other, model="other")
    fields = "".join(f"{line.format_map(named)}\r\n" for line in lines)
    reader, _ = await proxy.raw(f"GET {target} HTTP/1.1\r\nHost: x\r\n{fields}\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    body = json.loads(await reader.readexactly(length))
    if target == "/v1/models":
        assert [entry["id"] for entry in body["data"]] == ["m"]
    else:
        assert body["error"]["code"] == "model_not_found"


async def lists_other(call: Call) -> None:
    await call.json({"object": "list", "data": [{"id": "other", "object": "model"}]})


async def test_a_keys_limits(build: Build, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    key = new_key(keys, "app", concurrency=1, models=("m",))
    proxy = await build("m", "other", api_keys_file=str(keys))
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    engine = await proxy.engine(0, script)
    await proxy.engine(1, model="other")
    head = {"Authorization": f"Bearer {key}"}

    async def ask(model: str) -> tuple[int, str | None]:
        body = json.dumps({"model": model, "messages": []})
        async with proxy.client.post("/v1/chat/completions", data=body, headers=head) as answer:
            await answer.read()
            return answer.status, answer.headers.get("Retry-After")

    first = asyncio.create_task(ask("m"))
    await until(lambda: bool(engine.calls))
    status, retry = await ask("m")
    assert status == 429
    assert int(retry or 0) >= 1
    assert (await ask("other"))[0] == 429  # no body is read for it
    go.set()
    assert (await first)[0] == 200
    assert (await ask("other"))[0] == 403
    assert (await ask("m"))[0] == 200
    assert proxy.balanced()


async def test_tokens_of_whole_answers_count(build: Build, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    key = new_key(keys, "app", tokens_per_minute=1000)
    proxy = await build(api_keys_file=str(keys))

    async def script(call: Call) -> None:
        await call.json(
            {"id": "x", "usage": {"prompt_tokens": 395, "completion_tokens": 5, "total_tokens": 400}}
        )

    await proxy.engine(0, script)
    head = {"Authorization": f"Bearer {key}"}
    statuses = []
    body = json.dumps(
        {"model": "m", "messages": [{"role": "user", "content": "word " * 310}], "max_tokens": 10}
    )
    for _ in range(3):
        async with proxy.client.post("/v1/chat/completions", data=body, headers=head) as answer:
            statuses.append(answer.status)
    assert statuses == [200, 200, 429]  # 800 of 1,000 are spent, and a third one takes 400
    async with proxy.client.get("/metrics") as answer:
        assert 'numa_launcher_key_tokens_total{key="app"} 800.0' in await answer.text()


async def test_a_client_that_leaves_pays_for_its_prompt(build: Build, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    key = new_key(keys, "app", tokens_per_minute=1000)
    proxy = await build(api_keys_file=str(keys))

    async def script(call: Call) -> None:
        await call.until_left()

    engine = await proxy.engine(0, script)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 200}]})
    head = {"Authorization": f"Bearer {key}"}
    asked = proxy.client.post("/v1/chat/completions", data=body, headers=head)
    client = asyncio.create_task(asked.__aenter__())
    await until(lambda: bool(engine.calls))
    client.cancel()
    await until(proxy.balanced)
    async with proxy.client.get("/metrics") as answer:
        page = await answer.text()
    spent = float(page.partition('numa_launcher_key_tokens_total{key="app"} ')[2].partition("\n")[0])
    assert 200 <= spent <= 300  # 1,000 letters and what is around them, no answer


@pytest.mark.parametrize("wanted", [False, True])
async def test_prompts_are_logged_only_where_that_is_wanted(
    build: Build, caplog: pytest.LogCaptureFixture, wanted: bool
) -> None:
    caplog.set_level("DEBUG")
    proxy = await build(log_prompts=wanted)
    await proxy.engine(0)
    async with proxy.chat(secret="what people wrote") as answer:
        assert answer.status == 200
    assert any("what people wrote" in record.getMessage() for record in caplog.records) == wanted


async def test_tls(tmp_path: Path) -> None:
    certificate, key = await asyncio.to_thread(certify, tmp_path, "c")
    server = ProxyServer(
        Proxy(listen=("127.0.0.1:0",), tls_certificate=str(certificate), tls_key=str(key)),
        models=[Model(name="m", path="/x")],
        on_idle=lambda *_: None,
        on_suspect=lambda *_: None,
    )
    await server.start()
    try:
        assert server.endpoint.startswith("https://")
        context = ssl.create_default_context(cafile=str(certificate))
        async with (
            aiohttp.ClientSession() as client,
            client.get(server.endpoint + "/health", ssl=context) as answer,
        ):
            assert answer.status == 503
    finally:
        await server.stop(0)


async def test_files_that_clients_do_not_see_have_a_state(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate that has expired is said when the proxy starts, and keys that cannot be read without a request."""
    chain, key = await asyncio.to_thread(certify, tmp_path, "a")
    old = tmp_path / "old.pem"
    command = ["openssl", "x509", "-in", chain, "-signkey", key, "-days", "-1", "-out", old]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    path = tmp_path / "api-keys"
    new_key(path, "ann")
    proxy = await build(tls_certificate=str(old), tls_key=str(key), api_keys_file=str(path))
    assert f"TLS certificate '{old}' expired at" in caplog.text
    certificate, keys = proxy.server.readings.files()
    assert (certificate.state, keys.state) == (FileCondition.EXPIRED, FileCondition.IN_USE)
    path.write_text("nonsense")
    await until(lambda: "keeping the API keys read before" in caplog.text)
    assert proxy.server.readings.files()[1].state is FileCondition.UNUSABLE
    usable = proxy.server.readings.values()[metrics.FILE_USABLE]
    assert usable == {("TLS certificate",): 0.0, ("API keys",): 0.0}


async def test_cors(build: Build) -> None:
    proxy = await build(cors_origins=("https://chat.example.org",))
    engine = await proxy.engine(0)
    asks = {"Origin": "https://chat.example.org", "Access-Control-Request-Method": "POST"}
    async with proxy.client.options("/v1/chat/completions", headers=asks) as answer:
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == "https://chat.example.org"
    body = b'{"model":"m"}'
    head = {"Origin": "https://chat.example.org"}
    async with proxy.client.post("/v1/chat/completions", data=body, headers=head) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == "https://chat.example.org"
    async with proxy.client.post(
        "/v1/chat/completions", data=body, headers={"Origin": "https://evil.example"}
    ) as answer:
        assert "Access-Control-Allow-Origin" not in answer.headers
    assert engine.calls[0].header("Origin") is None  # else vLLM would allow everybody


async def test_no_cors_unless_asked_for(build: Build) -> None:
    proxy = await build()
    await proxy.engine(0)
    async with proxy.client.options(
        "/v1/chat/completions", headers={"Origin": "https://a.example"}
    ) as answer:
        assert answer.status == 405


async def test_what_passes_for_tracing(build: Build) -> None:
    proxy = await build()
    engine = await proxy.engine(0)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    head = {"traceparent": trace, "tracestate": "a=b", "X-Request-Id": "mine-1"}
    async with proxy.client.post("/v1/completions", data=b'{"model":"m"}', headers=head) as answer:
        assert answer.headers["X-Request-Id"] == "mine-1"
        assert "queue;dur=" in answer.headers["Server-Timing"]
    (call,) = engine.calls
    assert (call.header("traceparent"), call.header("tracestate")) == (trace, "a=b")
    assert call.header("X-Request-Id") == "mine-1"


@pytest.fixture
async def outside(unused_tcp_port: int) -> object:
    """An external OpenAI-compatible endpoint; what it got."""
    seen: list[tuple[dict[str, str], dict[str, object]]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append((dict(request.headers), await request.json()))
        if seen[-1][1].get("stream"):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"id":"o"}\n\n' + DONE)
            return response
        return web.json_response({"id": "outside", "usage": {"prompt_tokens": 7, "completion_tokens": 5}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    yield f"http://127.0.0.1:{unused_tcp_port}/v1", seen
    await runner.cleanup()


@pytest.mark.parametrize("stream", [False, True])
async def test_overflow_takes_what_has_no_room(
    build: Build,
    tmp_path: Path,
    outside: tuple[str, list[tuple[dict[str, str], dict[str, object]]]],
    stream: bool,
) -> None:
    url, seen = outside
    keys, secret = tmp_path / "keys", tmp_path / "secret"
    secret.write_text("sk-outside")
    secret.chmod(0o600)
    free, local = new_key(keys, "free"), new_key(keys, "local", local_only=True)
    proxy = await build(
        queue_max_requests=0,
        api_keys_file=str(keys),
        overflow=(Overflow(url=url, models={"m": "gpt-outside"}, api_key_file=str(secret)),),
    )
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await go.wait()
        await answer_chat(call)

    engine = await proxy.engine(0, script)

    async def ask(key: str) -> tuple[int, bytes, str | None]:
        body = json.dumps({"model": "m", "messages": [], "stream": stream})
        head = {"Authorization": f"Bearer {key}"}
        async with proxy.client.post("/v1/chat/completions", data=body, headers=head) as answer:
            return answer.status, await answer.read(), answer.headers.get("X-Served-By")

    inside = [asyncio.create_task(ask(local)) for _ in range(8)]
    await until(lambda: len(engine.calls) == 8)
    assert (await ask(local))[0] == 429
    assert seen == []
    large = json.dumps({"model": "m", "messages": [], "pad": "x" * MAX_REWRITTEN_BYTES})
    head = {"Authorization": f"Bearer {free}"}
    async with proxy.client.post(
        "/v1/chat/completions", data=io.BytesIO(large.encode()), headers=head
    ) as answer:
        assert answer.status == 429  # it would be made anew in one go
    assert seen == []
    status, body, by = await ask(free)
    assert (status, by) == (200, "overflow")
    assert body.endswith(DONE) if stream else json.loads(body)["id"] == "outside"
    headers, asked = seen[0]
    assert headers["Authorization"] == "Bearer sk-outside"
    assert free not in str(headers)
    assert asked["model"] == "gpt-outside"
    async with proxy.client.get("/metrics") as answer:
        page = await answer.text()
    spent = float(page.partition('numa_launcher_key_tokens_total{key="free"} ')[2].partition("\n")[0])
    assert spent > 0 if stream else spent == 12  # an estimate where it does not say
    go.set()
    assert {task[0] for task in await asyncio.gather(*inside)} == {200}
    assert proxy.balanced()


WORDS = "word " * 4000
PROMPTS = [
    ("/v1/completions", {"messages": "x", "prompt": WORDS}),
    ("/v1/completions", {"input": "x", "prompt": WORDS}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}], "prompt": "x", "input": "x"}),
    ("/v1/responses", {"messages": "x", "prompt": {"id": "x"}, "input": "x", "instructions": WORDS}),
    ("/v1/messages", {"messages": [], "system": WORDS, "prompt": "x"}),
    ("/v1/embeddings", {"input": WORDS, "prompt": "x"}),
    ("/v1/rerank", {"messages": "x", "query": "x", "documents": [WORDS]}),
    ("/v1/score", {"messages": "x", "text_1": "x", "text_2": [WORDS]}),
    ("/pooling", {"prompt": "x", "data": WORDS}),
    ("/inference/v1/generate", {"prompt": "x", "token_ids": [12345] * 3000}),
]


@pytest.mark.parametrize(("path", "fields"), PROMPTS)
async def test_a_key_is_charged_for_what_the_route_computes(
    build: Build, tmp_path: Path, path: str, fields: dict[str, object]
) -> None:
    """By estimate, when the request is admitted, whatever other fields it has."""
    key = new_key(tmp_path / "keys", "app", tokens_per_minute=8000)
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    engine = await proxy.engine(0)
    head = {"Authorization": f"Bearer {key}"}
    held = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await held.acquire()
        await answer_chat(call)

    engine.script = script
    body = json.dumps({"model": "m", "max_tokens": 10, **fields})
    first = asyncio.create_task(proxy.client.post(path, data=body, headers=head).__aenter__())
    await until(lambda: len(engine.calls) == 1)
    async with proxy.client.post(path, data=body, headers=head) as answer:
        assert answer.status == 429
    held.release()
    assert (await first).status == 200
    first.result().release()


async def test_a_tokenizers_work_costs_a_key_nothing(build: Build, tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys", "app", tokens_per_minute=10)
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    await proxy.engine(0)
    body = json.dumps({"model": "m", "prompt": WORDS})
    for path in ("/tokenize", "/v1/completions/render"):
        async with proxy.client.post(path, data=body, headers={"Authorization": f"Bearer {key}"}) as answer:
            assert answer.status == 200
