"""Sums of queued prefill, and blocks of queued prompts."""

from __future__ import annotations

from support.balancing import ticket, up

from launcher.balancing.admission_queue import QueuedPrompts, QueuedWork


def test_sums_end_at_nothing() -> None:
    instance, work = up(0), QueuedWork()
    anywhere, there = ticket(), ticket()
    anywhere.prefill_tokens, there.prefill_tokens, there.expected_at = 100.1, 0.2, instance
    work.add(anywhere)
    work.add(there)
    assert (work.total, work.count, work.tokens, work.at) == (2, 1, 100.1, {instance: (1, 0.2)})
    work.add(anywhere, -1)
    work.add(there, -1)
    assert (work.total, work.count, work.tokens, work.at) == (0, 0, 0.0, {})


def test_a_part_of_another() -> None:
    instance, other, work = up(0), QueuedWork(), QueuedWork()
    for number in range(4):
        one = ticket()
        one.prefill_tokens = 50.0
        one.expected_at = instance if number % 2 else None
        other.add(one)
    work.plus(other, 0.5)
    work.plus(other, 0.5)
    assert (work.total, work.count, work.tokens) == (4, 2, 100.0)
    assert work.at == {instance: (2, 100.0)}


def test_shared_blocks_of_prompts() -> None:
    prompts = QueuedPrompts()
    prompts.add((1, 2, 3))
    prompts.add((1, 2, 4, 5))
    assert prompts.match((1, 2, 3, 9)) == 3
    assert prompts.match((7, 2)) == prompts.match(()) == 0
    prompts.remove((1, 2, 3))
    assert prompts.match((1, 2, 3, 9)) == 2
    prompts.remove((1, 2, 4, 5))
    assert prompts.match((1,)) == 0
