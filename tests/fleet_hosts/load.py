"""Clients of a fleet: each knows both ingress hosts, and checks every answer to its last byte."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from chaos.clients import Question, Reading, Result, ask
from chaos.wire import Answer, Dropped, Unframed, Wire

from fleet_hosts.engine_header import HEADER
from fleet_hosts.real_engine import Spoke, asks, prompts

# Of 8 clients: most are streams; those that leave show that an engine learns of it.
KINDS = ("chat", "chat", "chat", "chat", "completions", "completions", "unstreamed", "leaver")
# A response that takes longer counts as lost. A stream of a real engine that was killed waits for the next one's start.
PATIENCE_S = 150.0
AFTER_FAILURE_S = 0.1
CONNECT_S = 1.0
# A host without power answers nothing: the connection ends after one second and two unanswered questions of a second each,
# or when what was sent is not confirmed for three.
TCP_LIMITS: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000),
)
PROMPTS: Final = prompts()


class End(StrEnum):
    """How a request ended."""

    WHOLE = "whole"
    LEFT = "left"  # by its client
    CUT = "cut"  # the connection ended early, which the client sees from HTTP's framing
    TOLD = "told"  # an error event after the first byte, no [DONE]
    FAILED = "failed"  # an error, or no answer at all
    DISHONEST = (
        "dishonest"  # an answer that is wrong or not whole and does not look so; none within PATIENCE_S
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: what its client saw."""

    begun: float  # time.monotonic, as all times here
    ended: float
    end: End
    ingress: str  # address of the ingress host that was asked
    host: str  # name of the host whose engine answered; empty before the first byte
    detail: str
    first_s: float | None  # to the first event of a stream
    real: bool = False  # answered by vLLM


def end_of(result: Result) -> End:
    """The verdict of tests/chaos, for a fleet: here a stream without [DONE] whose framing shows the cut is honest."""
    if result.outcome == "silent" and not result.detail.startswith("no [DONE]"):
        return End.CUT
    return _ENDS.get(result.outcome, End.DISHONEST)


_ENDS = {
    "exact": End.WHOLE, "aborted": End.LEFT, "told": End.TOLD, "dropped": End.CUT, "failed": End.FAILED,
    "refused": End.FAILED,
}  # fmt: skip


def question(name: str, kind: str, dice: random.Random) -> Question:
    """As in tests/chaos, with a prompt whose answer is known of vLLM, too."""
    asked = ask(name, kind, dice)
    prompt = dice.choice(PROMPTS)
    said = (
        {"prompt": prompt} if "prompt" in asked.body else {"messages": [{"role": "user", "content": prompt}]}
    )
    return replace(asked, body=asked.body | said | {"ignore_eos": True})


class FleetReading(Reading):
    """A response of a stand-in, or of vLLM."""

    def __init__(self, question: Question, result: Result, spoke: Spoke) -> None:
        super().__init__(question, result)
        self._asked, self._got, self._spoke = question, result, spoke
        self.engine = ""
        """The host that vLLM answers on; empty with a stand-in, and where a comment of the daemon came first."""

    @property
    def real(self) -> bool:
        """Whether vLLM answers: it names its answers after the requests, stand-ins do not."""
        return bool(self.engine) or self.ident.endswith(f"-{self._asked.name}")

    @property
    def host(self) -> str:
        """Whose engine answered; empty before the first byte, and where it is not known."""
        return self.engine or ("" if self.real else self.ident.rpartition("-")[0].rpartition("-")[2])

    def _compare(self, text: str, finish: str | None, usage: dict[str, int] | None) -> tuple[str, str]:
        if not self.real:
            return super()._compare(text, finish, usage)
        body = self._asked.body
        spoken, tokens = self._spoke[self._asked.path, asks(body)], body["max_tokens"]
        if not spoken.fits(text, tokens):
            return "wrong", f"text {text!r} where {spoken.texts.get(tokens)!r} is right"
        if finish != "length":
            return "wrong", f"the end is {finish} where length is right"
        wanted = not self._got.streamed or "stream_options" in body
        sums = (spoken.prompt_tokens, tokens, spoken.prompt_tokens + tokens) if wanted else None
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        if (usage and tuple(usage.get(name) for name in names)) != sums:
            return "wrong", f"usage {usage} where {sums} is right"
        if len(self.idents) > 1 or self.roles != (self._got.streamed and "messages" in body):
            return "wrong", f"{self.roles} roles, {len(self.idents)} ids"
        return "exact", ""


class PatientWire(Wire):
    """Ends where nobody answers any more, by TCP's own means: however long an engine takes is no concern of it."""

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await super()._connect()
        except TimeoutError:
            raise ConnectionError(f"no connection within {CONNECT_S:g} s") from None
        for level, name, value in TCP_LIMITS:
            writer.get_extra_info("socket").setsockopt(level, name, value)
        return reader, writer

    async def _ask(self, request: bytes) -> Answer:
        if self._reader is not None and self._reader.exception() is not None:
            self.close()  # it ended while nothing was sent
        try:
            return await super()._ask(request)
        except TimeoutError:  # ETIMEDOUT
            raise Dropped("before the answer: the host does not confirm what it gets") from None


class Client:
    """Sends one request after the other, to the first of its addresses that takes the connection."""

    def __init__(self, number: int, addresses: Sequence[str], load: Load, seed: int) -> None:
        self._number = number
        self._load = load
        self._kind = KINDS[number % len(KINDS)]
        self._dice = random.Random(f"{seed} client {number}")  # noqa: S311 - seeded
        # Half of the clients prefer the one ingress, half the other.
        turn = number // len(KINDS) % len(addresses)
        self._wires = [(address, PatientWire(address)) for address in (*addresses[turn:], *addresses[:turn])]

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set; the last request is finished."""
        turn = 0
        while not stop.is_set():
            turn += 1
            asked = question(f"c{self._number}-{turn}", self._kind, self._dice)
            outcome = await self._request(asked)
            self._load.outcomes.append(outcome)
            if outcome.end is End.FAILED:
                await asyncio.sleep(AFTER_FAILURE_S)
            elif outcome.real:
                # As long as a stand-in would have taken: else most requests would be asked of the two real engines.
                rest = asked.body["max_tokens"] * self._load.token_s - (outcome.ended - outcome.begun)
                await asyncio.sleep(max(0.0, rest))
            if outcome.end is not End.WHOLE:
                self.close()
        self.close()

    def close(self) -> None:
        for _, wire in self._wires:
            wire.close()

    async def _request(self, question: Question) -> Outcome:
        result = Result(
            question.name, question.kind, bool(question.body.get("stream")), question.plain, time.monotonic()
        )
        reading = FleetReading(question, result, self._load.spoke)
        asked = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                asked = await self._ask(question, result, reading)
        except TimeoutError:
            result.outcome, result.detail = "lost", f"no end within {PATIENCE_S:g} s"
        except Unframed as error:
            result.outcome, result.detail = "unframed", str(error)
        first = result.arrivals[0] - result.begun if result.arrivals else None
        return Outcome(
            result.begun, time.monotonic(), end_of(result), asked, reading.host,
            f"{question.name}: {result.status} {result.outcome} {result.detail}", first, reading.real,
        )  # fmt: skip

    async def _ask(self, question: Question, result: Result, reading: FleetReading) -> str:
        """The address that took the request."""
        body = json.dumps(question.body).encode()
        for address, wire in self._wires:
            try:
                answer = await wire.post(question.path, body, question.name)
            except OSError as error:  # nothing was sent: the other address may take it
                result.outcome, result.detail = "failed", f"cannot connect: {error}"
                continue
            except Dropped as error:
                result.outcome, result.detail = "failed", str(error)
                return address
            result.status = answer.status
            reading.engine = answer.headers.get(HEADER.decode(), "")
            pieces = answer.payload()
            try:
                if answer.status != 200:
                    whole = b"".join([piece async for piece in pieces])
                    result.outcome, result.detail = "failed", whole[:200].decode("utf-8", "replace")
                    return address
                async for piece in pieces:
                    if reading.take(piece):
                        result.outcome, result.detail = "aborted", ""
                        return address
            except (Dropped, TimeoutError) as error:  # ETIMEDOUT
                reading.dropped = str(error)
            finally:
                await pieces.aclose()
            result.outcome, result.detail = reading.verdict()
            return address
        return ""


class Load:
    """`count` clients until `stop`."""

    def __init__(
        self, addresses: Sequence[str], count: int, seed: int, token_s: float, spoke: Spoke | None = None
    ) -> None:
        """`token_s`: a stand-in's time for a token. `spoke`: the answers of vLLM, where there is one."""
        self.outcomes: list[Outcome] = []
        self.token_s = token_s
        self.spoke = spoke or {}
        self._stop = asyncio.Event()
        self._clients = [Client(number, addresses, self, seed) for number in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, group: asyncio.TaskGroup) -> None:
        self._tasks = [
            group.create_task(client.run(self._stop), name=f"client {number}")
            for number, client in enumerate(self._clients)
        ]

    async def stop(self) -> None:
        """Every client finishes its last request."""
        self._stop.set()
        await asyncio.gather(*self._tasks)


def counts(outcomes: Iterable[Outcome]) -> dict[str, int]:
    found = Counter(outcome.end.value for outcome in outcomes)
    return {end.value: found[end.value] for end in End}


def shares(outcomes: Iterable[Outcome]) -> dict[str, float]:
    """The share of each host, of the requests that a host answered."""
    found = Counter(outcome.host for outcome in outcomes if outcome.host)
    return {host: count / found.total() for host, count in sorted(found.items())}
