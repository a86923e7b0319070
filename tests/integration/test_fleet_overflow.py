"""A host of a fleet that is overloaded: new requests go to its siblings, and to an API endpoint only if all are full."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from support.cloud import CloudProcess, cloud_process, make_certificate
from support.daemon_process import DaemonProcess
from support.fleet_processes import LIMIT, TOKENS, Fleet, IngressProcess, Tally

pytestmark = pytest.mark.timeout(600)

INSTANCES = 2
PLACES = INSTANCES * LIMIT  # requests that a host runs at once
OVERFLOW = """
[[proxy.overflow]]
name = "cloud"
url = "{url}"
models = {{ fake = "big" }}
when = "predicted_ttft > 1s"
"""


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[CloudProcess]:
    with cloud_process(make_certificate(tmp_path)) as process:
        yield process


@pytest.fixture
def fleet(tmp_path: Path, cloud: CloudProcess, start: Callable[..., DaemonProcess]) -> Iterator[Fleet]:
    """Hosts a and b; each may use the endpoint."""
    environ = {
        "NUMA_LAUNCHER_PROXY__TRUSTED_PROXIES": '["127.0.0.1/32"]',
        "NUMA_LAUNCHER_PROXY__ACCESS_LOG": "all",
        "SSL_CERT_FILE": str(cloud.certificate.path),
    }
    daemons = {
        host: start(
            "--token-s", "0.02", instances=INSTANCES, max_num_seqs=LIMIT, environ=environ,
            more=OVERFLOW.format(url=cloud.url),
        )
        for host in "ab"
    }  # fmt: skip
    for daemon in daemons.values():
        daemon.wait_ready(INSTANCES)
    ingress = IngressProcess(tmp_path)
    made = Fleet(ingress, daemons)
    try:
        made.members(1)
        ingress.wait_open(2)
        yield made
    finally:
        ingress.end()


@asynccontextmanager
async def load(url: str, workers: int) -> AsyncIterator[dict[str, list[str]]]:
    """So many clients until the block ends; ids of their requests by who answered: "fleet", the endpoint, or an error."""
    served: dict[str, list[str]] = {}
    stop = asyncio.Event()

    async def work(session: aiohttp.ClientSession, worker: int) -> None:
        body = {
            "model": "fake", "stream": True, "max_tokens": TOKENS,
            "messages": [{"role": "user", "content": f"{worker}"}],
            # The endpoint takes as long as an instance.
            "cloud": {"say": TOKENS, "wait_s": 0.02},
        }  # fmt: skip
        while not stop.is_set():
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
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
    async with load(fleet.daemons["a"].url, 5 * PLACES) as direct:
        # The pickers learn of it by the host's load.
        await asyncio.sleep(3)
        async with load(fleet.url, PLACES - 2) as through:
            await asyncio.sleep(6)
    assert direct.keys() == {"fleet", "overflow/cloud"}, (
        direct
    )  # it was beyond its limit, and would have used the endpoint
    assert through.keys() == {"fleet"}, through
    tally = Tally(whole=through["fleet"])
    hosts = Counter(host for id_, (host, _) in fleet.logged(tally).items() if id_ in tally.whole)
    assert hosts["b"] > 2 * PLACES
    assert hosts["b"] >= 0.95 * hosts.total(), hosts


async def test_a_fleet_without_room_uses_the_endpoint(fleet: Fleet) -> None:
    async with load(fleet.url, 10 * PLACES) as through:
        await asyncio.sleep(6)
    assert through.keys() == {"fleet", "overflow/cloud"}, through
