"""A steady load of streamed chats; each response is checked to its end."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import aiohttp


@dataclass
class Tally:
    """The outcomes of the requests."""

    completed: int = 0
    failures: list[str] = field(default_factory=list)
    honest: int = 0
    """Failures with an error event and without [DONE]."""
    text: dict[str, set[str]] = field(default_factory=dict)
    """Distinct answers per question."""


class Load:
    """`workers` clients that send one request after the other until the block ends, `pause_s` after each answer."""

    def __init__(
        self, url: str, model: str, *, workers: int = 8, max_tokens: int = 20, pause_s: float = 0.1
    ) -> None:
        self.tally = Tally()
        self._url = url
        self._model = model
        self._workers = workers
        self._max_tokens = max_tokens
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=120)
        async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as group:
            for worker in range(self._workers):
                group.create_task(self._work(session, worker))

    async def _work(self, session: aiohttp.ClientSession, worker: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            stream = (worker + turn) % 4 != 0
            question = f"question {worker % 4}"
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": self._max_tokens,
                "temperature": 0,
                "stream": stream,
            }
            try:
                async with session.post(f"{self._url}/v1/chat/completions", json=body) as response:
                    if response.status != 200:
                        self.tally.failures.append(f"{response.status} {(await response.text())[:300]}")
                        await asyncio.sleep(0.05)
                        continue
                    text = await self._stream(response) if stream else _text(await response.json())
            except (aiohttp.ClientError, TimeoutError) as error:
                self.tally.failures.append(f"{type(error).__name__}: {error}")
                continue
            if text is not None:
                self.tally.completed += 1
                self.tally.text.setdefault(question, set()).add(text.strip())
            await asyncio.sleep(self._pause_s)

    async def _stream(self, response: aiohttp.ClientResponse) -> str | None:
        """The whole text; None, and a recorded failure, if the stream did not complete."""
        text, error, done = "", None, False
        async for raw in response.content:
            line = raw.strip()
            if line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data:"):
                event: dict[str, Any] = json.loads(line[5:])
                error = event.get("error") or error
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content") or ""
        if done and error is None:
            return text
        self.tally.honest += error is not None and not done
        self.tally.failures.append(f"stream: error={error} done={done}")
        return None


def _text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])
