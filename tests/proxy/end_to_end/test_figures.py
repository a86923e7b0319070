"""Each behaviour of an engine and a client, through the proxy: usage, cost, /metrics, `status` and history are what an
independent client saw in the same run, and none of them looks better for it.

A measured time lies between what the engine waited and what the client measured: on a busy machine, too."""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.plain_engine import CHAT
from support.proxy_under_test import Build, ProxyUnderTest, until
from support.scripted_engine import DONE, Call, Script

from launcher.accounts.ledger_file import LedgerFile
from launcher.accounts.report_values import UsageRow
from launcher.accounts.usage_report import Question, report
from launcher.base.money import PICOS, token_prices

RESPONSES = "/v1/responses"
WORDS = 8
FIRST_S, SLOW_S = 0.05, 0.2
TICK_S = 0.002  # uvloop tells whole milliseconds
PROMPT = "word " * 1000
PRICES = token_prices("1", "2", "0.1")


def event(content: dict[str, Any], name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(content)}\n\n".encode()


def choice(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return event(
        {"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    )


def usage(output: int, cached: int = 0) -> bytes:
    said = {
        "prompt_tokens": 1024,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return event({"id": "c", "model": "m", "choices": [], "usage": said})


ROLE = choice({"role": "assistant", "content": ""})


def words(count: int, size: int = 1) -> list[bytes]:
    texts = [f" w{number}" for number in range(count)]
    return [choice({"content": "".join(texts[at : at + size])}) for at in range(0, count, size)]


def whole(count: int, size: int = 1, cached: int = 0) -> list[bytes]:
    return [*words(count, size), choice({}, "length"), usage(count, cached), DONE]


ERROR = event({"error": {"message": "the engine died", "type": "InternalServerError", "code": 500}})
RESPONSE_USAGE = {"input_tokens": 1024, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 1}
CREATED = event({"type": "response.created", "response": {"id": "r", "output": []}}, "response.created")
RESPONSE = [
    event({"type": "response.output_text.delta", "delta": "one"}, "response.output_text.delta"),
    event(
        {"type": "response.completed", "response": {"id": "r", "usage": RESPONSE_USAGE}}, "response.completed"
    ),
]


@dataclass(frozen=True)
class Behaviour:
    outcome: str
    events: list[bytes] = field(default_factory=list)
    """After the first token's time."""
    early: list[bytes] = field(default_factory=list)
    """At once."""
    wait_s: float = FIRST_S
    ends: str = "well"
    output: int = 0
    cached: int = 0
    path: str = CHAT
    leaves: bool = False

    @property
    def streams(self) -> bool:
        """It brings output."""
        return bool(self.events)

    def script(self) -> Script:
        async def answer(call: Call) -> None:
            if call.target == "/metrics":
                await call.json({}, 404)
            elif self.outcome == "refused":
                await call.json({"error": {"message": "no", "code": 400}}, 400)
            else:
                await self._stream(call)

        return answer

    async def _stream(self, call: Call) -> None:
        await call.start_stream()
        for each in self.early:
            await call.chunk(each)
        await asyncio.sleep(self.wait_s)
        for each in self.events:
            await call.chunk(each)
        if self.leaves:
            await call.until_left()
        elif self.ends == "reset":
            call.cut()
        else:
            await call.end_stream()


BEHAVIOURS = {
    "healthy": Behaviour("completed", [ROLE, *whole(WORDS)], output=WORDS),
    "error event": Behaviour("failed", [ROLE, *words(5), ERROR, DONE]),
    "clean break": Behaviour("failed", [ROLE, *words(5)]),
    "reset": Behaviour("failed", [ROLE, *words(5)], ends="reset"),
    "short": Behaviour("completed", [ROLE, *whole(2)], output=2),
    "long": Behaviour("completed", [ROLE, *whole(2 * WORDS)], output=2 * WORDS),
    "refused": Behaviour("refused"),
    "slow first event": Behaviour("completed", [ROLE, *whole(WORDS)], wait_s=SLOW_S, output=WORDS),
    "role early": Behaviour("completed", whole(WORDS), [ROLE], SLOW_S, output=WORDS),
    "response.created early": Behaviour("completed", RESPONSE, [CREATED], SLOW_S, output=1, path=RESPONSES),
    "several tokens an event": Behaviour("completed", [ROLE, *whole(WORDS, 4)], output=WORDS),
    "aborted by the client": Behaviour("client_aborted", [ROLE, *words(5)], output=5, leaves=True),
    "cached": Behaviour("completed", [ROLE, *whole(WORDS, cached=896)], output=WORDS, cached=896),
}


@dataclass(frozen=True)
class Seen:
    """By the client, in seconds since it began to send."""

    first: float | None
    """Text."""
    end: float


async def ask(proxy: ProxyUnderTest, behaviour: Behaviour) -> Seen:
    body: dict[str, Any] = {"model": "m", "stream": True}
    body |= (
        {"messages": [{"role": "user", "content": PROMPT}]} if behaviour.path == CHAT else {"input": PROMPT}
    )
    began = time.monotonic()
    first = None
    async with proxy.client.post(behaviour.path, data=json.dumps(body)) as response:
        async for line in response.content:
            if first is None and (b" w0" in line or b'"delta": "one"' in line):
                first = time.monotonic() - began
            if behaviour.leaves and b" w4" in line:
                response.close()
                break
    return Seen(first, time.monotonic() - began)


def usage_of(proxy: ProxyUnderTest, path: Path) -> UsageRow:
    """What `usage` says of the entries of this run."""
    with closing(LedgerFile(path, "UTC", lambda at: int(at // 3600 * 3600), time.time())) as file:
        file.write(proxy.entries, {})
    return report(path, Question(since="2d"), time.time(), "USD").total


def metric(page: str, name: str, **labels: str) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = re.findall(rf"^{name}(?:{{(.*?)}})? ([\d.e+-]+)$", page, re.MULTILINE)
    return sum(float(value) for given, value in found if all(each in given for each in wanted))


async def play(build: Build, behaviour: Behaviour) -> tuple[ProxyUnderTest, Seen]:
    proxy = await build()
    await proxy.engine(0, behaviour.script())
    seen = await ask(proxy, behaviour)
    await until(lambda: len(proxy.entries) == 1)
    return proxy, seen


@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_figures_are_those_of_an_independent_client(build: Build, tmp_path: Path, name: str) -> None:
    behaviour = BEHAVIOURS[name]
    proxy, seen = await play(build, behaviour)
    (entry,) = proxy.entries
    assert entry.outcome == behaviour.outcome
    latency = behaviour.outcome in {"completed", "client_aborted"}
    if behaviour.streams:
        assert entry.first_byte_s is not None
        assert seen.first is not None
        assert behaviour.wait_s - TICK_S <= entry.first_byte_s <= seen.first + TICK_S, "its first text"
    if behaviour.outcome == "completed":
        assert (entry.prompt_tokens, entry.cached_tokens, entry.output_tokens) == (
            1024,
            behaviour.cached,
            behaviour.output,
        )
        assert entry.exact
        assert behaviour.wait_s - TICK_S <= entry.duration_s
    if behaviour.outcome == "client_aborted":
        assert (entry.output_tokens, entry.exact) == (behaviour.output, False)

    row = usage_of(proxy, tmp_path / "usage.db")
    told = {
        each: getattr(row, each) for each in ("completed", "refused", "client_aborted", "rejected", "failed")
    }
    assert told == {each: int(each == behaviour.outcome) for each in told}
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (
        entry.prompt_tokens, entry.cached_tokens, entry.output_tokens,
    )  # fmt: skip
    assert (row.first_byte_p50_s is not None) is latency
    assert (row.duration_p50_s is not None) is (behaviour.outcome == "completed")
    if row.first_byte_p50_s is not None:  # within 5 %, rounded to three digits
        assert 0.94 * behaviour.wait_s - TICK_S <= row.first_byte_p50_s <= 1.06 * (seen.first or 0.0) + TICK_S
    cost = PRICES.amount(row.prompt_tokens, row.cached_tokens, row.output_tokens) / PICOS
    if behaviour.outcome == "completed":
        uncached = 1024 - behaviour.cached
        assert cost == pytest.approx((uncached + 0.1 * behaviour.cached + 2 * behaviour.output) / 1e6)
    if behaviour.outcome == "refused":
        assert cost == 0

    page = await proxy.server.metrics_page()
    assert metric(page, "numa_launcher_requests_ended_total", outcome=behaviour.outcome) == 1
    assert metric(page, "numa_launcher_requests_ended_total") == 1
    assert metric(page, "numa_launcher_output_tokens_total") == row.output_tokens
    assert metric(page, "numa_launcher_cached_prompt_tokens_total") == row.cached_tokens
    assert metric(page, "numa_launcher_first_byte_seconds_count") == int(latency)
    assert metric(page, "numa_launcher_request_duration_seconds_count") == int(
        behaviour.outcome == "completed"
    )
    assert metric(page, "numa_launcher_first_token_seconds_count") == int(behaviour.streams)
    firsts = proxy.server.readings.totals(0.0).first_tokens  # of history, and of `status`
    assert list(firsts) == ([pytest.approx(entry.first_byte_s)] if behaviour.streams else [])


async def test_errors_do_not_make_an_engine_faster(build: Build, tmp_path: Path) -> None:
    """Twelve that are refused at once beside one that is served: the latencies are those of the one."""
    proxy = await build()
    served, refused = BEHAVIOURS["slow first event"], BEHAVIOURS["refused"]
    left = [served.script(), *[refused.script()] * 12]

    async def answer(call: Call) -> None:
        await (refused.script() if call.target == "/metrics" else left.pop(0))(call)

    await proxy.engine(0, answer)
    first = await ask(proxy, served)
    for _ in range(12):
        await ask(proxy, refused)
    await until(lambda: len(proxy.entries) == 13)
    row = usage_of(proxy, tmp_path / "usage.db")
    assert (row.requests, row.completed, row.refused) == (13, 1, 12)
    assert row.first_byte_p50_s is not None
    assert 0.94 * SLOW_S - TICK_S <= row.first_byte_p50_s <= 1.06 * (first.first or 0.0) + TICK_S
    page = await proxy.server.metrics_page()
    assert metric(page, "numa_launcher_first_byte_seconds_count") == 1
    assert metric(page, "numa_launcher_first_byte_seconds_sum") >= SLOW_S - TICK_S
