"""Greedy answers to the same prompts, by stack: an engine that is faster is no better if it says something else.
Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final

PROMPTS: Final = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "The first three laws of motion, in the order in which Newton gave them, are",
)
TOKENS: Final = 32


def compared(answers: Mapping[str, Sequence[str]]) -> list[str]:
    """How the answers of each stack differ from those of the first; empty for fewer than two stacks."""
    (first, its), *others = [*answers.items()] or [("", ())]
    return [_against(first, its, other, found) for other, found in others]


def _against(first: str, its: Sequence[str], other: str, found: Sequence[str]) -> str:
    pairs = list(zip(its, found, strict=False))
    same = sum(one == another for one, another in pairs)
    text = f"answers of {other}: {same} of {len(pairs)} are those of {first}, to the letter"
    agree = [_common(one, another) for one, another in pairs if one != another]
    if agree:
        words = ", ".join(map(str, agree))
        text += f"; the others agree for their first {words} words"
    return text


def _common(one: str, another: str) -> int:
    """Words until they differ."""
    pairs = zip(one.split(), another.split(), strict=False)
    return sum(1 for _ in takewhile(lambda words: words[0] == words[1], pairs))
