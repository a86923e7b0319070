"""Fixtures of the proxy's tests; a test that leaks a task fails. All run on uvloop, as the daemon does,
but those of time limits that are marked `virtual_time`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import aiohttp
import pytest
import uvloop
from support.fakes import SOON_S
from support.jumping_loop import JumpingLoop
from support.overflow import cloud, outside, proxy_with  # noqa: F401  fixtures
from support.proxy_under_test import Build, ProxyUnderTest

from launcher.accounts.ended_request import EndedRequest
from launcher.base.background import RunningClock
from launcher.base.money import TokenPrices
from launcher.config.schema import Model, Proxy
from launcher.proxy.ended import Accounting
from launcher.proxy.server import ProxyServer


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.get_closest_marker("virtual_time") is not None:
        return {"virtual time": JumpingLoop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def build(tmp_path: Path) -> AsyncIterator[Build]:
    """build(**proxy settings) -> ProxyUnderTest, closed at the test's end."""
    async with AsyncExitStack() as stack:

        async def make(*names: str, **settings: object) -> ProxyUnderTest:
            idle: list[tuple[int, int]] = []
            suspects: list[tuple[int, int, str]] = []
            entries: list[EndedRequest] = []
            prices = settings.pop("prices", None)
            aliases = settings.pop("aliases", {})
            most_clients = settings.pop("most_clients", None)
            accounting = settings.pop("accounting", None)
            caps = settings.pop("caps", {})
            assert isinstance(aliases, dict)
            assert most_clients is None or isinstance(most_clients, int)
            assert accounting is None or isinstance(accounting, Accounting)
            assert prices is None or isinstance(prices, TokenPrices)
            assert isinstance(caps, dict)
            server = ProxyServer(
                Proxy(**{"listen": ("127.0.0.1:0",), **settings}),  # type: ignore[arg-type]
                models=[
                    Model(name=name, path="/x", aliases=aliases.get(name, ())) for name in names or ("m",)
                ],
                on_idle=lambda slot, generation: idle.append((slot, generation)),
                on_suspect=lambda slot, generation, reason: suspects.append((slot, generation, reason)),
                chance=Random(7),  # noqa: S311
                most_clients=most_clients,
                accounting=accounting or Accounting(record=entries.append, prices=prices, caps=caps),
                running=RunningClock(asyncio.get_running_loop().time),
            )
            await server.start()
            stack.push_async_callback(server.stop, 0.0)
            base = server.endpoint if server.endpoint.startswith("http") else None
            client = await stack.enter_async_context(aiohttp.ClientSession(base))
            return ProxyUnderTest(tmp_path, stack, server, client, idle, suspects, entries)

        yield make
    leaked = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    if leaked:
        await asyncio.wait(leaked, timeout=SOON_S)
    assert not [task for task in leaked if not task.done()]


@pytest.fixture
async def proxy(build: Build) -> ProxyUnderTest:
    """One with default settings and the model "m"."""
    return await build()
