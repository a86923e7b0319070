"""What leaves this host: to whom, what of it, and what comes back."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.certificates import certify
from support.fakes import SOON_S, looked
from support.hand_clock import HandClock, at
from support.keys import make, put
from support.overflow import Cloud, Make, body, left
from support.proxy_under_test import Build, ProxyUnderTest, until

from launcher.balancing.upstreams import Ending
from launcher.base.address import TcpAddress
from launcher.base.api_errors import HttpError
from launcher.base.clock import Clock
from launcher.base.errors import LauncherError
from launcher.base.money import token_prices
from launcher.base.money_limits import DailyCap, Day
from launcher.config import schema
from launcher.keys.key_record import KeyRecord
from launcher.proxy.http1.requests import parse_request
from launcher.proxy.openai.prompts import SaidUsage
from launcher.proxy.request.actions import Outcome, OverflowReason
from launcher.proxy.request.most_tokens import MostTokens
from launcher.proxy.request.record import Request
from launcher.proxy.upstream.overflow import DEFAULT_LIMIT_S, Overflow
from launcher.proxy.upstream.overflow_endpoint import (
    AVOID_S,
    MAX_RETRY_AFTER_S,
    Left,
    OverflowCall,
    OverflowEndpoint,
)
from launcher.proxy.upstream.pool import Endpoint

CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes


async def send(proxy: ProxyUnderTest, method: str, target: str, *lines: str, body: bytes = b"") -> Answer:
    """One request over a connection of its own, which is closed then."""
    head = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", *lines]
    head += [f"Content-Length: {len(body)}"] if body else []
    reader, writer = await proxy.raw("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    async with asyncio.timeout(SOON_S):
        raw = await reader.read()
    writer.close()
    top, _, rest = raw.partition(b"\r\n\r\n")
    first, *fields = top.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
    return Answer(int(first.split()[1]), headers, rest)


def streamed() -> bytes:
    """A request for a stream."""
    sent = body(model="m", stream=True)
    return f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n".encode() + sent


def overflow(proxy: ProxyUnderTest) -> OverflowEndpoint:
    """The only endpoint."""
    assert proxy.server._overflow is not None
    (endpoint,) = proxy.server._overflow
    return endpoint


async def test_a_request_goes_there_and_back(proxy_with: Make, cloud: Cloud, tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("sk-there\n")
    proxy = await proxy_with(api_key_file=str(key_file))
    sent = b'{"model": "gpt-4o", "temperature": 0.30000000000000004, "messages": [{"a":  1}], "stream":false}'
    answer = await send(proxy,
        "POST", CHAT, "Authorization: Bearer nl-secret", "X-Api-Key: nl-secret", "Cookie: c=d", "X-Request-Id: r-1",
        "traceparent: 00-aa-bb-01", "Content-Type: application/json", "X-Forwarded-For: 10.0.0.1", body=sent,
    )  # fmt: skip
    assert (answer.status, answer.body) == (200, b"{}")
    assert answer.headers["x-served-by"] == "overflow"
    assert not {"set-cookie", "x-secret"} & answer.headers.keys()
    line, headers, got = cloud.got[0]
    assert line == "POST /v1/chat/completions HTTP/1.1"
    assert headers["authorization"] == "Bearer sk-there"
    assert (headers["x-request-id"], headers["traceparent"]) == ("r-1", "00-aa-bb-01")
    assert not {"cookie", "x-api-key", "x-forwarded-for"} & headers.keys()
    assert "secret" not in json.dumps(headers)
    # Only the model is another; everything else is as it was written.
    assert (
        got
        == b'{"model":"big-model","temperature":0.30000000000000004,"messages":[{"a":  1}],"stream":false}'
    )
    assert overflow(proxy).sent == {"m": 1}
    assert overflow(proxy).ended == {("m", Outcome.COMPLETED): 1}
    assert overflow(proxy).in_flight == 0


async def test_no_key_of_ours_no_authorization(proxy_with: Make, cloud: Cloud) -> None:
    proxy = await proxy_with()
    await send(proxy, "POST", CHAT, "Authorization: Bearer mine", body=body())  # the only model needs no name
    assert "authorization" not in cloud.got[0][1]


async def test_a_stream_comes_as_it_is_made(proxy_with: Make, cloud: Cloud) -> None:
    cloud.script = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n",
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    ]
    cloud.hold.clear()
    proxy = await proxy_with()
    reader, writer = await proxy.raw(streamed())
    async with asyncio.timeout(SOON_S):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head
        assert b"X-Served-By: overflow" in head
        assert b"data: 1" in await reader.readuntil(b"\n\n")
        assert overflow(proxy).in_flight == 1
        cloud.hold.set()
        assert (await reader.readuntil(b"0\r\n\r\n")).count(b"[DONE]") == 1
    writer.close()
    assert overflow(proxy).ended == {("m", Outcome.COMPLETED): 1}


async def test_a_client_that_leaves_ends_it(proxy_with: Make, cloud: Cloud) -> None:
    cloud.script = [b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n", b""]
    cloud.hold.clear()
    proxy = await proxy_with()
    reader, writer = await proxy.raw(streamed())
    async with asyncio.timeout(SOON_S):
        await reader.readuntil(b"data: 1")
        writer.close()
        await cloud.left.wait()
    assert overflow(proxy).ended == {("m", Outcome.CLIENT_ABORTED): 1}
    assert overflow(proxy).in_flight == 0


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    "script",
    [
        [STREAM + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", b"5\r\nab"],
        [STREAM + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", b"zz\r\n"],
        [STREAM + b"Content-Length: 100\r\n\r\ndata: 1\n\n", b"rest"],
    ],
)
async def test_an_answer_that_breaks_is_broken_off(
    proxy_with: Make, cloud: Cloud, script: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cloud.script = script
    cloud.hold.clear()
    proxy = await proxy_with(proxy={"idle_timeout_s": 0.2})
    reader, writer = await proxy.raw(streamed())
    async with asyncio.timeout(SOON_S):
        await reader.readuntil(b"data: 1\n\n")
        cloud.hold.set()
        rest = await reader.readuntil(b"0\r\n\r\n")
    assert b'data: {"error":' in rest  # nobody takes it for whole
    assert b"[DONE]" not in rest
    writer.close()
    assert overflow(proxy).ended == {("m", Outcome.FAILED): 1}
    assert proxy.sums()["failed"] == 1
    assert [record for record in caplog.records if "overflow endpoint broke a response off" in record.message]


async def test_a_request_that_the_shutdown_ends_was_not_aborted_by_its_client(
    proxy_with: Make, cloud: Cloud
) -> None:
    cloud.script = [STREAM + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n", b"rest"]
    cloud.hold.clear()
    proxy = await proxy_with()
    reader, writer = await proxy.raw(streamed())
    async with asyncio.timeout(SOON_S):
        await reader.readuntil(b"data: 1\n\n")
        await proxy.server.stop(0.0)
        assert b'data: {"error":' in await reader.read()
    writer.close()
    assert overflow(proxy).ended == {("m", Outcome.FAILED): 1}
    assert proxy.sums()["failed"] == 1


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b"401 Unauthorized", 502),  # our key is wrong, not the client's
        (b"403 Forbidden", 502),
        (b"302 Found\r\nLocation: http://10.0.0.1/", 502),
        (b"200 OK\r\nContent-Encoding: gzip", 502),  # not asked for
        (b"400 Bad Request", 400),
        (b"429 Too Many\r\nRetry-After: 9", 429),
        (b"500 Oh", 500),
    ],
)
async def test_its_errors(proxy_with: Make, cloud: Cloud, first: bytes, status: int) -> None:
    cloud.script = [b"HTTP/1.1 " + first + b"\r\nContent-Length: 2\r\n\r\n{}"]
    proxy = await proxy_with()
    answer = await send(proxy, "POST", CHAT, body=body(model="m"))
    assert answer.status == status
    assert ("retry-after" in answer.headers) == (status == 429)
    if status == 502:
        assert b'"code":"overflow_failed"' in answer.body
        assert overflow(proxy).ended == {("m", Outcome.FAILED): 1}


@pytest.mark.parametrize(
    "script", [[b""], [b"garbage\r\n\r\n"], [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", b""]]
)
async def test_nobody_there(proxy_with: Make, cloud: Cloud, script: list[bytes]) -> None:
    cloud.script = script
    if len(script) == 2:
        cloud.hold.clear()  # a head and then silence
    proxy = await proxy_with(proxy={"answer_timeout_s": 0.2})
    assert (await send(proxy, "POST", CHAT, body=body(model="m"))).status == 502


async def test_nothing_listens_there(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    proxy = await build(overflow=(schema.Overflow(url="http://127.0.0.1:1/v1", models={"m": "x"}),))
    answer = await send(proxy, "POST", CHAT, body=body(model="m"))
    assert (answer.status, b"refused" in answer.body) == (502, False)
    (said,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "overflow endpoint failed: cannot connect" in said.message


async def test_every_address_of_a_name_is_tried(
    build: Build, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one refuses, the second one drops what comes, the third one answers."""
    loop = asyncio.get_running_loop()
    port = int(cloud.url.split(":")[2].split("/")[0])
    deaf = socket.socket()
    deaf.bind(("127.0.0.3", port))
    deaf.listen(0)
    full = [socket.socket() for _ in range(3)]  # its queue of connections: the kernel answers no further one
    for filler in full:
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.3", port))

    async def addresses(*_: object, **__: object) -> list[object]:
        return [(0, 0, 0, "", (f"127.0.0.{last}", port)) for last in (2, 3, 1)]

    def closed(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    made = Endpoint(TcpAddress("somewhere.example", port), external=True)
    monkeypatch.setattr(type(loop), "getaddrinfo", addresses, raising=False)
    connected = asyncio.StreamReader()
    await made.connect(lambda: asyncio.StreamReaderProtocol(connected, closed), 0.6)
    with pytest.raises(TimeoutError):
        await made.connect(asyncio.Protocol, 0.0)
    for each in (deaf, *full):
        each.close()


async def test_the_cap(proxy_with: Make, cloud: Cloud) -> None:
    cloud.hold.clear()
    proxy = await proxy_with(max_requests=1)
    first = asyncio.create_task(send(proxy, "POST", CHAT, body=body(model="m")))
    await until(lambda: overflow(proxy).in_flight == 1)
    answer = await send(proxy, "POST", CHAT, body=body(model="m"))
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")  # as without an overflow endpoint
    cloud.hold.set()
    assert (await first).status == 200
    assert overflow(proxy).ended == {("m", Outcome.REJECTED): 1, ("m", Outcome.COMPLETED): 1}
    assert proxy.sums()["rejected"] == 1


async def test_a_local_only_key_stays_here(proxy_with: Make, cloud: Cloud, tmp_path: Path) -> None:
    ann, record = make("ann", local_only=True)
    bob, bob_record = make("bob")
    put(tmp_path / "keys", record, bob_record)
    proxy = await proxy_with(proxy={"api_keys_file": str(tmp_path / "keys")})
    assert (await send(proxy, "POST", CHAT, f"X-Api-Key: {ann}", body=body(model="m"))).status == 503
    assert not cloud.got
    assert (await send(proxy, "POST", CHAT, f"X-Api-Key: {bob}", body=body(model="m"))).status == 200


@pytest.mark.parametrize("sent", [b"{", b"[]", b'{"model": 5}', b"\xff", b"[" * 100_000])
async def test_no_json(proxy_with: Make, cloud: Cloud, sent: bytes) -> None:
    proxy = await proxy_with()
    assert (await send(proxy, "POST", CHAT, body=sent)).status == 400
    assert not cloud.got
    with pytest.raises(HttpError, match="cannot read the request"):
        overflow(proxy).body(sent if sent[1:2] != b'"' else b"{]", "m")


async def test_other_models_and_routes_do_not_overflow(proxy_with: Make, cloud: Cloud) -> None:
    proxy = await proxy_with()
    assert (await send(proxy, "POST", CHAT, body=body(model="other"))).status == 404
    assert (await send(proxy, "POST", "/v1/messages", body=body(model="m"))).status == 503
    assert (await send(proxy, "POST", "/v1/load_lora_adapter", body=body(model="m"))).status == 404
    assert not cloud.got


async def test_a_kept_connection_that_was_closed_is_no_reason_to_send_twice(
    proxy_with: Make, cloud: Cloud
) -> None:
    """Somebody else's API may have got the request."""
    proxy = await proxy_with()
    assert (await send(proxy, "POST", CHAT, body=body(model="m"))).status == 200
    cloud.script = [b""]
    assert (await send(proxy, "POST", CHAT, body=body(model="m"))).status == 502
    assert len(cloud.got) == 2
    assert cloud.connections == 1


async def test_tls(build: Build, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint's certificate is checked, for its name; connections are kept."""
    certificate, key = await asyncio.to_thread(certify, tmp_path, "c", hosts="DNS:localhost")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    async with await asyncio.start_server(cloud.serve, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        statuses = []
        for host, trusted in (("localhost", True), ("127.0.0.1", True), ("localhost", False)):
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate) if trusted else "/dev/null")
            there = schema.Overflow(url=f"https://{host}:{port}/v1", models={"m": "x"})
            proxy = await build(overflow=(there,))
            statuses += [(await send(proxy, "POST", CHAT, body=body(model="m"))).status for _ in range(2)]
            await proxy.server.stop(0.0)
    assert statuses == [200, 200, 502, 502, 502, 502]
    assert cloud.connections == 1
    assert cloud.got[0][1]["host"] == f"localhost:{port}"


async def test_a_new_key_is_read(
    proxy_with: Make, cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.base.watched_file.LOOK_EVERY_S", 0.0)
    key_file = tmp_path / "key"
    key_file.write_text("one")
    proxy = await proxy_with(api_key_file=str(key_file))
    for text in ("one", "three", ""):  # the last one is no key: the one before stays
        key_file.write_text(text)
        for _ in range(2):  # the first may have begun before
            await asyncio.to_thread(looked)
            proxy.server.readings.files()
        await asyncio.to_thread(looked)
        await send(proxy, "POST", CHAT, body=body(model="m"))
    assert [headers["authorization"] for _, headers, _ in cloud.got] == [
        "Bearer one",
        "Bearer three",
        "Bearer three",
    ]


@pytest.mark.parametrize("text", ["", "two words", "é", "a\nb"])
def test_bad_keys_are_errors_at_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    settings = schema.Overflow(url="http://x/v1", models={"m": "x"}, api_key_file=str(path))
    with pytest.raises(LauncherError, match="no such file"):
        Overflow([settings], 1.0)
    path.write_text(text)
    with pytest.raises(LauncherError, match=r"cannot (read|use) the overflow endpoint's key"):
        Overflow([settings], 1.0)


# --- which endpoint takes a request ------------------------------------------------------------------


def endpoints(**rules: str) -> Overflow:
    """By name and `when`; each has the model "m", the last one "n", too."""
    last = list(rules)[-1]
    return Overflow(
        [
            schema.Overflow(
                url="http://x/v1", name=name, when=when, max_requests=1,
                models={"m": "big", "n": "big"} if name == last else {"m": "big"},
            )
            for name, when in rules.items()
        ],
        1.0,
        clock=HandClock(1000.0),
    )  # fmt: skip


def asking(model: str = "m", path: str = CHAT, key: KeyRecord | None = None, **of: Any) -> Request:
    head = parse_request(f"POST {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
    client: Any = None
    request = Request(client, head, None, path=path, request_id="r", started=0.0)
    request.model = model
    owner: Any = None if key is None else SimpleNamespace(record=key)
    request.key = owner
    for name, value in of.items():
        setattr(request, name, value)
    return request


def send_to(there: Overflow, name: str) -> OverflowCall:
    return there.begin(asking(overflow=name, body=b"{}"))


FULL, PREDICTED = OverflowReason.FULL, OverflowReason.PREDICTED


async def test_the_first_that_has_the_model_takes_it() -> None:
    there = endpoints(a="full", b="full")
    assert there.takes(asking(), FULL, 0.0) == "a"
    assert there.takes(asking("n"), FULL, 0.0) == "b"
    assert there.takes(asking("other"), FULL, 0.0) is None
    assert there.takes(asking(path="/v1/responses"), FULL, 0.0) is None
    assert there.takes(asking(overflow_tried=("a",)), FULL, 0.0) == "b"
    assert there.takes(asking(overflow_tried=("a", "b")), FULL, 0.0) is None
    call = send_to(there, "a")
    assert there.takes(asking(), FULL, 0.0) == "b"
    send_to(there, "b")
    assert not there.endpoint("a").ended
    assert there.takes(asking(), FULL, 0.0) is None
    assert there.endpoint("a").ended == there.endpoint("b").ended == {("m", Outcome.REJECTED): 1}
    there.end(call, left(200), 0.0)
    assert there.takes(asking(), FULL, 0.0) == "a"


@pytest.mark.parametrize(
    ("ended", "avoided_s"),
    [
        (left(200), 0),
        (left(400), 0),
        (left(500), AVOID_S),
        (left(429), AVOID_S),
        (left(None, ending=Ending.BROKEN), AVOID_S),
        (left(200, ending=Ending.LEFT), 0),
        (left(429, "30"), 30),
        (left(503, "30"), 30),
        (left(429, "Thu, 01 Jan 1970 00:17:00 GMT"), 20),
        (left(429, "soon"), AVOID_S),
        (left(429, "9" * 30), MAX_RETRY_AFTER_S),
    ],
)
async def test_one_that_failed_is_avoided(ended: Left, avoided_s: float) -> None:
    there = endpoints(a="full", b="full")
    there.end(send_to(there, "a"), ended, 100.0)
    if avoided_s:
        assert there.takes(asking(), FULL, 100.0 + avoided_s - 0.01) == "b"
    assert there.takes(asking(), FULL, 100.0 + avoided_s) == "a"


async def test_one_that_failed_is_better_than_a_refusal_unless_it_said_when() -> None:
    there = endpoints(a="predicted_ttft > 1s")
    late = asking(latest_s=9.0)
    there.end(send_to(there, "a"), left(500), 0.0)
    assert there.takes(asking(), FULL, 1.0) == "a"
    assert there.takes(late, PREDICTED, 1.0) is None  # it is better here
    there.end(send_to(there, "a"), left(429, "60"), 0.0)
    assert there.takes(asking(), FULL, 1.0) is None
    assert [there.takes(late, PREDICTED, at) for at in (59.0, 60.0)] == [None, "a"]


def record(**of: Any) -> KeyRecord:
    return make("ann", **of)[1]


@pytest.mark.parametrize(
    ("key", "limits"),
    [
        (None, (None, 2.0, 2.0)),
        (record(), (None, 2.0, 2.0)),
        (record(overflow="predicted"), (DEFAULT_LIMIT_S, 2.0, 2.0)),
        (record(overflow="full"), (None, None, None)),
        (record(overflow="never"), (None, None, None)),
        (record(overflow="predicted", local_only=True), (None, None, None)),
    ],
)
async def test_limits_of_the_prediction(key: KeyRecord | None, limits: tuple[float | None, ...]) -> None:
    those = (
        endpoints(a="full"),
        endpoints(a="predicted_ttft > 2s"),
        endpoints(a="full", b="predicted_ttft > 2s"),
    )
    assert tuple(each.limit_s(CHAT, "m", key) for each in those) == limits
    assert {
        each.limit_s(path, model, key)
        for each in those
        for path, model in ((CHAT, "x"), ("/v1/messages", "m"))
    } == {None}
    for each, limit in zip(those, limits, strict=True):
        late = asking(key=key, latest_s=2.1)
        assert (each.takes(late, PREDICTED, 0.0) is not None) is (limit == 2.0)


async def test_the_most_that_a_request_spends_there() -> None:
    settings = [
        schema.Overflow(url="http://x/v1", models={"m": "big"}, max_output_tokens=50),
        schema.Overflow(url="http://y/v1", models={"m": "big"}, input=1.0, output=2.0, max_output_tokens=20),
        schema.Overflow(url="http://z/v1", models={"o": "big"}, input=9.0, output=9.0),
    ]
    there = Overflow(settings, 1.0)
    named, unlimited = MostTokens(100, 30), MostTokens(100, 30, unlimited=2)
    assert there.most_spent(asking(), named) == (130, token_prices(1.0, 2.0).amount(100, 0, 30))
    assert there.most_spent(asking(), unlimited) == (200, token_prices(1.0, 2.0).amount(100, 0, 40))
    nothing = (0, 0)
    assert there.most_spent(asking("n"), named) == nothing
    assert there.most_spent(asking(path="/v1/messages"), named) == nothing
    assert there.most_spent(asking(key=make("ann", overflow="never")[1]), named) == nothing
    assert there.most_spent(asking(key=make("ann", local_only=True)[1]), named) == nothing


async def test_a_request_that_ends_after_midnight_counts_on_that_day() -> None:
    """Also before the server's clock has ticked."""
    wall = [50.0]
    cap = DailyCap(10**12, lambda now: Day(now // 100 * 100, now // 100 * 100 + 100), at(0.0))
    settings = schema.Overflow(
        url="http://x/v1", name="a", models={"m": "b"}, input=1.0, output=4.0, max_per_day=1.0
    )
    there = Overflow([settings], 1.0, {"a": cap}, Clock(lambda: wall[0], lambda: wall[0]))
    call = send_to(there, "a")
    wall[0] = 100.0
    picos, exact = there.end(call, Left(Ending.WHOLE, 200, True, None, SaidUsage(7, 5, 0)), 0.0)
    assert (picos, exact) == (27 * 10**6, True)
    assert (cap.settled, cap.reserved, cap.ends) == (picos, 0, 200.0)
