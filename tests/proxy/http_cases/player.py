"""Plays a case on a real connection, and says what came of it on both sides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import h11
from proxy.http_cases.model import Await, Case, HalfClose, Outcome, Pause, Request
from proxy.http_cases.recorder import Recorded, Recorder

DEADLINE_S = 60.0
SETTLE_S = 0.02  # after the end: for what should not happen to happen
_PROBE = b"GET /health HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n"
_STAYS = frozenset(  # what is for one hop only
    {
        *(
            "expect",
            "http2-settings",
            "keep-alive",
            "te",
            "trailer",
            "transfer-encoding",
            "upgrade",
        ),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection"),
    }
)
_TOLD = {"close", "keep-alive"}


@dataclass
class Answer:
    """One final answer, and whether 100 Continue came before it."""

    status: int
    headers: dict[str, str]
    body: bytes
    interim: bool

    @property
    def says_close(self) -> bool:
        return "close" in self.headers.get("connection", "").lower()


@dataclass
class Seen:
    """What a case led to."""

    answers: list[Answer]
    closed: bool
    faults: list[str] = field(default_factory=list)  # wrong whatever the case says


class _Client(asyncio.Protocol):
    """Keeps all that comes, also when the connection is then reset."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False
        self.changed = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.changed.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.changed.set()

    async def until(self, ready: Callable[[], bool]) -> bool:
        """Whether it was ready in time, or the connection's end made waiting useless."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                while not ready() and not self.closed:
                    self.changed.clear()
                    await self.changed.wait()
        return ready()


def read_answers(data: bytes, methods: list[str], *, closed: bool) -> tuple[list[Answer], str]:
    """All whole answers in the bytes, read by h11, and what is wrong with the rest ("" when nothing is)."""
    answers: list[Answer] = []
    while data:
        parser = h11.Connection(h11.CLIENT)
        method = methods[len(answers)] if len(answers) < len(methods) else "POST"
        parser.send(h11.Request(method=method, target="/", headers=[("host", "h")]))
        parser.send(h11.EndOfMessage())
        parser.receive_data(data)
        if closed:
            parser.receive_data(b"")
        try:
            answer = _read_one(parser)
        except h11.RemoteProtocolError as error:
            return answers, f"no HTTP: {error}: {data[:300]!r}"
        if answer is None:
            return answers, "" if not closed else f"cut: {data[:300]!r}"
        answers.append(answer)
        data = parser.trailing_data[0]
    return answers, ""


def _read_one(parser: h11.Connection) -> Answer | None:
    answer: Answer | None = None
    interim = False
    while True:
        match event := parser.next_event():
            case h11.InformationalResponse():
                interim = True
            case h11.Response():
                headers = {name.decode(): value.decode() for name, value in event.headers}
                answer = Answer(event.status_code, headers, b"", interim)
            case h11.Data() if answer is not None:
                answer.body += event.data
            case h11.EndOfMessage():
                return answer
            case _:
                return None


async def play(case: Case, host: str, port: int) -> Seen:
    """Send what the case sends; then find out whether the connection may be used again."""
    loop = asyncio.get_running_loop()
    transport, client = await loop.create_connection(_Client, host, port)
    try:
        await _send(case, transport, client)
        methods = list(case.methods)
        half = any(isinstance(step, HalfClose) for step in case.sends)
        wanted = max(len(outcome.answers) for outcome in case.right)

        def answers() -> list[Answer]:
            return read_answers(bytes(client.data), methods, closed=client.closed)[0]

        await client.until(lambda: len(answers()) >= wanted or any(each.says_close for each in answers()))
        probed = not client.closed and not half and wanted > 0 and not any(a.says_close for a in answers())
        if probed:
            methods += ["POST"] * (wanted - len(methods)) + ["GET"]
            transport.write(_PROBE)
        ended = await client.until(lambda: client.closed)
        if not probed:  # a probe is answered after all that came before it
            await asyncio.sleep(SETTLE_S)
        return _judge(case, client, methods, probed=probed, ended=ended)
    finally:
        transport.abort()


async def _send(case: Case, transport: asyncio.Transport, client: _Client) -> None:
    for step in case.sends:
        if client.closed:
            return
        match step:
            case bytes():
                transport.write(step)
                await asyncio.sleep(0)
            case Pause():
                await asyncio.sleep(step.seconds)
            case Await():
                mark = step.mark
                await client.until(lambda mark=mark: mark in client.data)  # type: ignore[misc]
            case HalfClose():
                with suppress(OSError, RuntimeError):
                    transport.write_eof()


def _judge(case: Case, client: _Client, methods: list[str], *, probed: bool, ended: bool) -> Seen:
    answers, fault = read_answers(bytes(client.data), methods, closed=client.closed)
    seen = Seen(answers, closed=True, faults=[fault] if fault else [])
    if not ended:
        seen.faults.append(f"neither an answer nor the end within {DEADLINE_S} s")
    if probed and answers and answers[-1].says_close and _is_health(answers[-1]):
        answers.pop()
        seen.closed = False
    elif answers and not answers[-1].says_close and not any(isinstance(s, HalfClose) for s in case.sends):
        seen.faults.append("it closed and its last answer did not say so")
    for each, method in zip(answers, [*methods, *["POST"] * len(answers)], strict=False):
        seen.faults.extend(_faults_of(each, method))
    return seen


def _is_health(answer: Answer) -> bool:
    return answer.status == 200 and b'"ready"' in answer.body


def _faults_of(answer: Answer, method: str) -> list[str]:
    faults = []
    if answer.headers.get("server") != "numa-launcher":
        faults.append(f"an answer's Server is {answer.headers.get('server')}")
    if not answer.headers.get("x-request-id"):
        faults.append(f"an answer ({answer.status}) has no X-Request-Id")
    if answer.status >= 400 and method != "HEAD":
        try:
            error = json.loads(answer.body)["error"]
            wrong = set(error) != {"message", "type", "param", "code"}
        except (ValueError, KeyError, TypeError):
            wrong = True
        if wrong:
            faults.append(f"an error is not in OpenAI's form: {answer.body!r}")
    return faults


def faults_behind(recorder: Recorder) -> list[str]:
    """What no engine may ever get."""
    faults = list(recorder.faults)
    for got in recorder.requests:
        names = [name for name, _ in got.headers]
        faults += [f"{name} went behind" for name in names if name in _STAYS]
        # The proxy may say a word of its own to the next hop.
        faults += [
            f"Connection: {told} behind" for told in got.all("connection") if told.lower() not in _TOLD
        ]
        faults += [
            f"{names.count(one)} x {one} behind" for one in ("host", "x-request-id") if names.count(one) != 1
        ]
        if names.count("content-length") > 1 or (got.body and not got.all("content-length")):
            faults.append(f"odd length behind: {got.headers}")
        if not got.target.startswith("/"):
            faults.append(f"a target behind: {got.target}")
        if not got.whole:
            faults.append(f"a request behind that does not end: {got.method} {got.target} {got.body[:100]!r}")
    return faults


def fits(outcome: Outcome, seen: Seen, behind: list[Recorded]) -> bool:
    """Whether this is what happened."""
    return (
        len(seen.answers) == len(outcome.answers)
        and all(each.status in right for each, right in zip(seen.answers, outcome.answers, strict=True))
        and outcome.closes in {None, seen.closed}
        and outcome.interim in {None, any(each.interim for each in seen.answers)}
        and len(behind) == len(outcome.behind)
        and all(_is(got, wanted) for got, wanted in zip(behind, outcome.behind, strict=True))
    )


def _is(got: Recorded, wanted: Request) -> bool:
    return (
        (got.method, got.target, got.body) == (wanted.method, wanted.target, wanted.body)
        and all(value in got.all(name) for name, value in wanted.has)
        and not any(got.all(name) for name in wanted.lacks)
    )
