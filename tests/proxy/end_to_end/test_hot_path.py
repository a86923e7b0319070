"""Ordinary events go from the instance's connection to the client's without being decoded."""

from __future__ import annotations

import asyncio

import pytest
from proxy.end_to_end.test_continuation import chunk_of
from proxy.proxy_under_test import ProxyUnderTest
from proxy.scripted_engine import DONE, Call

from launcher.proxy.dispatch.relay import Relay


async def test_ordinary_events_take_it(proxy: ProxyUnderTest, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    leave = Relay._leave

    def note(self: Relay, broken: str | None, answered: int | None = None) -> None:
        if self.attempt is not None:
            taken.append(self.attempt.taken[0])
        leave(self, broken, answered)

    monkeypatch.setattr(Relay, "_leave", note)
    sent = [chunk_of("a", {"content": f" w{number}"}) for number in range(60)]

    async def script(call: Call) -> None:
        await call.start_stream()
        await call.chunk(chunk_of("a", {"role": "assistant", "content": ""}))
        for data in sent:
            await asyncio.sleep(0.002)  # a packet of its own, as an engine's token is
            await call.chunk(data)
        await call.chunk(chunk_of("a", {}, "stop"))
        await call.chunk(DONE)
        await call.end_stream()

    await proxy.engine(0, script)
    async with proxy.chat(stream=True) as answer:
        body = await answer.read()
    assert b"".join(sent) in body
    assert taken[0] >= 30  # all but the first, and those that a busy machine joins
