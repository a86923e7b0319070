"""Prompts that are made here: conversations of several turns, and the requests of a user's file. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from launcher.bench.workloads import Workload

# Frequent English words: with the space before it, each is one token in the vocabulary of most models.
_TEXT: Final = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which
one you were all her she there would their we him been has when who will no more if out so up said what its
about than into them can only other time new some could these two may first then do any like my now over such
our man me even most made after also did many off before must well back through years where much your way down
should because long each just state those people too mr how little good world make very year still see own
work men day get here old between both being under three never know same last another while us might
great go come since against right came take used himself few use place during high without again
around small however found mrs part school thought went say general once upon war every does got united left
number course until always away public something fact less though water put think almost enough far
took system better set told nothing night end called look eyes going find asked later knew point next give
group toward young days let side social given
"""
WORDS: Final = tuple(_TEXT.split())

Prompt = dict[str, Any]
"""One line of a data set for `vllm bench serve --dataset-name custom`."""


def conversations(workload: Workload, requests: int, seed: int) -> list[Prompt]:
    """Turn 1 of every conversation, then turn 2 of every one, and so on: a turn comes when its predecessor has been
    answered, as long as fewer requests are in flight than there are conversations.

    Each turn repeats the system prompt and the conversation so far, as a chat client does. The answers in it are made
    here, not the endpoint's: their KV blocks are computed again with the next turn."""
    rng = np.random.default_rng(seed)
    system = f"System: {_words(rng, workload.system_words)}"
    many = -(-requests // workload.turns)
    histories = [system] * many
    lines: list[Prompt] = []
    for _turn in range(workload.turns):
        for index, history in enumerate(histories):
            asked = f"{history}\n\nUser: {_words(rng, workload.question_words)}\n\nAssistant:"
            lines.append({"prompt": asked, "output_tokens": workload.output_tokens})
            histories[index] = f"{asked} {_words(rng, workload.answer_words)}"
    return lines[:requests]


def _words(rng: np.random.Generator, count: int) -> str:
    return " ".join(WORDS[index] for index in rng.integers(0, len(WORDS), size=count))


def read_requests(lines: Iterable[str], default_output: int) -> Iterator[Prompt]:
    """Requests of a JSONL file: objects with `prompt` or `messages`, as the OpenAI API takes them, alone or as `body` of a
    batch file's line. The number of output tokens is `output_tokens`, `max_tokens` or `max_completion_tokens`.

    Raises ValueError with the number of a line that cannot be used."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield _request(json.loads(line), default_output)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"line {number} is no object with 'prompt' or 'messages'") from None


def _request(value: Any, default_output: int) -> Prompt:
    body = value.get("body", value)
    tokens = next(
        (body[key] for key in ("output_tokens", "max_tokens", "max_completion_tokens") if body.get(key)),
        default_output,
    )
    prompt = body["prompt"] if "prompt" in body else "\n\n".join(map(_message, body["messages"]))
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(prompt)
    return {"prompt": prompt, "output_tokens": int(tokens)}


def _message(message: Any) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = " ".join(part["text"] for part in content)
    return f"{str(message['role']).capitalize()}: {content}"
