"""Clients of a fleet: each knows both ingress hosts, and checks every answer to its last byte."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from chaos.clients import Question, Reading, Result, ask
from chaos.wire import Dropped, Unframed, Wire

# Of 8 clients: most are streams; those that leave show that an engine learns of it.
KINDS = ("chat", "chat", "chat", "chat", "completions", "completions", "unstreamed", "leaver")
# A response that takes longer counts as lost.
PATIENCE_S = 60.0
AFTER_FAILURE_S = 0.1


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


def end_of(result: Result) -> End:
    """The verdict of tests/chaos, for a fleet: here a stream without [DONE] whose framing shows the cut is honest."""
    if result.outcome == "silent" and not result.detail.startswith("no [DONE]"):
        return End.CUT
    return _ENDS.get(result.outcome, End.DISHONEST)


_ENDS = {
    "exact": End.WHOLE, "aborted": End.LEFT, "told": End.TOLD, "dropped": End.CUT, "failed": End.FAILED,
    "refused": End.FAILED,
}  # fmt: skip


class Client:
    """Sends one request after the other, to the first of its addresses that takes the connection."""

    def __init__(self, number: int, addresses: Sequence[str], outcomes: list[Outcome], seed: int) -> None:
        self._number = number
        self._kind = KINDS[number % len(KINDS)]
        self._dice = random.Random(f"{seed} client {number}")  # noqa: S311 - seeded
        # Half of the clients prefer the one ingress, half the other.
        turn = number // len(KINDS) % len(addresses)
        self._wires = [(address, Wire(address)) for address in (*addresses[turn:], *addresses[:turn])]
        self._outcomes = outcomes

    async def run(self, stop: asyncio.Event) -> None:
        """Runs until `stop` is set; the last request is finished."""
        turn = 0
        while not stop.is_set():
            turn += 1
            outcome = await self._request(ask(f"c{self._number}-{turn}", self._kind, self._dice))
            self._outcomes.append(outcome)
            if outcome.end is End.FAILED:
                await asyncio.sleep(AFTER_FAILURE_S)
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
        reading = Reading(question, result)
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
            result.begun, time.monotonic(), end_of(result), asked, reading.ident.rpartition("-")[0].rpartition("-")[2],
            f"{question.name}: {result.status} {result.outcome} {result.detail}", first,
        )  # fmt: skip

    async def _ask(self, question: Question, result: Result, reading: Reading) -> str:
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
            except Dropped as error:
                reading.dropped = str(error)
            finally:
                await pieces.aclose()
            result.outcome, result.detail = reading.verdict()
            return address
        return ""


class Load:
    """`count` clients until `stop`."""

    def __init__(self, addresses: Sequence[str], count: int, seed: int) -> None:
        self.outcomes: list[Outcome] = []
        self._stop = asyncio.Event()
        self._clients = [Client(number, addresses, self.outcomes, seed) for number in range(count)]
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
