"""The last lines of an instance."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from hypothesis import given
from hypothesis import strategies as st

from launcher.instances.output import (
    BURST_LINES,
    FOLLOWER_LINES,
    HELD_LINES,
    LINES_PER_S,
    LineLimit,
    LogLine,
    LogTail,
)


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


def texts(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_a_start_is_taken_whole() -> None:
    limit = LineLimit(0.0)
    assert limit.take(texts(BURST_LINES), 0.0) == (0, texts(BURST_LINES))
    assert not limit.holding
    assert limit.take(texts(int(LINES_PER_S)), 1.0) == (0, texts(int(LINES_PER_S)))


def test_of_a_flood_the_last_lines_are_taken_and_the_others_counted() -> None:
    limit = LineLimit(0.0)
    flood = texts(BURST_LINES + HELD_LINES + 1000)
    assert limit.take(flood, 0.0) == (0, flood[:BURST_LINES])
    assert limit.take([], 0.1) == (0, ())
    assert limit.take([b"last"], 2.0) == (1001, tuple([*flood, b"last"][-HELD_LINES:]))
    assert not limit.holding


@given(st.lists(st.tuples(st.integers(0, 20_000), st.floats(0, 5)), max_size=30))
def test_every_line_is_taken_or_counted(turns: list[tuple[int, float]]) -> None:
    now, printed, taken, left_out = 0.0, 0, 0, 0
    limit = LineLimit(now)
    for count, seconds in turns:
        now += seconds
        printed += count
        missing, lines = limit.take([b"x"] * count, now)
        taken += len(lines)
        left_out += missing
        assert taken <= BURST_LINES + now * LINES_PER_S + 1
    missing, lines = limit.rest()
    assert taken + len(lines) + left_out + missing == printed
