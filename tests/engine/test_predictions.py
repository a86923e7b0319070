"""Predicted times to the first token against measured ones, on real vLLM under load, and overflow decided by them.

The bounds are loose: engines, proxy and clients share this machine. docs/balancing.md has what was measured; the figures
of a run are printed (`pytest -s`) and asserted last.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median

import aiohttp
import pytest
from aiohttp import web
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.engine_runs import READY_S, Configure
from support.keys import new_key
from support.ledger_file import entries
from support.ports import free_port

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import open_reader

pytestmark = [pytest.mark.engine, pytest.mark.release, pytest.mark.timeout(1800)]

LIMIT_S = 3.0
LOADS = (0.5, 0.8, 1.0, 1.3)
SECONDS = 25.0
PLACES = 4  # max_num_seqs: requests wait in the proxy's queue
WORDS = ("window", "river", "seven", "quietly", "under", "market", "blue", "thread", "engine", "later")


class Elsewhere:
    """An overflow endpoint that answers at once, in a thread of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    async def _answer(self, _request: web.Request) -> web.Response:
        return web.Response(body=b'data: {"id":"x"}\n\ndata: [DONE]\n\n', content_type="text/event-stream")

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    def start(self) -> None:
        self._loop.run_until_complete(self._start())
        self._thread.start()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(SOON_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Service:
    """The daemon, its keys, and what its ledger says."""

    def __init__(self, daemon: DaemonProcess, keys: dict[str, str]) -> None:
        self.daemon = daemon
        self._keys = keys
        self._random = random.Random(5)  # noqa: S311
        self._systems = [self._text(600) for _ in range(6)]

    def _text(self, words: int) -> str:
        return f"{self._random.getrandbits(40):x} " + " ".join(self._random.choices(WORDS, k=words))

    def body(self) -> bytes:
        """Half of them share a long system prompt with others."""
        messages = [{"role": "user", "content": self._text(self._random.choice((5, 30, 80, 150)))}]
        if self._random.random() < 0.5:
            messages.insert(0, {"role": "system", "content": self._random.choice(self._systems)[:800]})
        tokens = self._random.randint(10, 60)
        asked = {
            "model": "tiny",
            "messages": messages,
            "max_tokens": tokens,
            "stream": True,
            "ignore_eos": True,
        }
        return json.dumps(asked).encode()

    async def _ask(self, session: aiohttp.ClientSession, key: str) -> None:
        head = {"Authorization": f"Bearer {self._keys[key]}", "Content-Type": "application/json"}
        async with session.post("/v1/chat/completions", data=self.body(), headers=head) as answer:
            body = await answer.read()
            assert answer.status == 200, body
            assert body.endswith(b"data: [DONE]\n\n"), body[-500:]

    async def _workers(self, workers: int, seconds: float) -> float:
        end, done = time.monotonic() + seconds, 0

        async def work(session: aiohttp.ClientSession) -> None:
            nonlocal done
            while time.monotonic() < end:
                await self._ask(session, "stays")
                done += time.monotonic() < end

        async with aiohttp.ClientSession(self.daemon.url) as session, asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(work(session))
        return done / seconds

    async def _open_loop(self, key: str, rate: float, seconds: float) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self.daemon.url, connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            at = begin = time.monotonic()
            while at < begin + seconds:
                group.create_task(self._ask(session, key))
                at += self._random.expovariate(rate)
                await asyncio.sleep(max(0.0, at - time.monotonic()))

    def capacity(self, seconds: float) -> float:
        """Requests per second with more clients than the instances run at once."""
        return asyncio.run(self._workers(5 * PLACES, seconds))

    def play(self, key: str, rate: float, seconds: float) -> list[EndedRequest]:
        """Entries of the requests that came at that rate."""
        began = time.time()
        asyncio.run(self._open_loop(key, rate, seconds))
        time.sleep(2.0)  # the ledger writes at least once a second
        with closing(open_reader(self.daemon.folder / "state" / "usage" / "usage.db")) as ledger:
            found = list(entries(ledger, began, time.time()))
        return [entry for entry in found if entry.key == key]


@pytest.fixture(scope="module")
def service(configure: Configure, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("d")
    path = folder / "keys"
    keys = {"stays": new_key(path, "stays", overflow="never"), "leaves": new_key(path, "leaves")}
    elsewhere = Elsewhere()
    elsewhere.start()
    config = configure().replace("max_num_seqs = 16", f"max_num_seqs = {PLACES}")
    config += f"""
[[proxy.overflow]]
url = "http://127.0.0.1:{elsewhere.port}/v1"
models = {{ tiny = "x" }}
max_requests = 1000
when = "predicted_ttft > {LIMIT_S:g}s"
"""
    daemon = DaemonProcess(folder, config, {"NUMA_LAUNCHER_PROXY__API_KEYS_FILE": str(path)})
    try:
        daemon.wait_ready(2, READY_S)
        yield Service(daemon, keys)
    finally:
        daemon.end()
        elsewhere.stop()


def good(entry: EndedRequest) -> bool:
    """The prediction is within 25 % or 100 ms."""
    assert entry.predicted_s is not None
    assert entry.first_byte_s is not None
    return abs(entry.predicted_s - entry.first_byte_s) <= max(0.25 * entry.first_byte_s, 0.1)


def part(entries: Sequence[EndedRequest]) -> float:
    return sum(map(good, entries)) / len(entries)


def test_predictions_and_overflow_by_them(service: Service) -> None:
    service.capacity(10.0)  # fills caches
    parts = []
    for load in LOADS:
        rate = service.capacity(6.0)  # each time: other programs' load changes it
        entries = [
            entry for entry in service.play("stays", load * rate, SECONDS) if entry.predicted_s is not None
        ]
        first = sorted(entry.first_byte_s or 0.0 for entry in entries)
        bias = median((entry.predicted_s or 0.0) / (entry.first_byte_s or 1.0) for entry in entries)
        parts.append(part(entries))
        print(
            f"\nload {load:4.0%} of {rate:.1f}/s: {len(entries)} streams, first token p50 {first[len(first) // 2]:.2f} s, "
            f"p99 {first[int(0.99 * len(first))]:.2f} s, good {parts[-1]:.0%}, predicted / measured {bias:.2f}"
        )
    for load in (1.3, 3.0):
        rate = service.capacity(6.0)
        entries = service.play("leaves", load * rate, SECONDS)
        over = sum(entry.overflow != "" for entry in entries) / len(entries)
        late = sum(entry.overflow == "" and (entry.first_byte_s or 0.0) > LIMIT_S for entry in entries)
        within = 1.0 - late / len(entries)
        print(
            f"load {load:4.0%} of {rate:.1f}/s: {over:.1%} of {len(entries)} overflowed, {within:.1%} within {LIMIT_S:g} s"
        )
        assert all(entry.overflow_reason == "predicted" for entry in entries if entry.overflow)
        assert within > 0.9
        assert over < 1.0 - 1.0 / load + 0.3
    assert over > 0.2
    assert sum(parts) / len(parts) > 0.6
    eventually(lambda: service.daemon.status()["requests"]["in_flight"] == 0, SOON_S, "idle")
