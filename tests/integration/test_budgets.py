"""A budget of a proxy that is killed under load: what clients get never exceeds it by more than the requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from zoneinfo import ZoneInfo

import aiohttp
import pytest
from support.daemon_process import FAKE_ENGINE, eventually
from support.keys import new_key

from launcher.accounts.budgets import Budgets, Rules
from launcher.accounts.ledger_file import LedgerFile, open_reader
from launcher.accounts.report_values import hour_begin
from launcher.accounts.spent_before import read_past
from launcher.accounts.spent_sums import SpentSums
from launcher.base.clock import Clock

PROXY = Path(__file__).parents[1] / "support" / "budget_proxy.py"
WORKERS = 8
MOST_OUTPUT = 40
# The fake engine's prompt tokens are the length of the messages' JSON.
MESSAGES = [{"role": "user", "content": "how are you?"}]
PROMPT = len(json.dumps(MESSAGES))
WORTH = PROMPT + MOST_OUTPUT
TOKENS_PER_KILL = 10_000
# A commit comes every 0.1 s, and takes milliseconds; other jobs may use the cpus.
LOST_S = 2.0
UTC = ZoneInfo("UTC")


@dataclass
class Received:
    """Tokens that clients got."""

    whole: int = 0  # of requests that were answered to their end
    recent: list[tuple[float, int]] = field(default_factory=list)
    """When each of those ended, and its tokens."""
    cut: int = 0  # of streams that a kill cut, their prompts included
    under_way: dict[int, int] = field(default_factory=dict)
    """By number: requests that a client waits for, and what they take at most."""
    refused: int = 0


@dataclass
class Kill:
    process: subprocess.Popen[str]
    after_s: float


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Path]:
    socket = tmp_path / "engine.sock"
    with subprocess.Popen(
        [sys.executable, str(FAKE_ENGINE), "--uds", str(socket), "--model", "fake", "--token-s", "0.01"],
        stderr=subprocess.DEVNULL,  # of clients that left
    ) as process:
        try:
            eventually(socket.exists)
            yield socket
        finally:
            process.kill()


@contextlib.contextmanager
def proxy(tmp_path: Path, engine: Path, keys: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, str(PROXY), str(tmp_path), str(engine), str(keys)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def client(url: str, key: str, received: Received, chance: random.Random, *, until_spent: bool) -> None:
    """Requests one after another, until the proxy dies or the budget is spent."""
    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as session:
        while True:
            number, tokens, stream = (
                chance.getrandbits(60),
                chance.randrange(1, MOST_OUTPUT),
                chance.random() < 0.5,
            )
            body = {"model": "fake", "messages": MESSAGES, "max_tokens": tokens, "stream": stream}
            received.under_way[number] = PROMPT + tokens
            text = b""
            try:
                async with session.post("/v1/chat/completions", data=json.dumps(body)) as answer:
                    async for data in answer.content.iter_any():
                        text += data
            except aiohttp.ClientError:
                if b"content" in text:
                    received.cut += PROMPT + text.count(b'"content"')
                return
            if answer.status == 200:
                took = received.under_way.pop(number)
                received.whole += took
                received.recent.append((time.monotonic(), took))
            else:
                assert answer.status == 429, text
                del received.under_way[number]
                if json.loads(text)["error"]["code"] == "insufficient_quota":
                    received.refused += 1
                    if until_spent:
                        return
                await asyncio.sleep(0.02)


async def load(url: str, key: str, received: Received, chance: random.Random, *, kill: Kill | None) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(WORKERS):
            group.create_task(client(url, key, received, chance, until_spent=kill is None))
        if kill is not None:
            await asyncio.sleep(kill.after_s)
            kill.process.kill()
            received.recent = [each for each in received.recent if each[0] > time.monotonic() - LOST_S]


def spent(tmp_path: Path, budget: str) -> int:
    """What the next daemon would count."""
    sums, path, hour_of = SpentSums(), tmp_path / "usage.db", partial(hour_begin, zone=UTC)
    LedgerFile(path, "UTC", hour_of, time.time(), [sums]).close()
    budgets = Budgets(Rules(), UTC, Clock(), sums.slot)
    budgets.follow({"ann": budget})
    budgets.learn(read_past(path, UTC, time.time()))
    [state] = budgets.states()
    assert isinstance(state.spent, int)
    return state.spent


def stored(tmp_path: Path) -> int:
    """The budget's sum in the file, also while a proxy writes it."""
    with contextlib.closing(open_reader(tmp_path / "usage.db")) as reader:
        [amount] = reader.execute("SELECT amount FROM spent WHERE kind = 'key' AND name = 'ann'").fetchone()
    return int(amount)


@pytest.mark.parametrize(
    "kills", [2, pytest.param(10, marks=pytest.mark.long), pytest.param(50, marks=pytest.mark.release)]
)
def test_sigkill_at_random_moments(tmp_path: Path, engine: Path, kills: int) -> None:
    chance = random.Random(kills)  # noqa: S311
    limit = kills * TOKENS_PER_KILL
    budget = f"{limit}-tokens/month"
    keys = tmp_path / "keys"
    key = new_key(keys, "ann", budget=budget)
    received = Received()
    in_flight = lost = 0
    for _ in range(kills):
        with proxy(tmp_path, engine, keys) as (process, url):
            kill = Kill(process, LOST_S + chance.uniform(0.02, 0.4))
            asyncio.run(load(url, key, received, chance, kill=kill))
        lost += sum(took for _, took in received.recent)
        received.recent.clear()
        in_flight += sum(received.under_way.values())
        received.under_way.clear()
        assert received.whole - lost <= spent(tmp_path, budget) <= received.whole + in_flight
    at_kills = received.whole
    with proxy(tmp_path, engine, keys) as (_, url):
        asyncio.run(load(url, key, received, chance, kill=None))
        eventually(lambda: stored(tmp_path) >= limit, what="the last requests are in the ledger")
    assert received.refused >= WORKERS
    counted = spent(tmp_path, budget)
    print(
        f"{kills} kills: budget {limit}, counted {counted}, clients got {received.whole} in whole responses "
        f"({at_kills} before the last kill) and {received.cut} in cut ones, {in_flight} in flight at the kills"
    )
    assert limit <= counted < limit + WORTH
    assert lost < received.whole + received.cut < limit + WORTH + in_flight + lost
