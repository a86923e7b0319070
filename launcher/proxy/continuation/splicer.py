"""The next instance's events as if the first had continued: same id, no second beginning, the sums of both."""

from __future__ import annotations

from typing import Any

import msgspec

from launcher.proxy.continuation.continuation import (
    Complete,
    Continuation,
    EngineTraits,
    NotExact,
    plan_continuation,
)
from launcher.proxy.continuation.transcript import (
    PARSED_BYTES,
    UNREADABLE,
    Transcript,
    silent,
)
from launcher.proxy.sse.ends import finish_reason_of
from launcher.proxy.sse.fast_path import IDS_KEY, PROMPT_KEY, EventPattern, take_list
from launcher.proxy.sse.tracker import event_data, event_ends

_PLAIN_KEYS = frozenset({"index", "delta", "text", "token_ids"})


class Diverged(Exception):  # noqa: N818 - a finding about the instance
    """The next instance did not repeat the end of what the client has."""


class IdsIgnored(Diverged):
    """The next instance rendered a prompt of its own where token ids were given: its engine does not know them."""


class Splicer:
    """One continued answer. `feed` takes whole events and returns what may pass, possibly nothing.

    What it returns must be fed to the transcript, as everything that passes; the transcript and the client's request
    are then all that a further cut needs.
    """

    def __init__(self, plan: Continuation, transcript: Transcript) -> None:
        self.body = plan.body  # of the next instance's request
        self.from_start = plan.base_tokens == 0  # the next instance generates the whole answer again
        # The tokens of what the client has already are known: a text does not tell how many it was.
        self.counts_exactly = self.from_start or plan.prompt_tokens is not None
        self._plan = plan
        self._transcript = transcript
        self._theirs = EventPattern()  # of the next instance's events
        self._around_ids: tuple[bytes, bytes] | None = None  # of those that bring token ids
        self._ours = transcript.pattern  # of the events as the client knows them
        self._overlap = plan.overlap
        self._prompt = plan.prompt_ids  # until the instance has confirmed it
        self._repeated_ids = list(plan.repeated_ids)
        # Tokens without text (half a character) at the end of what the client has: they come again.
        self._held = silent(transcript.pieces())

    def feed(self, payload: bytes) -> bytes:
        """Raises Diverged."""
        out = bytearray()
        start = 0
        for end in event_ends(payload):
            event, start = payload[start:end], end
            piece = self._theirs.piece(event)
            if piece is not None:
                out += self._ours.prefix + piece + self._ours.suffix
            elif self._around_ids is not None and self._alike(event, *self._around_ids):
                out += self._ours.prefix + event[len(self._theirs.prefix) :]
            else:
                out += self._rewrite(event)
        if start < len(payload):
            raise Diverged("diverged: an event is too large")
        return bytes(out)

    def _rewrite(self, event: bytes) -> bytes:
        data = event_data(event)
        if data is None:
            return event
        if data == b"[DONE]":
            self._no_overlap_left()
            return event
        if len(event) > PARSED_BYTES and len(take_list(event, PROMPT_KEY)[0]) > PARSED_BYTES:
            raise Diverged("diverged: an event is too large")
        try:
            chunk = msgspec.json.decode(data, type=dict[str, Any])
            # Without choices it is an error event, which ends the stream.
            return self._rewrite_chunk(event, chunk) if "choices" in chunk else event
        except UNREADABLE as error:
            raise Diverged(f"diverged: an event that is no chunk ({error})") from None

    def _rewrite_chunk(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        known = self._transcript
        if known.id is not None:
            chunk["id"] = known.id
            chunk |= {"created": known.created} if "created" in chunk else {}
            chunk |= {"model": known.model} if "model" in chunk else {}
        usage = chunk.get("usage")
        if isinstance(usage, dict) and usage:  # a string stands for null
            self._add_up(usage)
        choices = chunk["choices"]
        if choices and self._plan.prompt_ids is not None:
            self._take_ids(chunk, choices[0])
        if choices and not self._passes(choices[0]):
            return b""
        passed = b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        if choices and not chunk.get("usage") and self._plain(choices[0]):
            self._learn(event, passed)
        return passed

    def _take_ids(self, chunk: dict[str, Any], choice: dict[str, Any]) -> None:
        """Take the prompt's ids out of an event, and those of tokens that the client has already."""
        for holder in (chunk, choice):
            if holder.get("prompt_token_ids") is not None:
                if self._prompt is not None and holder["prompt_token_ids"] != self._prompt:
                    raise IdsIgnored("token ids ignored: the instance rendered another prompt")
                holder["prompt_token_ids"] = self._prompt = None
        if self._prompt is not None:
            raise IdsIgnored("token ids ignored: the instance does not tell its prompt")
        told = choice.get("token_ids") or []
        count = min(len(told), len(self._repeated_ids))
        if told[:count] != self._repeated_ids[:count]:
            wanted = self._repeated_ids[:count]
            raise Diverged(f"diverged: tokens {wanted} should be repeated, {told[:count]} came")
        if count:
            choice["token_ids"] = told[count:]
            del self._repeated_ids[:count]

    def _plain(self, choice: dict[str, Any]) -> bool:
        """Whether events like this may pass unparsed from now on."""
        return (
            not self._overlap
            and not self._held
            and not self._plan.only_usage
            and not self._repeated_ids
            and not any(value for key, value in choice.items() if key not in _PLAIN_KEYS)
            and not set(choice.get("delta", {})) - {"content"}
            and (choice.get("text") is not None or choice.get("delta", {}).get("content") is not None)
        )

    def _learn(self, event: bytes, passed: bytes) -> None:
        if PROMPT_KEY in event:
            return
        event, ids = take_list(event, IDS_KEY)
        ours = EventPattern()
        if not ours.learn(take_list(passed, IDS_KEY)[0]) or not self._theirs.learn(event):
            return
        if not self._ours.known or ids is not None:
            self._ours = ours
        if ids is not None:
            self._around_ids = self._theirs.around_ids()

    def _alike(self, event: bytes, until: bytes, after: bytes) -> bool:
        """Whether an event with token ids is usual, whatever its text and ids."""
        if not event.startswith(self._theirs.prefix):
            return False
        ids = event.find(b'"', len(self._theirs.prefix)) + 1 + len(until)
        return event.startswith(until, ids - len(until)) and event[event.find(b"]", ids) :] == after

    def _passes(self, choice: dict[str, Any]) -> bool:
        """Take out of a choice what the client has already. False: nothing is left."""
        delta = choice.get("delta", {})
        opening = delta.get("role") is not None and self._transcript.role_sent
        if opening:
            del delta["role"]
        finish = finish_reason_of(choice)
        holder, key = (choice, "text") if "text" in choice else (delta, "content")
        if self._plan.only_usage:
            if finish is None or self._plan.finish_reason is None:
                return False
            choice["finish_reason"], choice["stop_reason"] = self._plan.finish_reason, None
            holder[key] = ""
            return True
        text = holder.get(key)
        if choice.get("token_ids"):  # new ones, with or without text
            self._held = 0
        elif finish is None and not text and (self._overlap or self._held):
            self._held -= not self._overlap
            return False
        if text and not self._overlap:
            self._held = 0
        if self._overlap and text:
            holder[key] = rest = self._new_text(text)
            if not rest and finish is None and not choice.get("token_ids"):
                return False
        if finish is not None:
            self._no_overlap_left()
            return True
        return not opening or bool(text) or bool(delta.keys() - {"content"})

    def _new_text(self, text: str) -> str:
        if self._overlap.startswith(text):
            self._overlap = self._overlap[len(text) :]
            return ""
        if text.startswith(self._overlap):
            rest, self._overlap = text[len(self._overlap) :], ""
            return rest
        raise Diverged(f"diverged: {self._overlap!r} should be repeated, {text!r} came")

    def _no_overlap_left(self) -> None:
        if self._overlap:
            raise Diverged(f"diverged: {self._overlap!r} should be repeated, it ended")

    def _add_up(self, usage: dict[str, Any]) -> None:
        base, prompt = self._plan.base_tokens, self._plan.prompt_tokens
        if prompt is not None:
            usage["prompt_tokens"] = prompt
            usage["completion_tokens"] += base
        elif self._plan.only_usage:  # the client's own prompt, and one token that it does not get
            usage["completion_tokens"] = base
        else:
            usage["prompt_tokens"] = max(usage["prompt_tokens"] - base, 0)
            usage["completion_tokens"] += base
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = min(details["cached_tokens"], usage["prompt_tokens"])


def continue_stream(
    path: str, body: bytes, transcript: Transcript, engine: EngineTraits, *, repeat: bool = False
) -> Splicer | Complete | NotExact:
    """See plan_continuation. A Splicer: send its `body` to another instance, and feed it that instance's events.

    `transcript` is changed: what the next instance repeats, and token ids that it is not asked for, are forgotten.
    """
    if repeat:
        transcript.forget_ids()
    plan = plan_continuation(path, body, transcript, engine, repeat=repeat)
    if not isinstance(plan, Continuation):
        return plan
    if plan.asks_ids:
        transcript.forget_silent()
    else:
        transcript.forget_ids()
    return Splicer(plan, transcript)
