"""A daily cap of a real daemon, killed under load: what the endpoint charges for never exceeds it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from support.cloud import CloudProcess, cloud_process, make_certificate
from support.daemon_process import DaemonProcess, eventually

from launcher.base.money import PICOS, token_prices

Start = Callable[..., DaemonProcess]
PRICES = token_prices(1.0, 4.0)
WORKERS = 16
# USD of the cap for each run of the daemon, which spends half as much before it is killed.
SHARE = 0.05
# A commit comes every 0.1 s, and takes milliseconds; other jobs may use the cpus.
LOST_S = 2.0


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[CloudProcess]:
    with cloud_process(make_certificate(tmp_path)) as process:
        yield process


def config(cloud: CloudProcess, cap: str) -> str:
    """Overflow of a model that is never ready here."""
    return f"""
[[proxy.overflow]]
name = "cloud"
url = "{cloud.url}"
models = {{ fake = "big" }}
input = 1.0
output = 4.0
max_per_day = {cap}
max_output_tokens = 100
"""


def listens(daemon: DaemonProcess) -> bool:
    """Clients' port is opened after the control socket: before it, the daemon reads what was spent."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", daemon.port)):
        return True
    return False


async def load(url: str, chance: random.Random, *, until_refused: bool) -> None:
    """Requests from several clients, until the daemon dies or keeps one of them here."""
    refused = asyncio.Event()

    async def client(session: aiohttp.ClientSession) -> None:
        while not refused.is_set():
            body = {
                "model": "fake", "messages": [{"role": "user", "content": "how?"}], "stream": chance.random() < 0.5,
                "cloud": {"say": chance.randrange(1, 60), "wait_s": chance.random() * 0.4},
            }  # fmt: skip
            if chance.random() < 0.5:
                body["max_tokens"] = chance.randrange(1, 100)
            async with session.post(f"{url}/v1/chat/completions", data=json.dumps(body)) as answer:
                await answer.read()
                if answer.status == 503:
                    refused.set()

    dies = contextlib.nullcontext() if until_refused else contextlib.suppress(aiohttp.ClientError)
    async with aiohttp.ClientSession() as session:
        with dies:
            await asyncio.gather(*(client(session) for _ in range(WORKERS)))


@pytest.mark.parametrize("kills", [1, pytest.param(25, marks=pytest.mark.release)])
def test_sigkill_under_load_holds_the_cap(
    start: Start, cloud: CloudProcess, tmp_path: Path, kills: int
) -> None:
    chance = random.Random(kills)  # noqa: S311
    # Each kill leaves up to WORKERS requests whose cost nobody knows: they count as reserved.
    cap = SHARE * (kills + 1)
    unstored = 0
    environ = {"SSL_CERT_FILE": str(cloud.certificate.path), "STATE_DIRECTORY": str(tmp_path / "state")}
    more = config(cloud, str(cap))

    def begin() -> DaemonProcess:
        daemon = start("--startup-s", "600", instances=1, more=more, environ=environ)
        eventually(lambda: listens(daemon), what="the daemon to listen")
        return daemon

    def charged() -> int:
        bill = cloud.bill()
        return PRICES.amount(bill.prompt, 0, bill.output)

    async def killed(daemon: DaemonProcess) -> int:
        """What was charged in the last LOST_S before the kill, and after it."""
        wanted = cloud.bill().requests + chance.randrange(21, 50)
        running = asyncio.create_task(load(daemon.url, chance, until_refused=False))
        while (await asyncio.to_thread(cloud.bill)).requests < wanted:
            assert not running.done(), "the cap is spent, or the daemon has ended, before the kill"
            await asyncio.sleep(0.01)
        stored = await asyncio.to_thread(charged)
        await asyncio.sleep(LOST_S)
        daemon.process.kill()
        await running
        return await asyncio.to_thread(charged) - stored

    for _ in range(kills):
        daemon = begin()
        unstored += asyncio.run(killed(daemon))
        daemon.process.wait()
        daemon.nothing_left()
    daemon = begin()
    asyncio.run(load(daemon.url, chance, until_refused=True))
    spent_up = "overflow endpoint cloud: its max_per_day is spent"
    eventually(lambda: any(spent_up in event["message"] for event in daemon.get("/events")["events"]))
    assert spent_up in daemon.cli("events").stdout
    bill, total = cloud.bill(), charged()
    assert bill.requests > 20 * kills
    assert unstored < total <= cap * PICOS + unstored
    spent = (
        daemon.metrics()
        .partition('numa_launcher_overflow_spent_today{endpoint="cloud"} ')[2]
        .partition("\n")[0]
    )
    print(
        f"{kills} kills: {bill.requests} requests, charged {total / PICOS:.6f}, counted {spent}, cap {cap:g}"
    )
    assert (total - unstored) / PICOS <= float(spent) <= cap
    usage_shows_it(daemon, float(spent))


def usage_shows_it(daemon: DaemonProcess, spent: float) -> None:
    """Its sum is no more than what was spent."""
    report = json.loads(daemon.cli("usage", "--by", "overflow", "--since", "yesterday", "--json").stdout)
    (row,) = (row for row in report["rows"] if row["name"] == "cloud")
    assert row["requests"] == row["overflowed"] == report["total"]["overflowed"] > 0
    assert 0 < float(row["overflow_cost"]) <= spent + 1e-9
    assert " cloud (full)" in daemon.cli("usage", "--requests", "--limit", "10000").stdout
