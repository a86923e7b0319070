"""Usual events take the fast path from the instance's connection to the client's: at least 95 % of a stream's."""

from __future__ import annotations

import asyncio
import gc
import re
from typing import Any

import pytest
from support.continuations import chunk_of
from support.plain_engine import CHAT, COMPLETIONS, QUESTION
from support.proxy_under_test import ProxyUnderTest
from support.scripted_engine import DONE, Call
from support.token_engine import TokenEngine

from launcher.proxy.sse.fast_path import FastPath

EVENTS = 100
IDS = re.compile(rb'(token_ids":)\[[^]]*\]')
WORDS = tuple(f" w{number}" for number in range(EVENTS))
Asked = dict[str, Any]


def chat(*deltas: Asked) -> list[bytes]:
    return [*(chunk_of("a", delta) for delta in deltas), chunk_of("a", {}, "stop"), DONE]


def named(kind: str, number: int, **more: Any) -> bytes:
    data = str({"type": kind, "sequence_number": number, **more}).replace("'", '"')
    return f"event: {kind}\ndata: {data}\n\n".encode()


ROLE = {"role": "assistant", "content": ""}
ASKED: Asked = {"model": "m", "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
RESPONSE = [
    named("response.created", 0, response={"id": "resp_1"}),
    *(named("response.output_text.delta", n, delta=word) for n, word in enumerate(WORDS, 1)),
    named("response.completed", EVENTS + 1, response={"id": "resp_1", "usage": {"total_tokens": 3}}),
]
MESSAGE = [
    named("message_start", 0, message={"usage": {"input_tokens": 3}}),
    *(named("content_block_delta", n, delta={"text": word}) for n, word in enumerate(WORDS, 1)),
    named("message_delta", EVENTS + 1, delta={"stop_reason": "end_turn"}),
    named("message_stop", EVENTS + 2),
]
STREAMS: dict[str, tuple[str, Asked, list[bytes]]] = {
    "chat": (CHAT, ASKED, chat(ROLE, *({"content": word} for word in WORDS))),
    "text with quotation marks": (CHAT, ASKED, chat(ROLE, *({"content": f'"{word}"'} for word in WORDS))),
    "tool calls": (
        CHAT,
        ASKED | TOOLS,
        chat(ROLE, *({"tool_calls": [{"index": 0, "function": {"arguments": word}}]} for word in WORDS)),
    ),
    "reasoning": (CHAT, ASKED, chat(ROLE, *({"reasoning": word} for word in WORDS))),
    "responses": ("/v1/responses", {"model": "m", "stream": True, "input": QUESTION}, RESPONSE),
    "messages": ("/v1/messages", ASKED | {"max_tokens": 200}, MESSAGE),
}


def with_ids(path: str) -> list[bytes]:
    engine = TokenEngine(path, WORDS)
    return engine.answer(engine.request(return_token_ids=True, max_tokens=2 * EVENTS))


PROMPTED = {"model": "m", "stream": True, "prompt": QUESTION, "max_tokens": 2 * EVENTS}
STREAMS |= {
    "chat with token ids": (CHAT, ASKED, with_ids(CHAT)),
    "completions": (COMPLETIONS, PROMPTED, [IDS.sub(rb"\1null", told) for told in with_ids(COMPLETIONS)]),
    "completions with token ids": (COMPLETIONS, PROMPTED, with_ids(COMPLETIONS)),
    "reasoning with token ids": (
        CHAT,
        ASKED,
        [told.replace(b'"content":" ', b'"reasoning":" ') for told in with_ids(CHAT)],
    ),
}


@pytest.mark.parametrize("kind", STREAMS)
async def test_usual_events_take_it(proxy: ProxyUnderTest, kind: str) -> None:
    path, asked, events = STREAMS[kind]
    counts: list[int] = []

    async def script(call: Call) -> None:
        await call.start_stream()
        for told in events[:-1]:
            await asyncio.sleep(0.001)  # a packet of its own, as an engine's token is
            await call.chunk(told)
        await asyncio.sleep(0.05)
        counts.append(
            max(each.events for each in gc.get_objects() if isinstance(each, FastPath))
        )  # not frozen ones
        await call.chunk(events[-1])
        await call.end_stream()

    await proxy.engine(0, script, token_ids="with token ids" in kind)
    gc.freeze()
    async with proxy.client.post(path, json=asked) as answer:
        body = await answer.read()
    assert body == IDS.sub(rb"\1null", b"".join(events))
    assert counts[0] >= 0.95 * EVENTS
