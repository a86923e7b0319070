"""Streams that are cut and continued, and what their clients read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

from support.plain_engine import CHAT, PlainEngine
from support.scripted_engine import DONE, ENGINE_ERROR, Call, Script


def whole(events: list[bytes]) -> dict[str, Any]:
    """What a client makes of a stream; fails when it is none."""
    chunks: list[Any] = []
    for raw in b"".join(events).split(b"\n\n")[:-1]:
        assert not chunks or chunks[-1] is not None, "something after [DONE]"
        assert raw.startswith(b"data: "), raw
        chunks.append(None if raw == b"data: [DONE]" else json.loads(raw[6:]))
    assert chunks.pop() is None
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ends = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert len(ends) == 1
    assert choices[-1]["finish_reason"]
    return {
        "roles": [choice["delta"]["role"] for choice in choices if "role" in choice.get("delta", {})],
        "text": "".join(
            choice.get("text", choice.get("delta", {}).get("content")) or "" for choice in choices
        ),
        "end": ends[0],
        "usage": usages,
        "id": chunks[0]["id"],
    }


def reads(events: list[bytes], marks: list[int]) -> list[bytes]:
    """Whole events, some of them together in one read."""
    edges = sorted({0, len(events), *(mark % (len(events) + 1) for mark in marks)})
    return [b"".join(events[a:b]) for a, b in pairwise(edges)]


WORDS = [f" word{number}" for number in range(12)]


def chunk_of(call_id: str, delta: dict[str, object], finish: object = None) -> bytes:
    payload = {
        "id": call_id, "object": "chat.completion.chunk", "created": 7, "model": "m",
        "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}],
    }  # fmt: skip
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def speaks(
    cut_after: int | None, how: str = "cut", *, life: list[Call] | None = None, unfinished: object = None
) -> Script:
    """Says WORDS, or what is left of them after the assistant's text in the request; cut on its first request.

    `unfinished`: the finish_reason of every event but the last."""
    cuts = [cut_after]

    async def script(call: Call) -> None:
        if life is not None:
            life.append(call)
        body = json.loads(call.body)
        said = body["messages"][-1]["content"] if body.get("continue_final_message") else ""
        rest = list(WORDS)
        while said and rest:
            said = said[len(rest.pop(0)) :]
        limit = cuts.pop() if cuts else None
        await call.start_stream()
        await call.chunk(
            chunk_of(
                f"chatcmpl-{call.header('X-Request-Id')}", {"role": "assistant", "content": ""}, unfinished
            )
        )
        for number, word in enumerate(rest):
            if number == limit:
                await asyncio.sleep(0.02)
                if how == "error":
                    await call.chunk(ENGINE_ERROR)
                    await call.chunk(DONE)
                    await call.end_stream()
                elif how == "half":
                    await call.raw(b"c8\r\n" + chunk_of("x", {"content": word})[:40])
                    await asyncio.sleep(0.02)
                    call.cut()
                elif how == "clean end":
                    await call.end_stream()
                else:
                    call.cut()
                return
            call_id = "chatcmpl-x" if limit is None else "chatcmpl-y"
            await call.chunk(chunk_of(call_id, {"content": word}, unfinished))
        await call.chunk(chunk_of("chatcmpl-x", {}, "stop"))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {
                "prompt_tokens": 5 + 12 - len(rest),
                "completion_tokens": len(rest) + 1,
                "total_tokens": 18,
            }
            data = {"id": "chatcmpl-x", "object": "chat.completion.chunk", "created": 7, "model": "m"}
            data |= {"choices": [], "usage": usage}
            await call.chunk(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")
        await call.chunk(DONE)
        await call.end_stream()

    return script


SAID = ("Hello", " wor", "ld", " and", " all", " the", " rest", " of", " it", "!", " Yes", ".")
ENGINE = PlainEngine(CHAT, SAID)


Way = Callable[[Call], Awaitable[None]]


def streams(engine: PlainEngine, events: int | None = None) -> Way:
    """Answer; with `events` the connection ends after so many."""

    async def answer(call: Call) -> None:
        await call.start_stream()
        for event in engine.answer(call.body)[:events]:
            await call.chunk(event)
        if events is None:
            await call.end_stream()
        else:
            call.cut()

    return answer
