"""Clients of a chaos run: their requests, and how they judge each response."""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from chaos import language
from chaos.wire import Dropped, Unframed, Wire

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATIENCE_S = 90.0  # a response that takes longer counts as lost
SLOW_READ_S = 0.15
NO_REASONS = (None, "", "null")
SUBJECTS = ("rivers", "machines", "the sea", "numbers 😀", 'a "quoted" word', "old\nlines", "memory nodes")


@dataclass(slots=True)
class Result:
    """One request and its outcome, as its client saw it."""

    name: str
    kind: str  # the client's class
    streamed: bool
    plain: bool  # a stream that may be continued
    begun: float
    ended: float = 0.0
    status: int = 0
    outcome: str = ""
    """exact, aborted, told (an honest error after the first byte, or for a poisonous request), dropped (an unstreamed answer
    was cut, which its length shows), refused (429), failed (an error or nothing before the first byte); the rest is
    dishonest: wrong (it ended well with another text or usage), silent (a stream just stopped), unframed, lost."""
    detail: str = ""
    tokens: tuple[int, int] | None = None  # prompt and output, of an exact response
    arrivals: array[float] = field(default_factory=lambda: array("d"))  # of events with a choice


@dataclass(frozen=True, slots=True)
class Question:
    """One request to be made."""

    name: str
    kind: str
    path: str
    body: dict[str, Any]
    plain: bool
    leaves_after: int | None = None  # the client disconnects after this many events
    slow: bool = False


def ask(name: str, kind: str, dice: random.Random) -> Question:
    """A request of a client of this kind."""
    path = COMPLETIONS if kind == "completions" or (kind != "chat" and dice.random() < 0.3) else CHAT
    text = f"Speak of {dice.choice(SUBJECTS)} number {dice.randrange(400)}"
    body: dict[str, Any] = {"model": "whole" if kind == "whole" else "chaos", "temperature": 0, "user": name}
    body |= {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    body["max_tokens"] = dice.randint(2, 80)
    if kind == "whole":
        body["calm"] = True
    streamed = plain = kind not in {"unstreamed", "whole"}
    if streamed:
        body["stream"] = True
        if dice.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    if kind == "odd":
        body["seed"], body["temperature"] = 1, 0.7
        plain = False
    leaves = dice.randint(1, 30) if kind == "leaver" else None
    return Question(name, kind, path, body, plain, leaves, kind == "slow")


KINDS = {"chat": 26, "completions": 12, "unstreamed": 8, "whole": 6, "leaver": 5, "slow": 4, "odd": 3}
"""Clients of each kind, of 64; "whole" are the only ones of a model whose instances therefore hold no stream."""


class Client:
    """Sends one request after the other until the run ends."""

    def __init__(self, number: int, kind: str, seed: int, path: str, results: list[Result]) -> None:
        self._number = number
        self._kind = kind
        self._dice = random.Random(f"{seed} client {number}")  # noqa: S311 - seeded
        self._wire = Wire(path)
        self._results = results

    async def run(self, until: float) -> None:
        """Runs until the given time.monotonic()."""
        turn = 0
        while time.monotonic() < until:
            turn += 1
            question = ask(f"c{self._number}-{turn}", self._kind, self._dice)
            result = Result(
                question.name,
                question.kind,
                bool(question.body.get("stream")),
                question.plain,
                time.monotonic(),
            )
            self._results.append(result)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._one(question, result)
            except TimeoutError:
                result.outcome, result.detail = "lost", f"no end within {PATIENCE_S} s"
            except Unframed as error:
                result.outcome, result.detail = "unframed", str(error)
            result.ended = time.monotonic()
            if result.outcome != "exact":
                self._wire.close()
            if result.outcome in {"failed", "refused"}:
                await asyncio.sleep(0.2)
        self._wire.close()

    async def _one(self, question: Question, result: Result) -> None:
        try:
            answer = await self._wire.post(question.path, json.dumps(question.body).encode(), question.name)
        except (Dropped, OSError) as error:
            result.outcome, result.detail = "failed", f"{type(error).__name__}: {error}"
            return
        result.status = answer.status
        if answer.status != 200:
            whole = b"".join([piece async for piece in answer.payload()])
            result.outcome = "refused" if answer.status == 429 else "failed"
            result.detail = code_of(whole) if answer.status == 429 else whole[:200].decode("utf-8", "replace")
            return
        reading = Reading(question, result)
        pieces = answer.payload()
        try:
            async for piece in pieces:
                if reading.take(piece):
                    result.outcome = "aborted"
                    return
                if question.slow:
                    await asyncio.sleep(self._dice.uniform(0, SLOW_READ_S))
        except Dropped as error:
            reading.dropped = str(error)
        finally:
            await pieces.aclose()
        result.outcome, result.detail = reading.verdict()


def code_of(body: bytes) -> str:
    """The code of an OpenAI error; otherwise the start of the body."""
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


class Reading:
    """A response while it is received."""

    def __init__(self, question: Question, result: Result) -> None:
        self._question = question
        self._result = result
        self._rest = b""
        self._whole = bytearray()
        self.text = ""
        self.finish: str | None = None
        self.usage: dict[str, int] | None = None
        self.error: object = None
        self.done = False
        self.dropped: str | None = None
        self.strange: str | None = None
        self.ident = ""
        self.idents: set[tuple[object, ...]] = set()
        self.roles = 0

    def take(self, piece: bytes) -> bool:
        """Takes one piece of payload; True when the client disconnects."""
        if not self._result.streamed:
            self._whole += piece
            return False
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            self._event(event)
        leaves = self._question.leaves_after
        return leaves is not None and len(self._result.arrivals) >= leaves

    def _event(self, event: bytes) -> None:
        if event.startswith(b":"):
            return
        if self.done or self.error is not None:
            self.strange = f"after the end: {event!r}"
        elif event == b"data: [DONE]":
            self.done = True
        elif not event.startswith(b"data: {"):
            self.strange = f"no event: {event!r}"
        else:
            try:
                chunk = json.loads(event[6:])
            except ValueError:
                self.strange = f"half an event: {event!r}"
            else:
                self._chunk(chunk)

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.ident = str(chunk["id"])
        self.idents.add((self.ident, chunk["created"], chunk["model"]))
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self._result.arrivals.append(time.monotonic())
            if self.finish is not None:
                self.strange = "a choice after the last"
            delta = choice.get("delta", {})
            self.roles += "role" in delta
            self.text += choice.get("text") or delta.get("content") or ""
            reason = choice["finish_reason"]
            self.finish = None if reason in NO_REASONS else reason

    def verdict(self) -> tuple[str, str]:
        """Outcome and detail at the end of the response."""
        if self.strange is not None:
            return "wrong", self.strange
        if not self._result.streamed:
            return self._judge_whole()
        if self.error is not None:
            return ("told" if not self.done else "wrong"), str(self.error)
        if self.dropped is not None or not self.done:
            return "silent", f"{self.dropped or 'no [DONE]'} after {len(self._result.arrivals)} events"
        return self._compare(self.text, self.finish, self.usage)

    def _judge_whole(self) -> tuple[str, str]:
        if self.dropped is not None:
            return "dropped", self.dropped
        whole = json.loads(bytes(self._whole))
        self.ident = str(whole["id"])
        choice = whole["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return self._compare(text, choice["finish_reason"], whole["usage"])

    def _compare(self, text: str, finish: str | None, usage: dict[str, int] | None) -> tuple[str, str]:
        expected, end, sums = language.answer(self._question.path, self._question.body)
        asked = not self._result.streamed or "stream_options" in self._question.body
        if text != expected:
            return "wrong", f"text {text[-60:]!r} where {expected[-60:]!r} is right"
        if finish != end:
            return "wrong", f"the end is {finish} where {end} is right"
        if usage != (sums if asked else None):
            return "wrong", f"usage {usage} where {sums if asked else None} is right"
        if len(self.idents) > 1 or self.roles != (self._result.streamed and self._question.path == CHAT):
            return "wrong", f"{self.roles} roles, {len(self.idents)} ids"
        self._result.tokens = sums["prompt_tokens"], sums["completion_tokens"]
        return "exact", ""
