"""A host of a fleet that is overloaded: new requests go to its siblings, and to an API endpoint only if all are full."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager

import aiohttp
import pytest
from support.cloud import cloud_process, make_certificate
from support.daemon_process import SOON_S, DaemonProcess, fake_config
from support.fleet_processes import LIMIT, PATIENT, TOKENS, Fleet, IngressProcess, Tally

pytestmark = pytest.mark.timeout(600)

INSTANCES = 2
PLACES = INSTANCES * LIMIT  # requests that a host runs at once
ENDLESS = 50_000  # tokens: a stream of many minutes
OVERFLOW = """
[[proxy.overflow]]
name = "cloud"
url = "{url}"
models = {{ fake = "big" }}
when = "predicted_ttft > 1s"
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Hosts a and b; each may use the endpoint."""
    folder = tmp_path_factory.mktemp("f")
    with ExitStack() as stack:
        cloud = stack.enter_context(cloud_process(make_certificate(folder)))
        environ = {
            "NUMA_LAUNCHER_PROXY__TRUSTED_PROXIES": '["127.0.0.1/32"]',
            "NUMA_LAUNCHER_PROXY__ACCESS_LOG": "all",
            "SSL_CERT_FILE": str(cloud.certificate.path),
        }
        config = fake_config(
            "--token-s", "0.02", instances=INSTANCES, max_num_seqs=LIMIT, more=OVERFLOW.format(url=cloud.url)
        )
        daemons = {}
        for host in "ab":
            (folder / host).mkdir()
            daemons[host] = DaemonProcess(folder / host, config, environ)
            stack.callback(daemons[host].end)
        for daemon in daemons.values():
            daemon.wait_ready(INSTANCES)
        ingress = IngressProcess(folder, PATIENT)
        stack.callback(ingress.end)
        made = Fleet(ingress, daemons)
        made.members(1)
        ingress.wait_open(2)
        yield made


async def seen(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while not check():  # noqa: ASYNC110  it asks other processes
            await asyncio.sleep(0.05)


def asked(worker: int, tokens: int) -> dict[str, object]:
    return {
        "model": "fake", "stream": True, "max_tokens": tokens,
        "messages": [{"role": "user", "content": f"{worker}"}],
        # The endpoint takes as long as an instance for a usual answer.
        "cloud": {"say": TOKENS, "wait_s": 0.02},
    }  # fmt: skip


@asynccontextmanager
async def held(url: str, clients: int) -> AsyncIterator[Counter[str]]:
    """So many streams that do not end before the block does; how many began, by who answers: "fleet" or the endpoint."""
    began: Counter[str] = Counter()
    stop = asyncio.Event()

    async def hold(session: aiohttp.ClientSession, worker: int) -> None:
        async with session.post(f"{url}/v1/chat/completions", json=asked(worker, ENDLESS)) as response:
            assert response.status == 200
            await response.content.readany()
            began[response.headers.get("X-Served-By", "fleet")] += 1
            await stop.wait()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(hold(session, worker)) for worker in range(clients)]
        try:
            yield began
        finally:
            for task in tasks:  # some wait for a place
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended


@asynccontextmanager
async def load(url: str, workers: int) -> AsyncIterator[dict[str, list[str]]]:
    """So many clients until the block ends; ids of their requests by who answered: "fleet", the endpoint, or an error."""
    served: dict[str, list[str]] = {}
    stop = asyncio.Event()

    async def work(session: aiohttp.ClientSession, worker: int) -> None:
        while not stop.is_set():
            async with session.post(f"{url}/v1/chat/completions", json=asked(worker, TOKENS)) as response:
                whole = await response.read()
                well = response.status == 200 and whole.rstrip().endswith(b"data: [DONE]")
                by = response.headers.get("X-Served-By", "fleet")
                who = by if well else f"{response.status} {whole[-200:]!r}"
                served.setdefault(who, []).append(response.headers.get("X-Request-Id", ""))

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for worker in range(workers):
            group.create_task(work(session, worker))
        yield served
        stop.set()


async def test_an_overloaded_host_sheds_to_its_sibling_before_an_endpoint(fleet: Fleet) -> None:
    """Host a has no place for as long as the test lasts, so what a picker knows of it is right however old it is."""
    # What it cannot serve within the limit goes to the endpoint, once it has learned what a request takes.
    async with load(fleet.daemons["a"].url, 5 * PLACES) as direct:
        await seen(lambda: direct.keys() >= {"fleet", "overflow/cloud"})
    assert direct.keys() == {"fleet", "overflow/cloud"}, direct
    async with held(fleet.daemons["a"].url, 5 * PLACES) as endless:
        await seen(lambda: endless["fleet"] >= PLACES)
        # The picker learns of it by the host's load, and believes what two reports in a row say.
        await seen(lambda: fleet.ingress.status()["hosts"]["a"]["foreign"] >= PLACES)
        async with load(fleet.url, PLACES - 2) as through:
            await seen(lambda: sum(map(len, through.values())) > 4 * PLACES)
    tally = Tally(whole=through["fleet"])
    hosts = Counter(host for id_, (host, _) in fleet.logged(tally).items() if id_ in tally.whole)
    # HAProxy chooses host a itself where it has no answer of the picker; that sends the request to the endpoint.
    assert through.keys() <= {"fleet", "overflow/cloud"}, through
    assert hosts["b"] >= 0.8 * sum(map(len, through.values())), (hosts, through)


@pytest.mark.long
async def test_a_fleet_without_room_uses_the_endpoint(fleet: Fleet) -> None:
    async with load(fleet.url, 10 * PLACES) as through:
        await seen(lambda: through.keys() >= {"fleet", "overflow/cloud"})
    assert through.keys() == {"fleet", "overflow/cloud"}, through
