"""A running proxy with scripted engines, and what tests ask of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp.client import _RequestContextManager
from support.fakes import SOON_S
from support.scripted_engine import FakeEngine, Script, answer_chat, answer_metrics, not_found

from launcher.accounts.ended_request import EndedRequest
from launcher.proxy.server import ProxyServer


@dataclass
class ProxyUnderTest:
    """A proxy with engines, as the daemon would have built it."""

    folder: Path
    stack: AsyncExitStack
    server: ProxyServer
    client: aiohttp.ClientSession
    idle: list[tuple[int, int]]
    suspects: list[tuple[int, int, str]]
    entries: list[EndedRequest]

    async def engine(
        self,
        slot: int,
        script: Script = answer_chat,
        *,
        generation: int = 1,
        model: str = "m",
        tokenizer: Script | None = None,
        metrics: Script | None = None,
        token_ids: bool = False,
        sampling_defaults: Mapping[str, float] | None = None,
    ) -> FakeEngine:
        """An engine that listens and is ready; its template is asked for where there is a `tokenizer`. It has counters if
        `metrics` tells them, or `script` is `answer_chat`."""
        metrics = metrics or (answer_metrics if script is answer_chat else not_found)
        engine = FakeEngine(
            self.folder / f"{slot}.{generation}.sock", script, tokenizer or not_found, metrics
        )
        await self.stack.enter_async_context(engine)
        ask = tokenizer is not None
        self.server.add_upstream(
            slot, generation, model, engine.address, 8,
            ask_template=ask, token_ids=token_ids, sampling_defaults=sampling_defaults,
        )  # fmt: skip
        return engine

    def chat(self, *, stream: bool = False, model: str = "m", **more: object) -> _RequestContextManager:
        body = {"model": model, "messages": [], "stream": stream, **more}
        return self.client.post("/v1/chat/completions", data=json.dumps(body))

    async def raw(self, request: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of its own, with this already sent."""
        host, port = self.server.endpoint.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        self.stack.callback(writer.close)
        writer.write(request)
        return reader, writer

    def sums(self) -> dict[str, int]:
        names = ("accepted", "completed", "refused", "client_aborted", "rejected", "failed", "in_flight")
        stats = self.server.readings.stats()
        return {name: int(str(stats[name])) for name in names}

    def balanced(self) -> bool:
        sums = self.sums()
        return sums.pop("accepted") == sum(sums.values())


Build = Callable[..., Awaitable[ProxyUnderTest]]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another task will do."""
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 - nothing to await in what is watched
            await asyncio.sleep(0.002)
