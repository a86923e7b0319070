"""The language of the chaos engines: the next token is a function of all text before it.

So the answer to a prompt is the same everywhere, an answer that is handed over goes on as it would have,
and a client knows what it must get to the letter. The chat template trims white space as Llama 3's does.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from typing import Any

WORDS = (
    *(
        " the",
        " quick",
        " brown",
        " fox",
        " jumps",
        " over",
        " lazy",
        " dog",
        " core",
        " node",
        " memory",
        " é",
    ),
    *("-ly", "-ing", "-ness", ",", ".", "\n", '"', "\\", " 😀", "7", "\t", " 的"),
)
HALVES = {" 😀"}  # two tokens, of which the first brings no text
END_ONE_IN = 311
DEFAULT_MAX_TOKENS = 16
_TOKEN = re.compile(r"(?P<two> 😀)| ?[^\W\d_]+|-[a-z]+|\d|\s|[^\w\s]|_")


def count(text: str) -> int:
    """The tokens of a text; independent of how it was split between tokens."""
    return sum(2 if found["two"] else 1 for found in _TOKEN.finditer(text))


def render(path: str, body: dict[str, Any]) -> str:
    """The prompt."""
    if "messages" not in body:
        return str(body["prompt"])
    said = [f"[{message['role']}]{str(message['content']).strip()}" for message in body["messages"]]
    return "".join(said) if body.get("continue_final_message") else "".join(said) + "[assistant]"


def speak(context: str, limit: int) -> Iterator[tuple[str, str | None]]:
    """(text, finish_reason) of each token that follows; the last one has a reason."""
    state = zlib.crc32(context.encode())
    begun = not context.endswith("[assistant]")
    told = 0
    while True:
        word = WORDS[state % len(WORDS)]
        if state % END_ONE_IN == 0 and begun:
            yield "", "stop"
            return
        if not begun:  # a chat answer does not begin with white space, which the template would trim
            word = word.strip() or "Well"
            begun = True
        if word in HALVES:
            told += 1
            yield "", "length" if told == limit else None
            if told == limit:
                return
        told += 1
        yield word, "length" if told == limit else None
        if told == limit:
            return
        state = zlib.crc32(word.encode(), state)


def limit_of(path: str, body: dict[str, Any]) -> int:
    """The most tokens that a request wants."""
    return int(body.get("max_completion_tokens") or body.get("max_tokens") or DEFAULT_MAX_TOKENS)


def answer(path: str, body: dict[str, Any]) -> tuple[str, str, dict[str, int]]:
    """The whole answer: text, finish reason, usage."""
    context = render(path, body)
    tokens = list(speak(context, limit_of(path, body)))
    prompt, said = count(context), len(tokens)
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + said, "completion_tokens": said}
    return "".join(text for text, _ in tokens), str(tokens[-1][1]), usage
