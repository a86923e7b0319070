"""Greedy answers to the same prompts, by stack: an engine that is faster is no better if it says something else."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final

from launcher.measure.tune.model import MeasurementFailedError

PROMPTS: Final = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    ",
    "The first three laws of motion, in the order in which Newton gave them, are",
)
TOKENS: Final = 32
# One answer of a large model on few cores.
_LIMIT_S: Final = 120.0


def ask(url: str, model: str) -> list[str]:
    """The most likely continuation of each of PROMPTS, as /v1/completions gives it. Raises MeasurementFailedError."""
    found = []
    for prompt in PROMPTS:
        body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        request = urllib.request.Request(  # noqa: S310  loopback, of tune's own daemon
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=_LIMIT_S) as response:  # noqa: S310
                found.append(str(json.load(response)["choices"][0]["text"]))
        except urllib.error.HTTPError as error:
            with error:
                raise MeasurementFailedError(f"no answer to {prompt!r}: status {error.code}") from None
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise MeasurementFailedError(f"no answer to {prompt!r}: {error}") from None
    return found


def lines(answers: Mapping[str, Sequence[str]]) -> list[str]:
    """How the answers of each stack differ from those of the first; empty for fewer than two stacks."""
    (first, its), *others = [*answers.items()] or [("", ())]
    return [_compared(first, its, other, found) for other, found in others]


def _compared(first: str, its: Sequence[str], other: str, found: Sequence[str]) -> str:
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
