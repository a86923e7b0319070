"""Handing a cut stream over by token ids: which of its tokens, and what has to come again.

The text of a stream lags behind its tokens: half a character waits for its other half, and what might begin a stop
string waits until it does not (vLLM 0.32, v1/engine/detokenizer.py). What is handed over ends with a token whose text
has come to its end, so the next instance's text begins where that one ends.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from launcher.proxy.continuation.eligibility import Raws, field_value
from launcher.proxy.continuation.transcript import Tokens, Transcript, part_of, text_of


@dataclass(frozen=True, slots=True)
class ByIds:
    """What a continuation by token ids must bring."""

    prompt: list[int]  # of the request that goes to the next instance; its first event must say the same
    again: list[int]  # tokens that the next instance says again first


@dataclass(frozen=True, slots=True)
class Handed:
    """What the next instance is given."""

    plan: ByIds
    count: int  # tokens of the answer in its prompt
    eat: str  # the text that comes again


def hand_over(pieces: list[bytes], tokens: Tokens, held: int, *, certain: bool) -> Handed | None:
    """None where no token is known to end where a text does. `held`: see held_back.

    An answer that is `certain` may begin again.
    """
    count = _boundary(pieces, tokens.events, held, certain=certain)
    if count is None and not certain:
        return None
    count = count or 0
    handed = [token for event in tokens.events[:count] for token in event]
    last = max(number for number, piece in enumerate(pieces, 1) if piece)  # what came behind it is forgotten
    again = [token for event in tokens.events[count:last] for token in event]
    length = sum(len(part_of(piece)) for piece in pieces[:count]) + held if count else 0
    plan = ByIds(tokens.prompt + handed, again)
    return Handed(plan, len(handed), text_of(pieces)[length:])


def texts_only(request: Raws) -> bool:
    """No message has a part that is no text: vLLM renders those whatever token ids it is given."""
    messages = msgspec.json.decode(request["messages"])
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(isinstance(part, str) or part.get("type") == "text" for part in parts)


def held_back(request: Raws) -> int:
    """Characters that an instance holds back for they might begin a stop string (vLLM's v1/engine/detokenizer.py)."""
    stop = field_value(request, "stop") or []
    return max(len(text) for text in ([stop] if isinstance(stop, str) else stop)) - 1 if stop else 0


def _boundary(pieces: list[bytes], events: list[list[int]], held_back: int, *, certain: bool) -> int | None:
    """How many events the next instance is given by their tokens; None: there is no such number.

    The last of them must bring one token and text: then all text up to that token has come but `held_back`, and
    no half character. Where an answer is certain some text behind it has to come again, so that an instance that
    is on another way is noticed; where it is not, none may.
    """
    lengths = [len(part_of(piece)) for piece in pieces]
    end = sum(lengths)
    told = end
    for index in range(len(pieces) - 1, -1, -1):
        reached = told + held_back
        if lengths[index] and len(events[index]) == 1 and (reached < end if certain else reached == end):
            return index + 1
        told -= lengths[index]
    return None


def usage_event(transcript: Transcript, tokens: Tokens) -> bytes:
    """As vLLM's last event but one."""
    prompt, completion = len(tokens.prompt), tokens.count
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    head = {"id": transcript.id, "object": transcript.object, "created": transcript.created}
    chunk: dict[str, object] = {**head, "model": transcript.model, "choices": [], "usage": usage}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
