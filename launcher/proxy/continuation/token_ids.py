"""Token ids of one stream: what its instance is asked for with `return_token_ids`, taken out of what its client gets.

vLLM 0.32 (entrypoints/openai/chat_completion/serving.py, completion/serving.py) writes the prompt's ids into the
first event and the ids of its tokens into each event; where nobody asks, it writes null in both places, and that
is what the client gets. Nothing is parsed: within a JSON string every quotation mark is escaped, so no text can
pass for one of these keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FIELD: Final = b'"return_token_ids"'
ASK: Final = b'{"return_token_ids":true,'
"""What a request's `{` becomes."""

MOST_BODY_BYTES: Final = 256 * 1024
"""Larger requests are not asked about: the first event would bring hundreds of thousands of ids."""

_PROMPT: Final = b'"prompt_token_ids":['
_EACH: Final = b'"token_ids":['
_NONE: Final = b'"token_ids":null'
_EMPTY: Final = b'"delta":{}'
_GOING_ON: Final = b'"finish_reason":null'


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens of a stream so far."""

    prompt: list[int]
    events: list[list[int]]  # of each event that brought tokens, in order

    @property
    def count(self) -> int:
        """Tokens of the answer."""
        return sum(len(event) for event in self.events)


class TokenIds:
    """What has been told so far. One entry per event that brought tokens, as the text in Transcript."""

    __slots__ = ("entries", "lost", "prompt")

    def __init__(self) -> None:
        self.prompt: bytes | None = None  # "1,2,3"
        self.entries = bytearray()  # of each event: its ids, and "]"
        self.lost = False  # an event told text without ids: nothing is known of the stream's tokens any more

    def take(self, event: bytes) -> tuple[bytes, bytes | None]:
        """One event without ids, and the ids of its tokens ("12,13"); None where it has none."""
        if self.prompt is None and _PROMPT in event:
            event, self.prompt = _cut(event, _PROMPT)
        elif _PROMPT in event:
            event, _ = _cut(event, _PROMPT)
        if _EACH not in event:
            return event, None
        return _cut(event, _EACH)

    def note(self, ids: bytes | None) -> None:
        """The ids of one event that Transcript keeps."""
        if ids is None:
            self.lost = True
        else:
            self.entries += ids
            self.entries += b"]"

    def of_events(self) -> list[list[int]]:
        """The ids of each event."""
        return [numbers(entry) for entry in bytes(self.entries).split(b"]")[:-1]]

    def keep(self, count: int) -> None:
        """Forget what came after the first `count` events."""
        entries = bytes(self.entries).split(b"]")[:count]
        self.entries[:] = b"".join(entry + b"]" for entry in entries)


def numbers(ids: bytes) -> list[int]:
    """Of "1,2,3"."""
    return [int(word) for word in ids.split(b",")] if ids else []


def asked_for(body: bytes | bytearray) -> bool:
    """Whether a client asks for ids itself, or says anything of them: then its events stay as they are."""
    return FIELD in body


def around_ids(suffix: bytes) -> tuple[bytes, bytes] | None:
    """Of what follows an ordinary event's text, with null for its ids: what stands before them and after them."""
    until, key, after = suffix[1:].rpartition(_NONE)
    return (until + _EACH, b"]" + after) if key else None


def without_meaning(event: bytes) -> bool:
    """An event that vLLM writes for the ids' sake alone: a parser keeps the text of its tokens back."""
    return _EMPTY in event and _GOING_ON in event


def _cut(event: bytes, key: bytes) -> tuple[bytes, bytes]:
    """The event with null in the place of the list behind `key`, and what was in the list."""
    start = event.index(key) + len(key)
    end = event.find(b"]", start)
    if end < 0:
        return event, b""
    return event[: start - 1] + b"null" + event[end + 1 :], event[start:end]
