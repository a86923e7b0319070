"""How long one body waits for memory, all its waits together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest

from launcher.proxy.downstream.uploads import STEP_BYTES, Upload, UploadMemory
from launcher.proxy.http1.requests import parse_request
from launcher.proxy.request.events import Event
from launcher.proxy.request.record import Request

WAIT_S = 10.0
HEAD = parse_request(
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (8 * STEP_BYTES)
)


@dataclass
class Loop:
    """An event loop whose time stands until it is set."""

    now: float = 0.0
    calls: list[Callable[[], None]] = field(default_factory=list)

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class Connection:
    reading = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def body_ended(self, rest: bytes) -> None:
        raise AssertionError("the body does not end")


@dataclass
class Bounds:
    upload_memory: UploadMemory
    body_timeout_s: float = 5.0
    body_min_bytes_per_s: int = 1000
    upload_wait_s: float = WAIT_S
    max_body_bytes: int = 16 * STEP_BYTES

    def post(self, request: Request, event: Event) -> None:
        request.looked = True


class Posted:
    """The part of a request that a body looks at."""

    method = "POST"
    looked = True
    state = None


def test_all_waits_of_a_body_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given a step of memory each time that it has almost waited in vain: its third wait ends in a refusal."""
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    memory = UploadMemory(4 * STEP_BYTES, 2 * STEP_BYTES)
    others = [memory.share(lambda: None) for _ in range(3)]
    assert all(memory.ask(other) for other in others)  # two from the pool, one from the reserve
    connection = Connection()
    upload = Upload(connection, cast("Request", Posted()), HEAD, Bounds(memory))
    upload.begin(b"x" * 1000)
    assert (connection.reading, upload.deadline) == (False, WAIT_S)
    waited = 0.0
    for other, wait_s in ((others[0], 6.0), (others[1], 3.5)):
        loop.now += wait_s
        waited += wait_s
        memory.give_back(other)
        loop.turn()
        assert connection.reading
        for _ in range(STEP_BYTES // 250_000):
            upload.take(b"x" * 250_000)
            loop.turn()
        assert not connection.reading  # it waits again
        assert upload.deadline == pytest.approx(loop.now + WAIT_S - waited)
    loop.now = upload.deadline
    refusal = upload.late(loop.now)
    assert (refusal.status, refusal.code) == (503, "upload_memory")
    assert f"for {WAIT_S:.0f} s" in refusal.message


def test_a_freeze_counts_as_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
    memory = UploadMemory(2 * STEP_BYTES, STEP_BYTES)
    others = [memory.share(lambda: None) for _ in range(2)]
    assert all(memory.ask(other) for other in others)
    connection = Connection()
    upload = Upload(connection, cast("Request", Posted()), HEAD, Bounds(memory))
    upload.begin(b"x" * 1000)
    loop.now = 60.0
    upload.excuse(58.0)
    assert upload.deadline == WAIT_S + 58.0
    memory.give_back(others[0])
    loop.turn()
    for _ in range(4):
        upload.take(b"x" * 250_000)
        loop.turn()
    assert not connection.reading
    assert upload.deadline == pytest.approx(60.0 + WAIT_S - 2.0)
