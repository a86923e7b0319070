"""One poll for all pages; a daemon that is slow, gone, or from before an upgrade."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from support.fake_operations import FakeOperations
from support.fakes import FakeClock

from launcher.base.errors import LauncherError, NotFoundError
from launcher.dashboard import poll
from launcher.dashboard.poll import POLL_S, Packed, Poll

GONE = LauncherError("cannot reach it", "start it")


@dataclass
class FakeDaemon:
    asked: Counter[str] = field(default_factory=Counter)
    error: LauncherError | None = None
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    events: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.answers.set()

    async def get(self, path: str, within_s: float = 5.0) -> dict[str, Any]:
        self.asked[path.partition("?")[0]] += 1
        await self.answers.wait()
        if self.error is not None:
            raise self.error
        match path.partition("?")[0]:
            case "/status":
                found: dict[str, Any] = msgspec.to_builtins(FakeOperations().status())
                return found if self.status is None else self.status
            case "/events":
                after = int(path.rpartition("=")[2])
                return {"events": [event for event in self.events if event["number"] > after]}
            case "/history":
                return {"columns": ["requests_per_s", "queued"], "rows": [[1000, 1, 2], [3000, 4, None]]}
            case _:
                raise NotFoundError("cannot find it", "upgrade")


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def shared(daemon: FakeDaemon, clock: FakeClock) -> Poll:
    return Poll(daemon, clock=clock, monotonic=clock)


def read(packed: Packed) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(packed.body)
    assert json.loads(gzip.decompress(packed.compressed)) == found
    return found


def event(number: int) -> dict[str, Any]:
    return {
        "number": number,
        "time": float(number),
        "level": "info",
        "logger": "l",
        "message": f"m{number}",
        "fields": {},
    }


async def test_twenty_pages_ask_once(shared: Poll, daemon: FakeDaemon, clock: FakeClock) -> None:
    frames = await asyncio.gather(*(shared.frame(0) for _ in range(20)))
    assert len({id(frame.compressed) for frame in frames}) == 1
    assert daemon.asked["/status"] == 1
    clock.now += POLL_S / 2
    assert (await shared.frame(0)).compressed is frames[0].compressed
    clock.now += POLL_S / 2
    assert (await shared.frame(0)).compressed is not frames[0].compressed
    assert daemon.asked["/status"] == 2


async def test_a_frame(shared: Poll, clock: FakeClock) -> None:
    found = read(await shared.frame(0))
    assert (found["time"], found["age_s"], found["answers"], found["trouble"]) == (clock.now, 0.0, True, "")
    assert found["verdict"]["line"] == "OK 2/2 ready; 1 in flight, 0 waiting"
    assert found["figures"] == {"time": 3.0, "requests_per_s": 4, "queued": None}
    assert found["machine"] is None  # the daemon has no such answer


async def test_a_page_gets_the_changes_that_it_lacks(
    shared: Poll, daemon: FakeDaemon, clock: FakeClock
) -> None:
    daemon.events = [event(7), event(8)]
    first = read(await shared.frame(0))
    assert [item["number"] for item in first["changes"]] == [7, 8]
    assert read(await shared.frame(first["newest_event"]))["changes"] == []
    daemon.events.append(event(9))
    clock.now += POLL_S
    assert [item["number"] for item in read(await shared.frame(8))["changes"]] == [9]
    assert [item["number"] for item in read(await shared.frame(0))["changes"]] == [7, 8, 9]
    for after in range(100):  # a page may ask for anything
        await shared.frame(after)


async def test_a_daemon_that_is_gone(shared: Poll, daemon: FakeDaemon, clock: FakeClock) -> None:
    daemon.error = GONE
    never = read(await shared.frame(0))
    assert (never["answers"], never["status"], never["age_s"]) == (False, None, None)
    assert never["verdict"]["line"] == "NO ANSWER: cannot reach it"
    daemon.error = None
    clock.now += POLL_S
    assert read(await shared.frame(0))["answers"]
    daemon.error = GONE
    clock.now += 60
    gone = read(await shared.frame(0))
    assert (gone["answers"], gone["age_s"], gone["status"]["ready"]) == (False, 60.0, 2)
    assert (gone["verdict"]["level"], gone["trouble"]) == ("unknown", "cannot reach it; start it")
    assert gone["verdict"]["line"] == "NO ANSWER for 1m00s: cannot reach it"
    assert gone["verdict"]["problems"][0]["remedy"] == "start it"


async def test_a_daemon_of_another_version(shared: Poll, daemon: FakeDaemon, clock: FakeClock) -> None:
    daemon.status = {"slots": [{}]}
    found = read(await shared.frame(0))
    assert (found["answers"], found["verdict"]["level"]) == (False, "unknown")
    assert "cannot read the daemon's answer: KeyError" in found["trouble"]
    assert "different versions" in found["trouble"]


async def test_a_slow_daemon_holds_no_page_up(
    shared: Poll, daemon: FakeDaemon, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll, "PATIENCE_S", 0.01)
    before = await shared.frame(0)
    daemon.answers.clear()
    clock.now += POLL_S
    assert (await shared.frame(0)).body == before.body
    clock.now += POLL_S
    assert (await shared.frame(0)).body == before.body
    assert daemon.asked["/status"] == 2  # none is sent while one is open
    daemon.answers.set()
    await shared.close()


async def test_the_first_page_of_a_slow_daemon(
    shared: Poll, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poll, "PATIENCE_S", 0.01)
    daemon.answers.clear()
    found = read(await shared.frame(0))
    assert (found["answers"], found["verdict"]["level"]) == (False, "unknown")
    await shared.close()
