"""Members are asked each second; each alone."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.cloud import make_certificate

from launcher.base.errors import LauncherError
from launcher.fleet import loads
from launcher.fleet.loads import HostLoad, Loads
from launcher.fleet.members import Member

PAGE = {
    "running": 3, "waiting": 1, "kv_usage": 0.5, "predicted_ttft_s": 0.25,
    "models": {"m": {"running": 3, "aliases": ["big"], "adapters": ["lora"]}},
    "instances": [
        {"slot": 2, "generation": 7, "model": "m", "ready": True, "running": 3, "waiting": 0, "concurrency_limit": 8}
    ],
}  # fmt: skip
SOON_S = 60.0


class Heard:
    """What was told, in order."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []
        self.loads: dict[str, HostLoad] = {}
        self.changed = asyncio.Event()

    def report(self, host: str, load: HostLoad, _now: float) -> None:
        self.said.append((host, "load"))
        self.loads[host] = load
        self.changed.set()

    def lost(self, host: str) -> None:
        self.said.append((host, "lost"))
        self.changed.set()

    async def until(self, host: str, what: str, count: int = 1) -> None:
        async with asyncio.timeout(SOON_S):
            while self.said.count((host, what)) < count:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def daemon(
    text: str = json.dumps(PAGE), *, hang: asyncio.Event | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[TestServer]:
    """A daemon whose `/load` is this page; one that hangs answers when the event is set."""

    async def answer(_request: web.Request) -> web.Response:
        if hang is not None:
            await hang.wait()
        return web.Response(text=text)

    app = web.Application()
    app.add_routes([web.get("/load", answer)])
    server = TestServer(app, scheme="https" if tls else "http")
    await server.start_server(ssl=tls)
    try:
        yield server
    finally:
        await server.close()


def member(host: str, server: TestServer) -> Member:
    return Member(host=host, address=f"127.0.0.1:{server.port}")


@pytest.fixture
async def heard(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Heard, Loads]]:
    """A quicker clock: asked each 50 ms, lost after 300 ms."""
    monkeypatch.setattr(loads, "PERIOD_S", 0.05)
    monkeypatch.setattr(loads, "LOST_S", 0.3)
    found = Heard()
    made = Loads(found, None)
    yield found, made
    await made.close()


async def test_each_is_asked_again_and_again(heard: tuple[Heard, Loads]) -> None:
    found, made = heard
    async with daemon() as server:
        made.watch([member("a", server)])
        await found.until("a", "load", 3)
    load = found.loads["a"]
    assert (load.running, load.waiting, load.predicted_ttft_s) == (3, 1, 0.25)
    (instance,) = load.instances
    assert (instance.slot, instance.generation, instance.concurrency_limit) == (2, 7, 8)
    assert load.models["m"].adapters == ("lora",)


async def test_one_that_hangs_is_lost_and_delays_nobody(
    heard: tuple[Heard, Loads], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loads, "LOST_S", 3.0)  # on a busy machine four answers of the other take a second
    found, made = heard
    hang = asyncio.Event()
    async with daemon() as well, daemon(hang=hang) as silent:
        made.watch([member("well", well), member("silent", silent)])
        await found.until("silent", "lost")
        assert found.said.count(("well", "load")) >= 4
        hang.set()
        await found.until("silent", "load")
    assert found.said.count(("silent", "lost")) == 1


async def test_after_a_fault_of_ours_a_host_is_asked_again(
    heard: tuple[Heard, Loads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would keep its last load for ever."""
    found, made = heard
    faults = [KeyError("fault")]
    report = found.report

    def faulty(host: str, load: HostLoad, now: float) -> None:
        if faults:
            raise faults.pop()
        report(host, load, now)

    monkeypatch.setattr(found, "report", faulty)
    async with daemon() as server, asyncio.timeout(SOON_S):
        while ("a", "load") not in found.said:
            made.watch([member("a", server)])
            await asyncio.sleep(0.02)


async def test_one_that_refuses_is_lost_at_once(
    heard: tuple[Heard, Loads], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, made = heard
    async with daemon() as server:
        made.watch([member("a", server)])
        await found.until("a", "load")
        monkeypatch.setattr(loads, "LOST_S", 3600.0)  # silence alone is no loss
    await found.until("a", "lost")


@pytest.mark.parametrize("text", ["", "[]", '{"running": 1, "waiting": 0}', '{"running": "x"}'])
async def test_a_page_that_cannot_be_read_is_no_answer(text: str, heard: tuple[Heard, Loads]) -> None:
    found, made = heard
    async with daemon(text) as server:
        made.watch([member("a", server)])
        await found.until("a", "lost")
    assert "a" not in found.loads


async def test_one_that_is_no_member_any_more_is_not_asked(heard: tuple[Heard, Loads]) -> None:
    found, made = heard
    async with daemon() as one, daemon() as other:
        made.watch([member("a", one)])
        await found.until("a", "load")
        made.watch([member("b", other)])
        await found.until("b", "load")
        before = found.said.count(("a", "load"))
        await found.until("b", "load", 5)
        assert found.said.count(("a", "load")) == before
        one_now = Member(host="b", address=f"127.0.0.1:{one.port}")  # it has moved
        made.watch([one_now])
    await found.until("b", "lost")


async def test_tls_by_the_authority_of_the_fleet(
    heard: tuple[Heard, Loads], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found, stranger = heard
    certificate = make_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    other = make_certificate(tmp_path_factory.mktemp("other"))
    made, misled = Loads(found, str(certificate.path)), Loads(found, str(other.path))
    async with daemon(tls=context) as server:
        made.watch([member("a", server)])
        await found.until("a", "load")
        misled.watch([member("b", server)])
        await found.until("b", "lost")
        stranger.watch([member("c", server)])  # plain HTTP
        await found.until("c", "lost")
    assert found.loads.keys() == {"a"}
    for each in (made, misled):
        await each.close()


async def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=r"cannot read .*none\.pem"):
        Loads(Heard(), str(tmp_path / "none.pem"))
