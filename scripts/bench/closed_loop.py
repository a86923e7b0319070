"""A closed loop of streamed completions against one URL: so many clients, tokens per second, and latencies of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from bench.points import quantile
from bench.processes import FailedError

RAMP: Final = 0.25  # of a cell's time, in which first requests of random length spread the clients
FIRST_TOKEN_S: Final = 30.0  # how long first tokens of requests that were sent are waited for


@dataclass(frozen=True, slots=True)
class Served:
    """A model behind a URL; `vocabulary` bounds the tokens of prompts."""

    url: str
    model: str
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Load:
    """Closed loop: `clients` requests in flight. Each is a turn of a conversation of its client: the tokens that all
    conversations begin with, the turns before it, and a question; lengths are in tokens."""

    clients: int
    seconds: float
    question: int
    output: int
    turns: int = 1
    system: int = 0
    """Shared by all conversations; 0: no prompt has anything in common with another."""
    answer: int = 0
    """Stands for each answer in the turns after it."""


@dataclass(slots=True)
class Cell:
    """The result of one load on one server."""

    server: str
    round: int
    clients: int
    seconds: float = 0.0
    """The part that is counted: all clients had a request in flight."""
    tokens: int = 0
    """Generated in it, as the engine counts them."""
    ttft_s: list[float] = field(default_factory=list)
    """From a request's write to its first token."""
    gap_s: list[float] = field(default_factory=list)
    """Between events of a stream, in the part that is counted."""
    completed: int = 0
    failures: list[str] = field(default_factory=list)
    busy: float = 0.0
    """Share of all cpus that ran something."""
    client_busy: float = 0.0
    """CPU time of this process over time: from 0.8 on the client is the limit."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def figures(self) -> dict[str, Any]:
        """For a file: without single latencies."""
        values = asdict(self)
        for name in ("ttft_s", "gap_s"):
            times = values.pop(name)
            for q in (50, 99):
                values[f"{name.removesuffix('_s')}_p{q}_s"] = quantile(times, q / 100) if times else None
        return values | {"tokens_per_s": self.tokens_per_s, "failed": len(self.failures)}


def cpu_times() -> tuple[float, float]:
    """(busy, all) cpu time of the machine since boot."""
    try:
        values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    return float(sum(values) - values[3] - values[4]), float(sum(values))


@dataclass(slots=True)
class Stream:
    """One request under way."""

    output: int
    sent: float
    last: float
    seen: int = 0
    """Tokens so far."""
    ended: bool = False
    first: asyncio.Event = field(default_factory=asyncio.Event)
    """Its first token is there, or never comes."""


class ClosedLoop:
    """Fills a cell. A client sends its next request when the last one has ended; when the time is over, first tokens
    of those in flight are waited for, and the rest is given up."""

    def __init__(self, session: aiohttp.ClientSession, served: Served, cell: Cell, load: Load) -> None:
        self._session, self._served, self._cell, self._load = session, served, cell, load
        self._chance = random.Random()  # noqa: S311  each run asks what no prefix cache has
        self._system = self._tokens(load.system)
        self._streams: list[Stream] = []
        self._from_s = self._until_s = 0.0

    async def run(self) -> None:
        """All of it."""
        cell, load = self._cell, self._load
        began = time.perf_counter()
        self._from_s, self._until_s = began + RAMP * load.seconds, began + load.seconds
        cell.seconds = self._until_s - self._from_s
        (busy, total), own = cpu_times(), time.process_time()
        clients = [asyncio.create_task(self._client(), name="client") for _ in range(load.clients)]
        await asyncio.sleep(load.seconds)
        busy_then, total_then = cpu_times()
        cell.busy = (busy_then - busy) / max(1.0, total_then - total)
        cell.client_busy = (time.process_time() - own) / load.seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_TOKEN_S):
                await asyncio.gather(*(stream.first.wait() for stream in self._streams))
        for task in clients:
            task.cancel()
        await asyncio.wait(clients)

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(8, self._served.vocabulary) for _ in range(count)]

    def _prompts(self) -> Iterator[list[int]]:
        """One client's conversations, turn by turn."""
        while True:
            history = [*self._system]
            for _ in range(self._load.turns):
                history += self._tokens(self._load.question)
                yield [*history]
                history += self._tokens(self._load.answer)

    async def _client(self) -> None:
        output = self._chance.randint(1, self._load.output)
        for prompt in self._prompts():
            now = time.perf_counter()
            if now >= self._until_s:
                return
            stream = Stream(output, now, now)
            self._streams.append(stream)
            try:
                await self._request(stream, prompt)
                self._cell.completed += 1
            except (OSError, aiohttp.ClientError, TimeoutError, ValueError, FailedError) as error:
                self._cell.failures.append(f"{type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.1)  # a server that refuses is not asked as fast as possible
            finally:
                stream.first.set()
            output = self._load.output

    async def _request(self, stream: Stream, prompt: list[int]) -> None:
        body = {
            "model": self._served.model,
            "prompt": prompt,
            "max_tokens": stream.output,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._session.post(f"{self._served.url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise FailedError(f"status {answer.status}: {(await answer.text())[:200]}")
            async for line in answer.content:
                if line.startswith(b"data: [DONE]"):
                    stream.ended = True
                elif line.startswith(b"data: "):
                    self._take(stream, json.loads(line[6:]))
        if not stream.ended or stream.seen != stream.output:
            end = "an end" if stream.ended else "no end"
            raise FailedError(f"{stream.seen} of {stream.output} tokens and {end}")

    def _take(self, stream: Stream, event: dict[str, Any]) -> None:
        now, cell = time.perf_counter(), self._cell
        if "error" in event:
            raise FailedError(f"error event: {str(event['error'])[:200]}")
        # One token an event, and what an engine that fell behind put together with the usage that ends the stream. Some end
        # the choice with an event of its own, which is no token.
        usage, choices = event.get("usage"), event.get("choices")
        is_token = bool(choices) and bool(choices[0].get("text") or choices[0].get("finish_reason") is None)
        tokens = int(usage["completion_tokens"]) - stream.seen if usage else int(is_token)
        if tokens <= 0:
            return
        if not stream.seen:
            cell.ttft_s.append(now - stream.sent)
            stream.first.set()
        if self._from_s <= now < self._until_s:
            cell.tokens += tokens
            if stream.seen and stream.last >= self._from_s:
                cell.gap_s.append(now - stream.last)
        stream.seen, stream.last = stream.seen + tokens, now
