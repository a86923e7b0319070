"""What pages ask for besides the frame: shared for a short time, and small."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.fakes import FakeClock

from launcher.base.errors import LauncherError
from launcher.dashboard.api import MAX_KEPT, Answers, Shared, rounded


@dataclass
class FakeDaemon:
    asked: Counter[str] = field(default_factory=Counter)

    async def read(self, path: str, within_s: float = 5.0) -> bytes:
        self.asked[path] += 1
        return json.dumps({"columns": ["a", "slot.0.state"], "rows": [[2000, 1234.5678, "ready"]]}).encode()

    async def get(self, path: str, within_s: float = 5.0) -> dict[str, Any]:
        self.asked[path] += 1
        return {"path": path}


async def test_pages_share_what_they_ask_for() -> None:
    daemon, clock = FakeDaemon(), FakeClock()
    answers = Answers(daemon, clock)
    for _ in range(20):
        assert json.loads((await answers.topology()).body) == {"path": "/topology"}
        assert json.loads((await answers.history("1h", "2000", "0")).body)["rows"] == [[2000, 1230, "ready"]]
        await answers.history("1h", "2000", "none")
    assert daemon.asked == {
        "/topology": 1, "/history?span=1h&after=2000&slots=0": 1, "/history?span=1h&after=2000&slots=none": 1,
    }  # fmt: skip
    clock.now += 1.0
    await answers.history("1h", "2000", "0")
    assert daemon.asked["/history?span=1h&after=2000&slots=0"] == 2


@pytest.mark.parametrize("name", ["a b", "a/b", "../x", "a?b=c#d", "%2e", "ä"])
async def test_an_id_stays_one_part_of_the_path(name: str) -> None:
    daemon = FakeDaemon()
    await Answers(daemon, FakeClock()).request(name)
    (path,) = daemon.asked
    assert path.startswith("/requests/")
    assert not set(path.removeprefix("/requests/")) & set("/?# ")


async def test_the_lines_of_a_failed_instance_are_read_once() -> None:
    slot = {
        "slot": 3,
        "last_cause": {"name": "oom"},
        "last_cause_at": 7.0,
        "last_cause_generation": 1,
        "verified": None,
    }

    class OneSlot(FakeDaemon):
        async def get(self, path: str, within_s: float = 5.0) -> dict[str, Any]:
            self.asked[path] += 1
            lines = [
                {"time": 1.0, "generation": number % 2, "text": f"line {number}"} for number in range(100)
            ]
            return {
                "/status?redact=1": {"slots": [slot]},
                "/plan": {"slots": [{"slot": 3, "argv": ["vllm"]}]},
            }.get(path, {"lines": lines})

    daemon, clock = OneSlot(), FakeClock()
    answers = Answers(daemon, clock)
    for generation in (1, 1, 2):
        slot["last_cause_generation"] = generation
        found = json.loads((await answers.slot("3")).body)
        clock.now += 10
        assert [line["generation"] for line in found["why"]["lines"]] == [1] * (20 if generation == 1 else 0)
        assert found["argv"] == ["vllm"]
    assert daemon.asked["/slots/3/logs?tail=200&redact=1"] == 3
    assert daemon.asked["/slots/3/logs?tail=2000&redact=1"] == 2


async def test_what_is_kept_is_bounded() -> None:
    daemon = FakeDaemon()
    answers = Answers(daemon, FakeClock())
    for number in range(3 * MAX_KEPT):
        await answers.request(f"r{number}")
    await answers.request("r0")
    assert daemon.asked["/requests/r0"] == 2
    await answers.request(f"r{3 * MAX_KEPT - 1}")
    assert daemon.asked[f"/requests/r{3 * MAX_KEPT - 1}"] == 1


async def test_a_failure_is_not_kept() -> None:
    shared: Shared[int] = Shared(FakeClock())
    outcomes: list[int | LauncherError] = [LauncherError("cannot", "wait"), 7]

    async def ask() -> int:
        found = outcomes.pop(0)
        if isinstance(found, LauncherError):
            raise found
        return found

    with pytest.raises(LauncherError):
        await shared.get("a", 10.0, ask)
    assert [await shared.get("a", 10.0, ask) for _ in range(2)] == [7, 7]


async def test_a_history_that_is_not_there_now_is_empty() -> None:
    class Gone(FakeDaemon):
        async def read(self, path: str, within_s: float = 5.0) -> bytes:
            raise LauncherError("cannot reach it", "start it")

    found = json.loads((await Answers(Gone(), FakeClock()).history("1d", "120000", "none")).body)
    assert found == {
        "span": "1d", "step_ms": 60000, "columns": [], "rows": [], "newest": 120000, "trouble": "cannot reach it; start it",
    }  # fmt: skip


def test_three_digits() -> None:
    rows = [[1700000002000, 0.123456, 98765, 3, None, "ready", 1.5e9, 0]]
    assert rounded({"rows": rows})["rows"] == [[1700000002000, 0.123, 98800, 3, None, "ready", 1500000000, 0]]
