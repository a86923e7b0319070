"""Journal entries as the lines that were printed."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from support.fakes import SOON_S, until

from launcher.instances.journal_reader import LINES_A_TURN, MAX_LINE_BYTES, READ_LINES, Follower, Line, _Lines
from launcher.instances.systemd_units import UnitLimit

WHEN = datetime(2026, 1, 1, tzinfo=UTC)


def entry(text: str, stream: str = "s", **fields: str) -> dict[str, Any]:
    return {
        "MESSAGE": text,
        "_STREAM_ID": stream,
        "__REALTIME_TIMESTAMP": WHEN,
        "_SYSTEMD_UNIT": "u.service",
    } | fields


def texts(*entries: dict[str, Any]) -> list[str]:
    lines = _Lines()
    return [line.text for found in entries for line in lines.of(found)]


def test_an_entry_is_a_line() -> None:
    (line,) = _Lines().of(entry("loading  "))
    assert (line.unit, line.time, line.text) == ("u.service", WHEN.timestamp(), "loading")


def test_progress_bars_are_lines_too() -> None:
    assert texts(entry("10%\r20%\r\r30%")) == ["10%", "20%", "30%"]


def test_a_line_that_journald_broke_is_one_and_cut() -> None:
    found = texts(
        entry("x" * 49152, _LINE_BREAK="line-max"), entry("other", "t"), entry("x" * 49152, _LINE_BREAK="line-max"),
        entry("xx"), entry("after"),
    )  # fmt: skip
    assert [len(text) for text in found] == [MAX_LINE_BYTES, 5, 5]
    assert found[1:] == ["other", "after"]


def test_another_break_is_an_end() -> None:
    assert texts(entry("a", _LINE_BREAK="pid-change"), entry("b", _LINE_BREAK="eof"), entry("c")) == [
        "a",
        "b",
        "c",
    ]


class Flood:
    """One unit prints without end, another one a line now and then."""

    def __init__(self) -> None:
        self.read = Counter[str]()
        self.most = 0
        self.over = threading.Event()
        self.closed = False

    def new(self, _units: frozenset[str]) -> Iterator[Line]:
        for count in range(100_000 if not self.over.is_set() else 0):
            self.most = max(self.most, count + 1)
            unit = "calm" if self.read.total() % 700 == 0 else "loud"
            self.read[unit] += 1
            yield Line(unit, 1.0, f"{self.read[unit]}")

    def wait(self, seconds: float) -> None:
        self.over.wait(seconds)

    def close(self) -> None:
        self.closed = True


async def test_a_unit_that_prints_without_end_holds_up_neither_the_loop_nor_the_others() -> None:
    flood, turn = Flood(), 0
    per_turn, heard = Counter[int](), dict[str, list[str]]()

    async def turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def hear(line: Line) -> None:
        per_turn[turn] += 1
        heard.setdefault(line.unit, []).append(line.text)

    follower = Follower(lambda _since: flood)
    for unit in ("loud", "calm"):
        follower.listen(unit, hear, UnitLimit(unit, 0.0))
    counting = asyncio.create_task(turns())
    follower.start()
    async with asyncio.timeout(SOON_S):
        await until(lambda: flood.read["loud"] > 9000)
        flood.over.set()
        follower._wanted += 1  # as `catch_up`, which asks journald
        await until(lambda: follower._done == follower._wanted)
    counting.cancel()
    await follower.close()
    left_out = [int(text.split()[1]) for text in heard["loud"] if "were left out here" in text]
    assert sum(left_out) + len(heard["loud"]) - len(left_out) == flood.read["loud"]
    assert sum(left_out) > 0
    assert heard["loud"][-1] == str(flood.read["loud"]), "the last lines are kept"
    assert heard["calm"] == [str(number + 1) for number in range(flood.read["calm"])]
    assert max(per_turn.values()) <= LINES_A_TURN
    assert (flood.most, flood.closed) == (READ_LINES, True)
