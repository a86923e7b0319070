"""Prompts made here: deterministic, different by seed, and growing like conversations."""

from __future__ import annotations

import json

import pytest

from launcher.measure.bench import workloads
from launcher.measure.bench.workloads import conversations, read_requests

CHAT = workloads.named("chat")


def test_a_seed_makes_the_same_conversations() -> None:
    assert conversations(CHAT, 40, 1) == conversations(CHAT, 40, 1)


def test_another_seed_shares_no_prompt() -> None:
    one, two = ({line["prompt"] for line in conversations(CHAT, 40, seed)} for seed in (1, 2))
    assert one.isdisjoint(two)


def test_turns_repeat_the_conversation_so_far() -> None:
    lines = [line["prompt"] for line in conversations(CHAT, 8, 1)]
    assert len(lines) == 8
    for turn in range(1, CHAT.turns):
        for index in range(2):
            assert lines[turn * 2 + index].startswith(lines[(turn - 1) * 2 + index])


def test_conversations_share_the_system_prompt_only() -> None:
    first, second = (line["prompt"] for line in conversations(CHAT, 8, 1)[:2])
    system = first.partition("\n\n")[0]
    assert second.startswith(system)
    assert len(system.split()) == CHAT.system_words + 1
    assert first != second


def test_a_number_of_requests_that_is_no_multiple_is_kept() -> None:
    assert len(conversations(CHAT, 7, 1)) == 7


def test_requests_are_read_in_every_form() -> None:
    lines = [
        '{"prompt": "a", "output_tokens": 3}', "",
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]}',
        '{"custom_id": "1", "body": {"prompt": "b", "max_completion_tokens": 4}}',
    ]  # fmt: skip
    assert list(read_requests(lines, 9)) == [
        {"prompt": "a", "output_tokens": 3},
        {"prompt": "System: s\n\nUser: u", "output_tokens": 9},
        {"prompt": "b", "output_tokens": 4},
    ]


@pytest.mark.parametrize(
    "line", ["[]", "3", '"x"', "{", '{"messages": []}', '{"prompt": "a", "max_tokens": "x"}']
)
def test_a_line_that_is_no_request_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2"):
        list(read_requests([json.dumps({"prompt": "a"}), line], 9))
