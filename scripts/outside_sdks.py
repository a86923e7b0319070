"""Uses the endpoint with one library of others, which this Python has: `outside_sdks.py NAME URL MODEL KEY`.

scripts/outside_clients.py runs it in the library's own environment. It prints {"sent": n, "errors": [...]}: each request is
sent once, and an answer without text or without its end is an error. Each library is imported where it is used: this
Python has one of them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

QUESTION = "Which core are you on?"
ANSWER_TOKENS = 16
EACH = 16
TOOL = {
    "type": "function",
    "function": {
        "name": "where",
        "description": "a core",
        "parameters": {"type": "object", "properties": {}},
    },
}


class Tally:
    """Requests sent, and the errors of those that failed."""

    def __init__(self) -> None:
        self.sent = 0
        self.errors: list[str] = []

    def call(self, request: Callable[[], bool], count: int = 1) -> None:
        """`request` sends `count` requests and returns whether all answers were whole."""
        self.sent += count
        try:
            whole = request()
        except Exception as error:  # the libraries have types of their own
            self.errors += [f"{type(error).__name__}: {error}"[:200]] * count
        else:
            self.errors += [] if whole else ["an answer is not whole"] * count

    async def acall(self, request: Callable[[], Awaitable[bool]]) -> None:
        """The same for one request in a loop."""
        self.sent += 1
        try:
            whole = await request()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}"[:200])
        else:
            self.errors += [] if whole else ["an answer is not whole"]


def litellm(url: str, model: str, key: str) -> Tally:
    """Chats and streams, sync and async."""
    library: Any = importlib.import_module("litellm")
    tally = Tally()
    options = {
        "model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": key, "max_tokens": ANSWER_TOKENS, "max_retries": 0,
        "messages": [{"role": "user", "content": QUESTION}], "temperature": 0,
    }  # fmt: skip

    def is_whole(answer: Any) -> bool:
        return bool(answer.choices[0].message.content and answer.choices[0].finish_reason)

    def is_end(chunks: list[Any]) -> bool:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        return bool(text) and any(chunk.choices[0].finish_reason for chunk in chunks if chunk.choices)

    async def whole() -> bool:
        return is_whole(await library.acompletion(**options))

    async def streamed() -> bool:
        return is_end([chunk async for chunk in await library.acompletion(**options, stream=True)])

    async def at_once() -> None:
        await asyncio.gather(*(tally.acall(one) for _ in range(EACH) for one in (whole, streamed)))

    for _ in range(EACH):
        tally.call(lambda: is_whole(library.completion(**options)))
        tally.call(lambda: is_end(list(library.completion(**options, stream=True))))
    asyncio.run(at_once())
    return tally


def langchain_openai(url: str, model: str, key: str) -> Tally:
    """Chats, streams, a batch, a tool, responses and their streams."""
    make: Any = importlib.import_module("langchain_openai").ChatOpenAI
    tally = Tally()
    options = {
        "model": model, "base_url": f"{url}/v1", "api_key": key, "max_tokens": ANSWER_TOKENS, "max_retries": 0,
        "temperature": 0,
    }  # fmt: skip
    chat = make(**options)
    responses = make(**options, use_responses_api=True, output_version="responses/v1")
    for api, count in ((chat, 4), (responses, 2)):
        for _ in range(count):
            tally.call(lambda api=api: bool(api.invoke(QUESTION).text))
            tally.call(lambda api=api: bool("".join(chunk.text for chunk in api.stream(QUESTION))))
    tally.call(lambda: all(answer.text for answer in chat.batch([QUESTION] * 8)), 8)
    tally.call(lambda: bool(chat.bind_tools([TOOL]).invoke(QUESTION).response_metadata["finish_reason"]))
    return tally


LIBRARIES = {"litellm": litellm, "langchain-openai": langchain_openai}


if __name__ == "__main__":
    tally = LIBRARIES[sys.argv[1]](*sys.argv[2:5])
    print(json.dumps({"sent": tally.sent, "errors": tally.errors}))
