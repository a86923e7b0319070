"""The next instance's events as if the first had gone on: same id, no second beginning, the sums of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from launcher.proxy.continuation import Continuation
from launcher.proxy.sse import EVENT_END
from launcher.proxy.transcript import UNREADABLE, Pattern, Transcript, event_data


class Diverged(Exception):  # noqa: N818 - it is a finding, not a fault
    """The next instance did not repeat the end of what the client has; the stream must end in an error."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The rest of a cut stream: what the next instance is asked, and how its answer joins what was said."""

    body: bytes
    rewriter: ContinuationRewriter


class ContinuationRewriter:
    """One continued answer. `feed` takes whole events and returns what may pass, possibly nothing.

    What it returns still has to be fed to the transcript, as everything that passes; the transcript and
    the client's request are then all that a further cut needs.
    """

    def __init__(self, plan: Continuation, transcript: Transcript) -> None:
        self._plan = plan
        self.from_start = plan.base_tokens == 0  # the next instance says the whole answer again
        self._transcript = transcript
        self._theirs = Pattern()  # of the next instance's events
        self._ours = transcript.pattern  # of the events as the client knows them
        self._eat = plan.eat
        self._held = (
            0  # tokens without text (half a character) at the end of what the client has: they come again
        )
        for piece in reversed(transcript.pieces()):
            if piece:
                break
            self._held += 1

    def feed(self, payload: bytes) -> bytes:
        """Raises Diverged: what comes is not the continuation of what was said."""
        out = bytearray()
        start = 0
        for end in EVENT_END.finditer(payload):
            event, start = payload[start : end.end()], end.end()
            piece = self._theirs.piece(event)
            out += self._rewrite(event) if piece is None else self._ours.prefix + piece + self._ours.suffix
        if start < len(payload):
            raise Diverged("cannot go on: an event that is larger than any should be")
        return bytes(out)

    def _rewrite(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None:
            return event
        if data == b"[DONE]":
            self._must_be_eaten()
            return event
        try:
            chunk = msgspec.json.decode(data, type=dict[str, Any])
            # Without choices it is an error event: it passes, and ends the stream.
            return self._rewrite_chunk(event, chunk) if "choices" in chunk else event
        except UNREADABLE as error:
            raise Diverged(f"cannot go on: an event that is no chunk ({error})") from None

    def _rewrite_chunk(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        known = self._transcript
        if known.id is not None:
            chunk["id"] = known.id
            chunk |= {"created": known.created} if "created" in chunk else {}
            chunk |= {"model": known.model} if "model" in chunk else {}
        if chunk.get("usage"):
            self._add_up(chunk["usage"])
        choices = chunk["choices"]
        if choices and not self._passes(choices[0]):
            return b""
        passed = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        if choices and not chunk.get("usage") and self._plain(choices[0]):
            self._learn(event, passed)
        return passed

    def _plain(self, choice: dict[str, Any]) -> bool:
        """Alike events may pass unparsed from here on."""
        return (
            not self._eat
            and not self._held
            and not self._plan.only_usage
            and not any(value for key, value in choice.items() if key not in {"index", "delta", "text"})
            and not set(choice.get("delta", {})) - {"content"}
            and (choice.get("text") is not None or choice.get("delta", {}).get("content") is not None)
        )

    def _learn(self, event: bytes, passed: bytes) -> None:
        if self._ours.known:
            self._theirs.learn(event)
            return
        ours = Pattern()
        if ours.learn(passed) is not None and self._theirs.learn(event) is not None:
            self._ours = ours

    def _passes(self, choice: dict[str, Any]) -> bool:
        """Take out of a choice what the client has already; False when nothing is left."""
        delta = choice.get("delta", {})
        opening = delta.get("role") is not None and self._transcript.role_sent
        if opening:
            del delta["role"]
        finish = choice.get("finish_reason")
        holder, key = (choice, "text") if "text" in choice else (delta, "content")
        if self._plan.only_usage:
            if finish is None or self._plan.finish_reason is None:
                return False
            choice["finish_reason"], choice["stop_reason"] = self._plan.finish_reason, None
            holder[key] = ""
            return True
        text = holder.get(key)
        if finish is None and not text and (self._eat or self._held):
            self._held -= not self._eat
            return False
        if text and not self._eat:
            self._held = 0
        if self._eat and text:
            holder[key] = rest = self._bite(text)
            if not rest and finish is None:
                return False
        if finish is not None:
            self._must_be_eaten()
            return True
        return not opening or bool(text) or bool(delta.keys() - {"content"})

    def _bite(self, text: str) -> str:
        """What of the text is new."""
        if self._eat.startswith(text):
            self._eat = self._eat[len(text) :]
            return ""
        if text.startswith(self._eat):
            rest, self._eat = text[len(self._eat) :], ""
            return rest
        raise Diverged(f"cannot go on: {self._eat!r} should come again, {text!r} came")

    def _must_be_eaten(self) -> None:
        if self._eat:
            raise Diverged(f"cannot go on: {self._eat!r} should come again, the end came")

    def _add_up(self, usage: dict[str, Any]) -> None:
        base = self._plan.base_tokens
        if self._plan.only_usage:  # the client's own prompt, and one token that nobody gets
            usage["completion_tokens"] = base
        else:
            usage["prompt_tokens"] = max(usage["prompt_tokens"] - base, 0)
            usage["completion_tokens"] += base
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])
