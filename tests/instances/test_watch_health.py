"""Probes against real servers on UNIX sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.instances.watch import HttpProber

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[..., Awaitable[UnixAddress]]

LONG_S = 60.0
SHORT_S = 0.05


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Serve]:
    """serve("/path"=handler, ...) -> address of a server with these routes."""
    count = itertools.count()
    async with AsyncExitStack() as stack:

        async def start(**handlers: Handler) -> UnixAddress:
            app = web.Application()
            for name, handler in handlers.items():
                app.router.add_route("*", "/" + name.replace("__", "/"), handler)
            runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            path = str(tmp_path / f"{next(count)}.sock")
            await web.UnixSite(runner, path).start()
            return UnixAddress(path)

        yield start


def answers(status: int, seen: list[dict[str, object]] | None = None) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        if seen is not None:
            seen.append({"path": request.path, **json.loads(await request.text())})
        return web.Response(status=status)

    return handler


async def hangs(_request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def cuts(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (404, False), (500, False)])
async def test_an_answer(serve: Serve, status: int, healthy: bool) -> None:
    address = await serve(health=answers(status))
    assert await HttpProber("/health").healthy(address, LONG_S) is healthy


async def test_the_path_is_the_engines_own(serve: Serve) -> None:
    address = await serve(v1__ping=answers(200))
    assert await HttpProber("/v1/ping").healthy(address, LONG_S) is True


async def test_a_cut_connection_is_a_no(serve: Serve) -> None:
    assert await HttpProber("/health").healthy(await serve(health=cuts), LONG_S) is False


async def test_a_hang_is_no_answer(serve: Serve) -> None:
    assert await HttpProber("/health").healthy(await serve(health=hangs), SHORT_S) is None


async def test_no_listener(tmp_path: Path) -> None:
    missing = tmp_path / "none.sock"
    assert await HttpProber("/health").healthy(UnixAddress(str(missing)), LONG_S) is False
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(missing))  # bound, and nobody listens: what a dead engine leaves
        assert await HttpProber("/health").healthy(UnixAddress(str(missing)), LONG_S) is False


async def test_a_refused_port() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address: Address = TcpAddress("127.0.0.1", probe.getsockname()[1])
        assert await HttpProber("/health").healthy(address, LONG_S) is False


async def test_a_full_backlog_is_busy_not_dead(tmp_path: Path) -> None:
    """connect(2) on a UNIX socket whose backlog is full gives EAGAIN at once."""
    path = str(tmp_path / "full.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting: list[socket.socket] = []
        try:
            while True:
                client = socket.socket(socket.AF_UNIX)
                client.setblocking(False)
                waiting.append(client)
                client.connect(path)
        except BlockingIOError:
            pass
        try:
            assert await HttpProber("/health").healthy(UnixAddress(path), 0.5) is None
        finally:
            for client in waiting:
                client.close()


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """For this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # the gaps
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in held:
            os.close(each)


@pytest.mark.parametrize("tcp", [False, True])
async def test_our_own_shortage_says_nothing_of_an_instance(serve: Serve, tcp: bool) -> None:
    address: Address = TcpAddress("127.0.0.1", 9) if tcp else await serve(health=answers(200))
    with no_descriptor_left():
        with pytest.raises(OSError, match="Too many open files"):
            await HttpProber("/health").healthy(address, LONG_S)
        with pytest.raises(OSError, match="Too many open files"):
            await HttpProber("/health").counters(address, LONG_S)


async def test_a_completion_waits_for_the_end_of_our_own_shortage(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a question of life and death, and its time begins when it can be asked."""
    monkeypatch.setattr("launcher.instances.watch.SHORTAGE_S", 0.3)
    address = await serve(v1__completions=answers(200))
    elapsed_s = 0.0
    prober = HttpProber("/health", lambda: elapsed_s)
    with no_descriptor_left():
        canary = asyncio.create_task(prober.canary(address, "m", 0.2))
        completes = asyncio.create_task(prober.completes(address, "m"))
        await asyncio.sleep(0.1)
        elapsed_s = LONG_S
        done, _ = await asyncio.wait({canary, completes}, timeout=0.5)
        assert not done, "beyond the canary's own limit"
    assert await canary is True
    assert await completes is True


async def test_a_completion(serve: Serve) -> None:
    seen: list[dict[str, object]] = []
    address = await serve(v1__completions=answers(200, seen))
    assert await HttpProber("/health").completes(address, "m")
    assert seen == [
        {
            "path": "/v1/completions",
            "model": "m",
            "prompt": "Hello, what is your name?",
            "max_tokens": 1,
            "temperature": 0,
        }
    ]


async def test_a_model_that_only_chats_or_embeds(serve: Serve) -> None:
    seen: list[dict[str, object]] = []
    address = await serve(v1__completions=answers(400, seen), v1__embeddings=answers(200, seen))
    assert await HttpProber("/health").completes(address, "m")
    assert [body["path"] for body in seen] == ["/v1/completions", "/v1/embeddings"]


async def test_no_completion(serve: Serve, tmp_path: Path) -> None:
    prober = HttpProber("/health")
    assert not await prober.completes(await serve(v1__completions=answers(500)), "m")
    assert not await prober.completes(await serve(v1__completions=cuts), "m")
    assert not await prober.completes(UnixAddress(str(tmp_path / "none")), "m")
