"""One ingress host before three daemons: real HAProxy, real processes, the small stand-in for vLLM behind them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from support.daemon_process import SOON_S, DaemonProcess, eventually
from support.fleet_processes import LIMIT, PATIENT, TOKENS, Fleet, IngressProcess, Tally

from launcher.fleet.members import MemberState

pytestmark = pytest.mark.timeout(900)


async def ask(session: aiohttp.ClientSession, url: str, text: str, tally: Tally) -> str:
    """One stream; its id."""
    body = {
        "model": "fake",
        "stream": True,
        "max_tokens": TOKENS,
        "messages": [{"role": "user", "content": text}],
    }
    began = time.monotonic()
    id_ = f"#{len(tally.sent)}"
    tally.sent[id_] = began
    got = b""
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            id_ = response.headers.get("X-Request-Id", id_)
            tally.sent[id_] = began
            if response.status != 200:
                tally.failed[id_] = f"{response.status} {(await response.text())[:200]}"
                return id_
            async for part in response.content.iter_any():
                got += part
    except (aiohttp.ClientError, OSError) as error:
        tally.failed[id_] = repr(error)
        if b"[DONE]" in got:
            tally.dishonest.append(id_)
        return id_
    done, tokens = got.rstrip().endswith(b"data: [DONE]"), got.count(b'"delta"')
    if done and tokens == TOKENS:
        tally.whole.append(id_)
    else:
        tally.failed[id_] = f"{tokens} tokens, done: {done}"
        if done:
            tally.dishonest.append(id_)
    return id_


@asynccontextmanager
async def load(url: str, workers: int) -> AsyncIterator[Tally]:
    """So many clients, one stream after the other each, until the block ends; their last streams end well then."""
    tally, stop = Tally(), asyncio.Event()

    async def work(session: aiohttp.ClientSession, worker: int) -> None:
        while not stop.is_set():
            await ask(session, url, f"{worker % 5} " * 1500, tally)

    timeout = aiohttp.ClientTimeout(total=None, sock_read=SOON_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for worker in range(workers):
            group.create_task(work(session, worker))
        yield tally
        stop.set()


@pytest.fixture
def fleet(tmp_path: Path, start: Callable[..., DaemonProcess]) -> Iterator[Fleet]:
    environ = {
        "NUMA_LAUNCHER_PROXY__TRUSTED_PROXIES": '["127.0.0.1/32"]',
        "NUMA_LAUNCHER_PROXY__ACCESS_LOG": "all",
    }
    daemons = {
        host: start("--token-s", "0.02", instances=2, max_num_seqs=LIMIT, environ=environ) for host in "abc"
    }
    for daemon in daemons.values():
        daemon.wait_ready(2)
    ingress = IngressProcess(tmp_path, PATIENT)
    made = Fleet(ingress, daemons)
    try:
        made.members(1)
        ingress.wait_open(3)
        yield made
    finally:
        ingress.end()


async def prompts_stay_where_they_are_cached(fleet: Fleet) -> None:
    tally = Tally()
    asked: dict[str, list[str]] = {}
    async with aiohttp.ClientSession() as session:
        for turn in range(4):
            # The second and third of them are asked at once: each on an instance of its own.
            for text in ("alpha", "beta", "gamma", "delta"):
                prompt = f"{text} " * 1500 + f"question {turn}"
                asked.setdefault(text, []).append(await ask(session, fleet.url, prompt, tally))
    assert not tally.failed
    served = fleet.logged(tally)
    for text, ids in asked.items():
        assert len({served[id_] for id_ in ids}) == 1, f"{text}: {[served[id_] for id_ in ids]}"


async def picks_land_on_their_slots(fleet: Fleet) -> None:
    async with load(fleet.url, 6 * LIMIT) as tally:
        await asyncio.sleep(8.0)
    assert not tally.failed, tally
    served, chosen = fleet.logged(tally), fleet.ingress.chosen()
    landed = Counter(served[id_] == chosen.get(id_) for id_ in tally.whole)
    # A daemon uses another of its slots where it knows better.
    assert landed[True] >= 0.8 * landed.total(), landed
    used = Counter(served[id_] for id_ in tally.whole)
    assert len(used) == 6, used
    eventually(
        lambda: all(host["sent"] == 0 for host in fleet.ingress.status()["hosts"].values()), what="ends told"
    )


async def a_drained_host_gets_nothing_new(fleet: Fleet) -> None:
    async with load(fleet.url, 12) as tally:
        await asyncio.sleep(1.0)
        fleet.members(2, b=MemberState.DRAINING)
        await asyncio.to_thread(fleet.ingress.wait_open, 2)
        drains = time.monotonic()
        await asyncio.sleep(3.0)
    assert not tally.failed, tally
    served, late = fleet.logged(tally), tally.whole_since(drains)
    assert len(late) > 12
    assert {served[id_][0] for id_ in late} == {"a", "c"}
    fleet.members(3)
    await asyncio.to_thread(fleet.ingress.wait_open, 3)


async def one_daemon_dies_alone(fleet: Fleet) -> None:
    daemon = fleet.daemons["a"]
    async with load(fleet.url, 18) as tally:
        await asyncio.sleep(2.0)
        await asyncio.to_thread(
            eventually,
            lambda: (status := daemon.status()) and status["requests"]["in_flight"] >= LIMIT,
            what="running streams",
        )
        daemon.process.kill()
        await asyncio.sleep(4.0)
    chosen = fleet.ingress.chosen()
    strangers = {id_: why for id_, why in tally.failed.items() if chosen.get(id_, ("?", 0))[0] != "a"}
    assert not strangers
    assert 0 < len(tally.failed) <= 2 * LIMIT
    assert not tally.dishonest
    daemon.restart()
    await asyncio.to_thread(daemon.wait_ready, 2)
    await asyncio.to_thread(fleet.ingress.wait_open, 3)


async def the_ingress_dies_and_comes_back(fleet: Fleet) -> None:
    ingress, haproxy = fleet.ingress, fleet.ingress.haproxy
    async with load(fleet.url, 12) as tally:
        await asyncio.sleep(1.0)
        ingress.kill()
        killed, known = time.monotonic(), ingress.chosen().keys()
        await asyncio.to_thread(
            eventually, lambda: len(tally.whole_since(killed)) >= 24, what="served without it"
        )
        without = tally.whole_since(killed)
        ingress.start()
        await asyncio.to_thread(ingress.wait_open, 3)
        # HAProxy's check finds it.
        await asyncio.to_thread(
            eventually, lambda: len(ingress.chosen().keys() - known) >= 12, what="asked again"
        )
        resumed = time.monotonic()
        await asyncio.to_thread(
            eventually, lambda: len(tally.whole_since(resumed)) >= 24, what="served with it"
        )
    assert not tally.failed, tally
    assert ingress.haproxy == haproxy
    served = fleet.logged(tally)
    assert {served[id_][0] for id_ in without} == {"a", "b", "c"}
    assert ingress.status()["decides"]
    chosen = fleet.ingress.chosen()
    assert not set(tally.whole_since(resumed)) - chosen.keys()
    assert not set(without) & chosen.keys()


async def more_requests_than_places(fleet: Fleet) -> None:
    """None is refused: they wait in the picker, then in their hosts' queues."""

    def waiting() -> int:
        return sum(host.get("waiting", 0) for host in fleet.ingress.status()["hosts"].values())

    async with load(fleet.url, 16 * LIMIT) as tally:
        await asyncio.to_thread(eventually, lambda: fleet.ingress.status()["held"], what="held by the picker")
        await asyncio.to_thread(eventually, waiting, what="in the queues of hosts")
        await asyncio.to_thread(
            eventually, lambda: tally.failed or len(tally.whole) >= 48 * LIMIT, what="served"
        )
    assert not tally.failed, tally
    served, chosen = fleet.logged(tally), fleet.ingress.chosen()
    landed = Counter(served[id_][0] == chosen[id_][0] for id_ in tally.whole if id_ in chosen)
    assert landed.total() == len(tally.whole)
    # HAProxy chooses another host where it cannot connect to this one.
    assert landed[True] >= 0.8 * landed.total(), landed


async def a_daemon_that_hangs_gets_nothing_new(fleet: Fleet) -> None:
    """HAProxy can still connect to it: its picker sees that it does not answer."""
    daemon = fleet.daemons["c"].process
    async with load(fleet.url, 12) as tally:
        await asyncio.sleep(1.0)
        daemon.send_signal(signal.SIGSTOP)
        try:
            await asyncio.to_thread(fleet.ingress.wait_lost, "c")
            before = fleet.ingress.chosen()
            await asyncio.sleep(3.0)
            since = {id_: host for id_, (host, _) in fleet.ingress.chosen().items() if id_ not in before}
        finally:
            daemon.send_signal(signal.SIGCONT)
    assert not tally.failed, tally
    assert set(since.values()) <= {"a", "b"}
    await asyncio.to_thread(fleet.ingress.wait_open, 3)


async def haproxy_dies_and_its_ends_are_never_told(fleet: Fleet) -> None:
    haproxy = fleet.ingress.haproxy
    async with load(fleet.url, 12) as tally:
        await asyncio.sleep(1.0)
        os.kill(haproxy, signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: fleet.ingress.haproxy not in {0, haproxy})
        await asyncio.to_thread(fleet.ingress.wait_open, 3)
        back = time.monotonic()
        await asyncio.sleep(3.0)
    assert not [(id_, why) for id_, why in tally.failed.items() if tally.sent[id_] > back]
    assert tally.whole_since(back)
    assert not tally.dishonest
    assert "ejected" not in fleet.ingress.log.read_text()

    def all_forgotten() -> bool:
        return not any(host["sent"] for host in fleet.ingress.status()["hosts"].values())

    eventually(all_forgotten, what="ends")


@pytest.mark.long
async def test_a_fleet_under_load(fleet: Fleet) -> None:
    await prompts_stay_where_they_are_cached(fleet)
    await picks_land_on_their_slots(fleet)
    await a_drained_host_gets_nothing_new(fleet)
    await one_daemon_dies_alone(fleet)


@pytest.mark.long
async def test_a_fleet_beyond_its_limits(fleet: Fleet) -> None:
    await more_requests_than_places(fleet)
    await a_daemon_that_hangs_gets_nothing_new(fleet)
    await haproxy_dies_and_its_ends_are_never_told(fleet)


async def test_without_a_choice(fleet: Fleet) -> None:
    """The ingress is not asked, or is not there."""
    async with aiohttp.ClientSession(fleet.url) as session:
        for path, body in (("/v1/models", None), ("/v1/chat/completions", "not JSON")):
            method = "GET" if body is None else "POST"
            async with session.request(method, path, data=body) as response:
                assert response.status == (200 if body is None else 400)
                assert await response.json()
    await the_ingress_dies_and_comes_back(fleet)
