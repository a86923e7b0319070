"""What is taken from a request, and what it leads to."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from support.keys import new_key
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import Call, answer_chat

from launcher.config.schema import Overflow


async def post(proxy: ProxyUnderTest, header: str | None, **more: object) -> None:
    headers = {} if header is None else {"X-Vllm-Priority": header}
    body = {"model": "m", "messages": [], **more}
    async with proxy.client.post("/v1/chat/completions", data=json.dumps(body), headers=headers) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    ("headers", "body", "order"),
    [
        ([None, None, None], [0, 5, -5], [2, 0, 1]),
        (["3", "-2", "1"], [0, 0, 0], [1, 2, 0]),
        (["1", "2", None], [-9, -8, 0], [2, 0, 1]),  # the header counts, not the body
        (["urgent", "-1", ""], [-9, 0, 3], [0, 1, 2]),  # no integer is no priority
        (["-99999", "-5000", None], [0, 0, -1000], [0, 1, 2]),  # beyond the bound all are alike
    ],
)
async def test_the_queue_goes_by_priority(
    proxy: ProxyUnderTest, headers: list[str | None], body: list[int], order: list[int]
) -> None:
    go = asyncio.Semaphore(0)

    async def script(call: Call) -> None:
        await go.acquire()
        await answer_chat(call)

    engine = await proxy.engine(0, script)  # 8 at once
    asked = [asyncio.create_task(post(proxy, None)) for _ in range(8)]
    await until(lambda: len(engine.calls) == 8)
    for number, (header, priority) in enumerate(zip(headers, body, strict=True)):
        asked.append(asyncio.create_task(post(proxy, header, user=str(number), priority=priority)))
        await until(lambda waiting=number + 1: proxy.server.readings.stats()["waiting"] == waiting)  # type: ignore[misc]
    for _ in range(11):
        count = len(engine.calls)
        go.release()
        await until(lambda count=count: len(engine.calls) > count or len(engine.calls) == 11)  # type: ignore[misc]
    await asyncio.gather(*asked)
    late = engine.calls[8:]
    assert [int(json.loads(call.body)["user"]) for call in late] == order
    assert [call.header("X-Vllm-Priority") for call in late] == [headers[number] for number in order]


# --- LoRA adapters ---------------------------------------------------------------------------------


async def adapted(call: Call) -> None:
    """An instance that serves two adapters, as vLLM lists them."""
    if call.target == "/v1/models":
        cards = [
            {"id": "m", "max_model_len": 2048},
            {"id": "sql", "parent": "m"},
            {"id": "loaded", "parent": "m"},
        ]
        await call.json({"object": "list", "data": cards})
    else:
        await answer_chat(call)


async def asks(proxy: ProxyUnderTest, model: str, key: str | None = None) -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    body = json.dumps({"model": model, "messages": []})
    async with proxy.client.post("/v1/chat/completions", data=body, headers=headers) as answer:
        await answer.read()
        return answer.status


async def test_an_adapter_goes_to_its_models_instances(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "launcher.access")
    proxy = await build("m", "other")
    other = await proxy.engine(1, model="other")
    assert await asks(proxy, "sql") == 404
    engine = await proxy.engine(0, adapted)
    proxy.server.add_upstream(0, 1, "m", engine.address, 8, adapters=("sql", "tone", "other"))
    assert await asks(proxy, "sql") == 200
    assert json.loads(engine.calls[-1].body)["model"] == "sql"
    assert await asks(proxy, "other") == 200  # a model's own name comes first
    assert len(other.calls) == 1
    assert await asks(proxy, "loaded") == 404  # by whom, and on which instances?
    async with proxy.client.get("/v1/models") as answer:
        entries = (await answer.json())["data"]
    assert [entry["id"] for entry in entries] == ["m", "sql", "other"]
    assert entries[1] == {"id": "sql", "parent": "m"}
    async with proxy.client.get("/v1/models/sql") as answer:
        assert (await answer.json())["parent"] == "m"
    lines = [record.__dict__ for record in caplog.records if record.name == "launcher.access"]
    assert ("m", "sql") in {(line["model"], line["adapter"]) for line in lines}
    proxy.server.remove_upstream(0, 1, "restart")
    parked = asyncio.create_task(asks(proxy, "sql"))
    await until(lambda: proxy.server.readings.stats()["waiting"] == 1)
    await proxy.engine(0, adapted, generation=2)
    assert await parked == 200


async def test_an_adapter_is_a_model_of_its_own_for_a_key(build: Build, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    base, fine = new_key(keys, "base", models=("m",)), new_key(keys, "fine", models=("sql",))
    proxy = await build(api_keys_file=str(keys))
    engine = await proxy.engine(0, adapted)
    proxy.server.add_upstream(0, 1, "m", engine.address, 8, adapters=("sql",))
    assert [await asks(proxy, "m", base), await asks(proxy, "sql", base)] == [200, 403]
    assert [await asks(proxy, "m", fine), await asks(proxy, "sql", fine)] == [403, 200]
    async with proxy.client.get("/v1/models", headers={"Authorization": f"Bearer {fine}"}) as answer:
        assert [entry["id"] for entry in (await answer.json())["data"]] == ["sql"]


async def test_an_adapters_requests_do_not_leave_the_host(build: Build) -> None:
    """The endpoint that takes what overflows has the model, not the adapter."""
    proxy = await build(
        overflow=(Overflow(url="http://127.0.0.1:9/v1", models={"m": "there"}),), queue_timeout_s=0.1
    )
    engine = await proxy.engine(0, Call.until_left)
    proxy.server.add_upstream(0, 1, "m", engine.address, 1, adapters=("sql",))
    busy = [asyncio.create_task(asks(proxy, "m")) for _ in range(8)]
    await until(lambda: len(engine.calls) == 8)
    assert await asks(proxy, "sql") == 429
    assert await asks(proxy, "m") == 502  # it was sent out, and nobody is there
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)


# --- what is not served ----------------------------------------------------------------------------


async def test_a_websocket_is_refused_by_its_name(proxy: ProxyUnderTest) -> None:
    """vLLM's realtime API is a WebSocket; the answer says what to use instead, and a client stops waiting."""
    engine = await proxy.engine(0)
    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        await proxy.client.ws_connect("/v1/realtime?model=m")
    assert caught.value.status == 501
    reader, _ = await proxy.raw(
        b"GET /v1/realtime HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501 ")
    assert b"connection: close" in head.lower()
    error = json.loads(body)["error"]
    assert error["code"] == "websocket_not_served"
    assert "/v1/audio/transcriptions" in error["message"]
    assert engine.calls == []
