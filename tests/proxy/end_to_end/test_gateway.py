"""Behind a gateway that chooses instances: its choice, its request ids, and what it reads of the load."""

from __future__ import annotations

import json

import pytest
from support.proxy_under_test import Build, ProxyUnderTest
from support.scripted_engine import Call, FakeEngine, answer_chat

TRUSTED = ("127.0.0.0/8",)


async def ask(proxy: ProxyUnderTest, slot: object, request_id: str = "id") -> int:
    """A request with this wish; its status."""
    headers = {"X-Numa-Slot": str(slot), "X-Request-Id": request_id}
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
    async with proxy.client.post("/v1/chat/completions", data=body, headers=headers) as answer:
        assert answer.headers["X-Request-Id"] == request_id
        return answer.status


async def four(proxy: ProxyUnderTest) -> list[FakeEngine]:
    return [await proxy.engine(slot) for slot in range(4)]


def asked(engines: list[FakeEngine]) -> list[int]:
    return [len(engine.calls) for engine in engines]


async def test_a_trusted_gateway_chooses_the_instance(build: Build) -> None:
    proxy = await build(trusted_proxies=TRUSTED)
    engines = await four(proxy)
    for slot in (3, 3, 1, 3):
        assert await ask(proxy, slot) == 200
    assert asked(engines) == [0, 1, 0, 3]
    calls = [call for engine in engines for call in engine.calls]
    assert not any(call.header("X-Numa-Slot") for call in calls)


@pytest.mark.parametrize("trusted", [(), ("10.0.0.0/8", "unix")])
async def test_others_choose_nothing(build: Build, trusted: tuple[str, ...]) -> None:
    proxy = await build(trusted_proxies=trusted)
    engines = await four(proxy)
    for slot in (0, 1, 2, 3, 3, 3):
        await ask(proxy, slot)
    assert asked(engines) == [6, 0, 0, 0]  # idle each time, and the prompt is cached there
    calls = [call for engine in engines for call in engine.calls]
    assert not any(call.header("X-Numa-Slot") for call in calls)


@pytest.mark.parametrize("wish", ["9", "-1", "1.0", "x", "", "99999999999999999999", "٣"])
async def test_a_wish_that_is_no_open_slot_is_ignored(build: Build, wish: str) -> None:
    proxy = await build(trusted_proxies=TRUSTED)
    await proxy.engine(0)
    assert await ask(proxy, wish) == 200


async def test_a_request_that_fails_where_it_was_wished_is_retried_elsewhere(build: Build) -> None:
    async def dies(call: Call) -> None:
        await call.cut_now()

    proxy = await build(trusted_proxies=TRUSTED)
    broken, good = await proxy.engine(0, dies), await proxy.engine(1, answer_chat)
    assert await ask(proxy, 0) == 200
    assert asked([broken, good]) == [1, 1]


async def test_the_gateways_request_id_is_kept(build: Build, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "launcher.access")
    proxy = await build(trusted_proxies=TRUSTED)
    engine = await proxy.engine(2)
    assert await ask(proxy, 2, "ingress-1/abc") == 200
    assert engine.calls[0].header("X-Request-Id") == "ingress-1/abc"
    assert [(entry.request_id, entry.slot) for entry in proxy.entries] == [("ingress-1/abc", 2)]
    (line,) = [record for record in caplog.records if record.name == "launcher.access"]
    assert (line.__dict__["request_id"], line.__dict__["slot"]) == ("ingress-1/abc", 2)
    found = proxy.server.requests.timeline("ingress-1/abc")
    assert found is not None
    assert found.id == "ingress-1/abc"


async def test_a_gateway_reads_the_load_of_each_instance(build: Build) -> None:
    proxy, other = await build(aliases={"m": ("alias",)}), await build()
    await proxy.engine(0)
    await proxy.engine(2, generation=4)
    await other.engine(1)
    loads = []
    for each in (proxy, proxy, other):
        async with each.client.get("/load") as answer:
            loads.append(await answer.json())
    assert [(each["slot"], each["generation"], each["ready"]) for each in loads[0]["instances"]] == [
        (0, 1, True), (2, 4, True),
    ]  # fmt: skip
    assert loads[0]["models"]["m"]["aliases"] == ["alias"]
    assert loads[0]["started"] == loads[1]["started"] != loads[2]["started"]


async def test_without_an_instance_health_refuses_and_load_answers(build: Build) -> None:
    """Kubernetes: not ready, and alive."""
    proxy = await build()
    for path, status in (("/health", 503), ("/load", 200), ("/metrics/host", 200)):
        async with proxy.client.get(path) as answer:
            assert answer.status == status, path
