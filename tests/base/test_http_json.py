"""Pages fetched from real servers; probes and the proxy use the same fetcher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from launcher.base import http_json
from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.base.http_json import fetch, url_of

TIMEOUT_S = 30.0


@pytest.fixture
async def address(tmp_path: Path) -> AsyncIterator[UnixAddress]:
    async def page(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/metrics":
                return web.Response(text="up 1\n")
            case "/elsewhere":
                raise web.HTTPFound("/metrics")
            case "/slow":
                await asyncio.Event().wait()
        raise web.HTTPServiceUnavailable

    app = web.Application()
    app.router.add_get("/{path:.*}", page)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    socket = UnixAddress(str(tmp_path / "engine.sock"))
    await web.UnixSite(runner, socket.path).start()
    yield socket
    await runner.cleanup()


async def test_a_page(address: UnixAddress) -> None:
    assert await fetch(address, "/metrics", TIMEOUT_S) == b"up 1\n"


@pytest.mark.parametrize("path", ["/elsewhere", "/broken"])
async def test_only_status_200_is_an_answer(address: UnixAddress, path: str) -> None:
    assert await fetch(address, path, TIMEOUT_S) is None


async def test_a_late_answer_is_none(address: UnixAddress) -> None:
    assert await fetch(address, "/slow", 0.05) is None


async def test_a_page_that_is_too_large_is_none(
    address: UnixAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_json, "MAX_PAGE_BYTES", 3)
    assert await fetch(address, "/metrics", TIMEOUT_S) is None


async def test_an_address_without_a_listener_gives_none(tmp_path: Path) -> None:
    for closed in (UnixAddress(str(tmp_path / "none.sock")), TcpAddress("127.0.0.1", 9)):
        assert await fetch(closed, "/metrics", TIMEOUT_S) is None


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (UnixAddress("/run/x.sock"), "http://localhost/metrics"),
        (TcpAddress("127.0.0.1", 8001), "http://127.0.0.1:8001/metrics"),
        (TcpAddress("::1", 8001), "http://[::1]:8001/metrics"),
    ],
)
def test_urls(address: Address, url: str) -> None:
    assert url_of(address, "/metrics") == url
