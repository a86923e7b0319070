"""The last lines of an instance."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from launcher.instances.logtail import FOLLOWER_LINES, LogLine, LogTail


def line(number: int, generation: int = 1) -> LogLine:
    return LogLine(float(number), generation, f"line {number}")


def filled(lines: int, capacity: int = 10) -> LogTail:
    tail = LogTail(capacity)
    for number in range(lines):
        tail.add(line(number, generation=1 + number % 2))
    return tail


def test_the_oldest_lines_go() -> None:
    assert [kept.time for kept in filled(12).last(100)] == list(range(2, 12))


def test_the_last_lines_of_all_generations_or_of_one() -> None:
    tail = filled(6)
    assert [kept.time for kept in tail.last(2)] == [4, 5]
    assert [kept.time for kept in tail.last(2, generation=1)] == [2, 4]
    assert tail.last(0) == []
    assert tail.last(5, generation=9) == []


async def test_a_follower_gets_the_tail_and_every_line_from_then_on() -> None:
    tail = filled(3)
    async with aclosing(tail.follow(2)) as lines:  # type: ignore[type-var]
        assert (await anext(lines)).time == 1
        tail.add(line(3))  # while the tail is still being written to a slow client
        assert [(await anext(lines)).time for _ in range(2)] == [2, 3]
        waiting = asyncio.create_task(anext(lines))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        tail.add(line(4))
        assert (await waiting).time == 4
    assert not tail._followers, "closed, and forgotten"


async def test_a_slow_follower_loses_the_oldest_lines_and_no_memory() -> None:
    tail = filled(1)
    async with aclosing(tail.follow(1)) as lines:  # type: ignore[type-var]
        await anext(lines)
        for number in range(FOLLOWER_LINES + 5):
            tail.add(line(number))
        assert (await anext(lines)).time == 5


async def test_two_followers_get_the_same() -> None:
    tail = filled(1)
    async with aclosing(tail.follow(1)) as one, aclosing(tail.follow(1)) as other:  # type: ignore[type-var]
        await anext(one), await anext(other)
        tail.add(line(7))
        assert (await anext(one)) == (await anext(other)) == line(7)
