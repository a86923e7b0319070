"""Every error that a client can get, in the form of the API that it called."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import case
from support.fakes import SOON_S
from support.keys import new_key
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import Call, answer_chat

from launcher.proxy.error_forms import anthropic_type

if TYPE_CHECKING:  # importing them takes seconds, in each process that collects tests
    import anthropic
    import openai

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT, EMBED, COHERE = "/v1/messages/count_tokens", "/v2/embed", "/cohere/v2/chat"
PATHS = (CHAT, "/v1/completions", "/v1/embeddings", RESPONSES, MESSAGES, COUNT, EMBED, COHERE)


def message_of(path: str, status: int, body: Any) -> str:
    """The message of an error that has the form of its API, and nothing else."""
    if path.startswith("/v1/messages"):
        assert body == {
            "type": "error",
            "error": {"type": anthropic_type(status), "message": body["error"]["message"]},
        }
    elif path.startswith(("/v2", "/cohere")):
        assert body.keys() == {"message"}
    else:
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
    said = body["message"] if "message" in body else body["error"]["message"]
    assert isinstance(said, str)
    return said


def event_message(path: str, event: bytes, status: int) -> str:
    """The message of an event that ends a stream, in the form of its API."""
    lines = event.decode().split("\n")
    name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event:") else None
    (line,) = lines
    data = json.loads(line.removeprefix("data: "))
    if path == COHERE:
        assert data == {
            "type": "message-end",
            "delta": {"error": data["delta"]["error"], "finish_reason": "ERROR"},
        }
        return str(data["delta"]["error"])
    if path == RESPONSES:
        assert name == data["type"] == "response.failed"
        assert data["response"]["status"] == "failed"
        assert data["response"]["error"].keys() == {"code", "message"}
        return str(data["response"]["error"]["message"])
    assert name == ("error" if path == MESSAGES else None)
    return message_of(path, status, data)


async def whole(proxy: ProxyUnderTest, request: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, fields and JSON of the one response on a connection."""
    reader, _ = await proxy.raw(request)
    async with asyncio.timeout(SOON_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), fields, json.loads(body)


def request_of(path: str, body: bytes, *fields: str, method: str = "POST") -> bytes:
    lines = ["Host: h", "Connection: close", "Content-Type: application/json", *fields]
    if not any(field.startswith("Content-Length:") for field in fields):
        lines.append(f"Content-Length: {len(body)}")
    return f"{method} {path} HTTP/1.1\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def asking(model: str = "m", **more: object) -> bytes:
    texts: dict[str, object] = {"messages": [], "input": "x", "prompt": "x", "texts": ["x"]}
    return json.dumps({"model": model, "max_tokens": 9, **texts, **more}).encode()


@dataclass
class Refusal:
    """How a request is refused."""

    status: int
    says: str
    body: bytes = field(default_factory=asking)
    key: str = "app"
    fields: tuple[str, ...] = ()
    method: str = "POST"
    settings: dict[str, object] = field(default_factory=dict)
    engine: bool = True
    first: bytes | None = None  # an earlier request on the path


async def broken(call: Call) -> None:
    call.cut()


REFUSALS = {
    "wrong key": Refusal(401, "incorrect API key provided", key="nope"),
    "no key": Refusal(401, "you did not provide an API key", key=""),
    "basic": Refusal(401, "has no Bearer key", key="", fields=("Authorization: Basic Ym9iOnB3",)),
    "not its model": Refusal(403, "may not use the model", key="limited"),
    "unknown model": Refusal(404, "does not exist", body=asking("claude-x")),
    "broken JSON": Refusal(400, "cannot parse the request body", body=b'{"model":'),
    "no model": Refusal(400, "you must name a model", body=b"{}"),
    "too large": Refusal(413, "too large", fields=("Content-Length: 9999999999999999999",)),
    "beyond max_body_bytes": Refusal(413, "larger than 50 bytes", settings={"max_body_bytes": 50}),
    "over the key's limit": Refusal(429, "try again in", key="slow", first=asking()),
    "no instance": Refusal(503, "no instance of m is ready", engine=False),
    "upstream failure": Refusal(
        502, "no instance answered", settings={"park_timeout_s": 0.0, "eject_failures": 1000}
    ),
    "method": Refusal(405, "takes POST", method="PUT"),
    "unknown method": Refusal(501, "unknown method", method="A" * 33),
    "header": Refusal(400, "is not a header name", fields=("a b: c",)),
    "many headers": Refusal(431, "header fields", fields=tuple(f"a{n}: b" for n in range(300))),
    "coding": Refusal(415, "", fields=("Content-Encoding: gzip",)),
    "expectation": Refusal(417, "unsupported expectation", fields=("Expect: miracles",)),
}


@pytest.mark.parametrize("name", REFUSALS)
async def test_refusals(build: Build, tmp_path: Path, name: str) -> None:
    refusal = REFUSALS[name]
    keys = {"app": new_key(tmp_path / "keys", "app"), "nope": "nope", "": ""}
    keys["limited"] = new_key(tmp_path / "keys", "limited", models=["z"])
    slow = [
        new_key(tmp_path / "keys", f"slow{number}", requests_per_minute=1)
        for number in range(len(PATHS) if refusal.key == "slow" else 0)
    ]
    proxy = await build("m", "z", api_keys_file=str(tmp_path / "keys"), **refusal.settings)
    if refusal.engine:
        await proxy.engine(0, broken if name == "upstream failure" else answer_chat)
    for path in PATHS:
        with case(path):
            key = slow.pop() if refusal.key == "slow" else keys[refusal.key]
            fields = (f"X-Api-Key: {key}", *refusal.fields)
            if refusal.first is not None:
                await whole(proxy, request_of(path, refusal.first, *fields))
            asked = request_of(path, refusal.body, *fields, method=refusal.method)
            status, head, body = await whole(proxy, asked)
            assert status == refusal.status
            assert refusal.says in message_of(path, status, body)
            assert head["content-type"] == "application/json"
            assert ("retry-after" in head) == (status in {429, 502, 503})
            assert head.get("x-should-retry") == (None if status in {429, 502, 503} else "false")


@pytest.mark.parametrize(
    "path",
    ["/v1/messages/batches", "/v1/responses/x/y", "/v2/tokenize", "/cohere/v1/chat", "/v1/nothing"],
)
async def test_paths_that_nobody_serves(proxy: ProxyUnderTest, path: str) -> None:
    status, _, body = await whole(proxy, request_of(path, b"{}"))
    assert (status, "there is no" in message_of(path, status, body)) == (404, True)
    bare = f"POST {path}?beta=true HTTP/1.1\r\nHost h\r\n\r\n".encode()
    status, _, body = await whole(proxy, bare)
    assert (status, "no colon" in message_of(path, status, body)) == (400, True)


@pytest.mark.parametrize("path", [path for path in PATHS if path != COUNT])  # it does not wait in the queue
async def test_a_full_queue(build: Build, path: str) -> None:
    proxy = await build(queue_max_requests=1)
    engine = await proxy.engine(0, Call.until_left)
    asked = [asyncio.create_task(whole(proxy, request_of(CHAT, asking()))) for _ in range(9)]
    await until(lambda: len(engine.calls) == 8 and proxy.server.readings.stats()["waiting"] == 1)
    status, head, body = await whole(proxy, request_of(path, asking()))
    assert (status, "retry-after" in head) == (429, True)
    assert "the server is at its limit" in message_of(path, status, body)
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)


@pytest.mark.parametrize("path", PATHS)
async def test_a_proxy_that_shuts_down(proxy: ProxyUnderTest, path: str) -> None:
    await proxy.engine(0)
    proxy.server._authorizer.close()
    status, head, body = await whole(proxy, request_of(path, asking()))
    assert (status, "retry-after" in head) == (503, True)
    assert message_of(path, status, body) == "the server is shutting down"


# --- errors of engines -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "said",
    [
        {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}},
        {"detail": "too long"},
    ],
    ids=["vLLM", "FastAPI"],
)
async def test_an_engines_error(proxy: ProxyUnderTest, path: str, said: object) -> None:
    async def script(call: Call) -> None:
        await call.json(said, 400)

    await proxy.engine(0, script)
    status, _, body = await whole(proxy, request_of(path, asking()))
    assert (status, message_of(path, status, body)) == (400, "too long")


@pytest.mark.parametrize(
    ("status", "said"), [(401, "false"), (404, "false"), (422, "false"), (409, None), (429, None)]
)
async def test_an_engines_refusal_says_whether_a_repeat_can_help(
    proxy: ProxyUnderTest, status: int, said: str | None
) -> None:
    """Claude Code repeats 401 for three minutes without it."""
    await proxy.engine(0, answering({"error": {"message": "no", "type": "x", "code": status}}, status))
    got, head, _ = await whole(proxy, request_of(MESSAGES, asking()))
    assert (got, head.get("x-should-retry")) == (status, said)


async def test_an_engines_own_word_on_repeats_stays(proxy: ProxyUnderTest) -> None:
    async def script(call: Call) -> None:
        await call.json({"error": {"message": "no"}}, 404, "X-Should-Retry: true")

    await proxy.engine(0, script)
    _, head, _ = await whole(proxy, request_of(MESSAGES, asking()))
    assert head["x-should-retry"] == "true"


async def test_what_no_instance_implements_is_not_asked_again(proxy: ProxyUnderTest) -> None:
    """vLLM answers a route that its model does not support with 501."""

    async def script(call: Call) -> None:
        await call.json(
            {"error": {"message": "no", "type": "NotImplementedError", "param": None, "code": 501}}, 501
        )

    await proxy.engine(0, script)
    status, head, body = await whole(proxy, request_of(RESPONSES, asking()))
    assert (status, head["x-should-retry"]) == (501, "false")
    assert message_of(RESPONSES, status, body) == "no"


# --- events ----------------------------------------------------------------------------------------

STREAMS = (CHAT, "/v1/completions", RESPONSES, MESSAGES, COHERE)
ENGINE_400 = {"error": {"message": "too long", "type": "BadRequestError", "param": "input", "code": 400}}
ANTHROPIC_400 = {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}


async def stream_of(proxy: ProxyUnderTest, path: str) -> list[bytes]:
    """The events of a stream, and comments before them."""
    async with asyncio.timeout(SOON_S):
        async with proxy.client.post(path, data=asking(stream=True)) as answer:
            assert answer.status == 200
            body = await answer.read()
    assert body.endswith(b"\n\n")
    assert b"[DONE]" not in body
    return body[:-2].split(b"\n\n")


@dataclass
class Waiting:
    """An engine that answers when the client has a comment."""

    proxy: ProxyUnderTest
    then: Callable[[Call], Awaitable[None]]

    async def __call__(self, call: Call) -> None:
        await until(
            lambda: any(
                client.answering is not None and client.answering.head_sent
                for client in self.proxy.server._clients
            )
        )
        await self.then(call)


def answering(said: object, status: int) -> Callable[[Call], Awaitable[None]]:
    async def script(call: Call) -> None:
        await call.json(said, status)

    return script


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize(
    "said", [ENGINE_400, ANTHROPIC_400, {"message": "too long"}], ids=["openai", "anthropic", "cohere"]
)
async def test_an_engines_error_after_comments(build: Build, path: str, said: object) -> None:
    proxy = await build(keepalive_comment_s=0.01)
    await proxy.engine(0, Waiting(proxy, answering(said, 400)))
    *comments, last = await stream_of(proxy, path)
    assert set(comments) == {b": waiting"}
    assert event_message(path, last, 400) == "too long"
    if path == RESPONSES:  # Codex shows the message and does not ask again
        data = json.loads(last.partition(b"data: ")[2])
        assert data["sequence_number"] == 0
        assert data["response"]["error"]["code"] == "invalid_prompt"
        assert data["response"]["id"].startswith("resp_")
        assert data["response"]["model"] == "m"


@pytest.mark.parametrize("path", STREAMS)
async def test_no_instance_after_comments(build: Build, path: str) -> None:
    proxy = await build(keepalive_comment_s=0.01, park_timeout_s=0.0)
    await proxy.engine(0, Waiting(proxy, broken))
    *comments, last = await stream_of(proxy, path)
    assert set(comments) == {b": waiting"}
    said = event_message(path, last, 502)
    assert said.startswith("no instance answered; the last one failed: ")
    assert "; try again in " in said


def created(kind: str, number: int) -> bytes:
    response = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "in_progress",
        "output": [],
    }
    data = {"type": kind, "sequence_number": number, "response": {**response, "error": None}}
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps(data).encode())


def delta(number: int) -> bytes:
    data = {"type": "response.output_text.delta", "sequence_number": number, "delta": f"word {number}"}
    return b"event: response.output_text.delta\ndata: %b\n\n" % json.dumps(data).encode()


# Without a word of output nothing has gone to the client, and the other instance is asked.
@pytest.mark.parametrize("first", [0, 5])
@pytest.mark.parametrize("deltas", [1, 6])
@pytest.mark.parametrize("reads", ["one", "many"])
async def test_a_broken_response_fails_with_the_next_number(
    proxy: ProxyUnderTest, first: int, deltas: int, reads: str
) -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        numbers = range(first + 2, first + 2 + deltas)
        events = [
            created("response.created", first),
            created("response.in_progress", first + 1),
            *map(delta, numbers),
        ]
        if reads == "one":
            await call.chunk(b"".join(events))
        for event in () if reads == "one" else events:
            await call.chunk(event)
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        call.cut()

    for slot in range(2):
        await proxy.engine(slot, script)
    *_, last = await stream_of(proxy, RESPONSES)
    assert event_message(RESPONSES, last, 502).endswith(
        ("it closed the connection", "the connection was reset")
    )
    data = json.loads(last.partition(b"data: ")[2])
    assert data["sequence_number"] == first + 2 + deltas
    assert data["response"] == {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "failed", "output": [],
        "error": {"code": "server_error", "message": data["response"]["error"]["message"]},
    }  # fmt: skip


OPENINGS = {
    CHAT: b'data: {"choices":[{"index":0,"delta":{"content":"x"},"logprobs":{"content":[]}}]}\n\n',
    "/v1/completions": b'data: {"choices":[{"index":0,"text":"x","logprobs":{"tokens":[]}}]}\n\n',
    RESPONSES: created("response.created", 0) + delta(1),
    MESSAGES: b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":{"text":"x"}}\n\n',
    COHERE: b'data: {"type":"content-delta","index":0,"delta":{"message":{"content":{"text":"x"}}}}\n\n',
}


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_breaks(proxy: ProxyUnderTest, path: str) -> None:
    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(OPENINGS[path])
        await asyncio.sleep(0.02)
        call.cut()

    await proxy.engine(0, script)
    *_, last = await stream_of(proxy, path)
    assert event_message(path, last, 502).startswith("the response broke off: ")


@pytest.mark.parametrize("path", STREAMS)
async def test_an_engine_that_aborts_in_the_middle(proxy: ProxyUnderTest, path: str) -> None:
    """What says so is ours, and has the form of the API, too."""

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(OPENINGS[path])
        await asyncio.sleep(0.02)
        await call.chunk(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}\n\n')
        await call.until_left()

    await proxy.engine(0, script)
    *_, last = await stream_of(proxy, path)
    assert event_message(path, last, 503) == "the engine aborted the request"


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("cut", [False, True])
async def test_an_engines_error_event_of_the_request(
    proxy: ProxyUnderTest, path: str, *, opened: bool, cut: bool
) -> None:
    """It is no fault of the engine, so it passes at once, and is told once."""
    said = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}

    async def script(call: Call) -> None:
        await call.start_stream()
        if opened:
            await call.chunk(OPENINGS[path])
            await asyncio.sleep(0.02)
        await call.chunk(b"data: %b\n\n" % json.dumps(said).encode())
        if cut:
            await asyncio.sleep(0.02)
            call.cut()
        else:
            await call.end_stream()

    await proxy.engine(0, script)
    *before, last = await stream_of(proxy, path)
    assert event_message(path, last, 400) == "too long"
    assert not any(b"too long" in event for event in before)
    if path == RESPONSES:
        data = json.loads(last.partition(b"data: ")[2])
        assert data["sequence_number"] == len(before)
        assert data["response"]["error"]["code"] == "invalid_prompt"
        assert (data["response"]["id"] == "resp_1") == opened


# --- the SDKs --------------------------------------------------------------------------------------


async def test_anthropics_sdk(build: Build, tmp_path: Path) -> None:
    import anthropic  # noqa: PLC0415

    key, slow = (
        new_key(tmp_path / "keys", name, **more)
        for name, more in (("app", {}), ("slow", {"requests_per_minute": 1}))
    )
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    await proxy.engine(0, answering(ENGINE_400, 400))

    async def raised(key: str, model: str = "m", *, stream: bool = False) -> anthropic.APIStatusError:
        async with anthropic.AsyncAnthropic(
            base_url=proxy.server.endpoint, api_key=key, max_retries=0
        ) as sdk:
            with pytest.raises(anthropic.APIStatusError) as caught:
                await sdk.messages.create(
                    model=model, max_tokens=9, messages=[{"role": "user", "content": "x"}], stream=stream
                )
        assert str(caught.value.body["error"]["message"]) in str(caught.value)  # type: ignore[index]
        return caught.value

    wrong = await raised("nope")
    assert isinstance(wrong, anthropic.AuthenticationError)
    assert wrong.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "incorrect API key provided"},
    }
    unknown = await raised(key, "claude-x")
    assert isinstance(unknown, anthropic.NotFoundError)
    assert "claude-x" in str(unknown)
    assert isinstance(await raised(key, stream=True), anthropic.BadRequestError)
    await raised(slow)
    assert isinstance(await raised(slow), anthropic.RateLimitError)


async def test_openais_sdk(build: Build, tmp_path: Path) -> None:
    import openai  # noqa: PLC0415

    key, slow = (
        new_key(tmp_path / "keys", name, **more)
        for name, more in (("app", {}), ("slow", {"requests_per_minute": 1}))
    )
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    await proxy.engine(0, answering(ENGINE_400, 400))

    async def raised(key: str, model: str = "m") -> openai.APIStatusError:
        async with openai.AsyncOpenAI(
            base_url=f"{proxy.server.endpoint}/v1", api_key=key, max_retries=0
        ) as sdk:
            with pytest.raises(openai.APIStatusError) as caught:
                await sdk.responses.create(model=model, input="x")
        return caught.value

    wrong = await raised("nope")
    assert isinstance(wrong, openai.AuthenticationError)
    assert (wrong.code, wrong.type) == ("invalid_api_key", "invalid_request_error")
    assert isinstance(await raised(key, "gpt-x"), openai.NotFoundError)
    assert isinstance(await raised(key), openai.BadRequestError)
    await raised(slow)
    assert isinstance(await raised(slow), openai.RateLimitError)


async def test_the_sdks_read_the_event_of_a_broken_stream(proxy: ProxyUnderTest) -> None:
    import anthropic  # noqa: PLC0415
    import openai  # noqa: PLC0415

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(OPENINGS[call.target])
        await asyncio.sleep(0.02)
        call.cut()

    await proxy.engine(0, script)
    async with openai.AsyncOpenAI(base_url=f"{proxy.server.endpoint}/v1", api_key="x", max_retries=0) as sdk:
        events = [event async for event in await sdk.responses.create(model="m", input="x", stream=True)]
    last = events[-1]
    assert last.type == "response.failed"
    assert (last.sequence_number, last.response.id, last.response.status) == (2, "resp_1", "failed")
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    async with anthropic.AsyncAnthropic(base_url=proxy.server.endpoint, api_key="x", max_retries=0) as claude:
        answer = await claude.messages.create(model="m", max_tokens=9, messages=[], stream=True)
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for _ in answer:
                pass
    assert caught.value.body["error"]["type"] == "api_error"  # type: ignore[index]


# --- two credentials -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        ("Authorization: Basic Ym9iOnB3", "x-api-key: {key}"),
        ("Authorization: Digest username=bob", "x-api-key: {key}"),
        ("Authorization: Negotiate YII=", "api-key: {key}"),
        ("Authorization: Basic Ym9iOnB3", "Authorization: Bearer {key}"),
        ("Authorization: Bearer {key}", "x-api-key: sk-ant-old"),
        ("Authorization: Bearer sk-ant-oat01-abc", "x-api-key: {key}"),
        ("api-key: {key}",),
    ],
)
async def test_the_key_counts_and_goes_no_further(
    build: Build, tmp_path: Path, lines: tuple[str, ...]
) -> None:
    key = new_key(tmp_path / "keys", "app")
    proxy = await build(api_keys_file=str(tmp_path / "keys"))
    engine = await proxy.engine(0)
    fields = tuple(line.format(key=key) for line in lines)
    for path in PATHS:
        with case(path):
            status, _, _ = await whole(proxy, request_of(path, asking(), *fields))
            assert status == 200
            (call,) = (call for call in engine.calls if call.target == path)
            assert not {name.lower() for name, _ in call.headers} & {"authorization", "x-api-key", "api-key"}
