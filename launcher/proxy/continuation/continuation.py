"""Continuing a cut stream on another instance: whether that is possible, and with which request. Pure.

A plain answer is a function of its prompt, so a second instance that is given the prompt and the answer so far
generates what the first would have generated. What an answer depends on besides (tools, grammars, log probabilities,
several choices, penalties that count output tokens only, a seeded sampler) can't be handed over: such a stream ends in
an honest error (eligibility.py).

vLLM's instances are asked for token ids (transcript.py), and the next one is given the same tokens: exact, and counted
exactly. Of other engines only the text is known: chat continues by vLLM's `continue_final_message`
(chat_completion/protocol.py, 0.32), completions by a longer prompt.

The text of a stream lags behind its tokens: half a character waits for its other half, and what might begin a stop
string waits until it does not (vLLM 0.32, v1/engine/detokenizer.py). The tokens that are handed over end with one whose
text is complete, so that the next instance's text begins where that one ends.

Text is not tokens. A text may be cut into other tokens than the engine had chosen, and chat templates trim white space.
So at temperature 0 the text that is handed over stops some words before the cut: `overlap` is what the next instance must
repeat first, word for word, and what the client does not get twice. An instance that generates something else has
diverged (splicer.Diverged), and the answer is repeated from its beginning. At other temperatures only white space that a
template may trim is repeated: a sampled word would differ. There a chat template that makes another prompt of a partial
answer would not be noticed, so it must be known not to (template_probe.py). Nor does a text tell how many
tokens it was: an instance on a busy machine puts several into one event (vLLM's v1/engine/output_processor.py,
RequestOutputCollector), and the next one may make more of the text, or fewer. So where a client asks for its usage, its
answer is repeated from the beginning, or ends in an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from launcher.proxy.continuation import next_request
from launcher.proxy.continuation.next_request import (
    CHAT,
    COMPLETIONS,
    Fields,
    field_value,
    held_back,
    texts_only,
    why_not,
    with_defaults,
)
from launcher.proxy.continuation.transcript import UNREADABLE, Tokens, Transcript, part_of, silent, text_of
from launcher.proxy.openai.stream_options import UsageAsk, usage_ask

REPEAT_EVENTS: Final = 8  # a shorter answer is repeated from the beginning: as fast, and exact in any case
# Tokens that are repeated at temperature 0. Measured with vLLM 0.32 and a random model, whose choices no tokenizer
# would make: of 120 cut streams the text alone continued otherwise in 65 cases; 10 of them were not noticed by one
# repeated word, 1 of about 100 by four tokens. Repeating from the beginning was exact every time.
REWIND_LEAST: Final = 6
REWIND_EVENTS: Final = 16  # no more than so many; languages without spaces have no word to begin with
UNCOUNTED: Final = "its tokens can't be counted: the engine tells no token ids"
_DONE: Final = b"data: [DONE]\n\n"


class EngineTraits(Struct, frozen=True):
    template_fits: bool = False  # True: the chat template is known to continue a partial answer
    one_token_events: bool = True  # False: an event may bring several tokens
    takes_ids: bool = True  # False: it ignores token ids that are given as a prompt
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """What the server applies to requests that name none, by vLLM's names; `most_tokens` caps every request."""


_USUAL: Final = EngineTraits()


class Continuation(Struct, frozen=True):
    """The request for the next instance, and how its answer joins what the client has."""

    body: bytes
    base_tokens: int  # tokens of the answer that are part of the new prompt
    overlap: str = ""  # the text that the next instance repeats first
    prompt_tokens: int | None = None  # of the client's own request, where they are known
    prompt_ids: list[int] | None = None  # given as the prompt; the next instance must confirm them
    repeated_ids: tuple[int, ...] = ()  # tokens that the next instance repeats first
    asks_ids: bool = False  # for token ids of its answer
    only_usage: bool = False  # the text is complete: one token is generated, to learn the prompt's length
    finish_reason: str | None = None  # with only_usage: the end that the client has not been told yet


class Complete(Struct, frozen=True):
    """Only these bytes are missing; no instance is asked."""

    tail: bytes


class NotExact(Struct, frozen=True):
    """The stream can't be continued honestly."""

    reason: str


def plan_continuation(
    path: str,
    body: bytes,
    transcript: Transcript,
    engine: EngineTraits = _USUAL,
    *,
    repeat: bool = False,
) -> Continuation | Complete | NotExact:
    """What to do about a stream that was cut after what `transcript` holds.

    `body` is the client's own request, also at a second cut. `repeat`: the next instance generates the whole answer
    again, after a first attempt diverged; only where sampling is deterministic.
    """
    reason = transcript.odd if path in {CHAT, COMPLETIONS} else f"{path} is no plain stream"
    if reason is not None:
        return NotExact(reason)
    if transcript.done:
        return Complete(b"")
    try:
        fields = msgspec.json.decode(body, type=Fields)
        request = next_request.with_limit(path, fields, engine.sampling_defaults)
        return _Planner(path, request, transcript, engine).plan(repeat=repeat)
    except UNREADABLE:
        return NotExact("a request or a text that can't be read")


class _Planner:
    def __init__(self, path: str, request: Fields, transcript: Transcript, engine: EngineTraits) -> None:
        self._path = path
        self._request = request
        self._transcript = transcript
        self._engine = engine
        self._pieces = transcript.pieces()
        tokens = transcript.tokens()
        self._tokens = tokens if tokens is not None and len(tokens.events) == len(self._pieces) else None
        can_take = engine.takes_ids and (path != CHAT or texts_only(request))
        self._given = self._tokens if can_take else None  # to the next instance, as its prompt
        self._judged = judged = with_defaults(request, engine.sampling_defaults)
        self._begun = any(self._pieces) and transcript.finish_reason is None
        self._certain = field_value(judged, "temperature") == 0
        options = request.get("stream_options")
        self._usage = options is not None and usage_ask(bytes(options)) is UsageAsk.NO

    def plan(self, *, repeat: bool) -> Continuation | Complete | NotExact:
        reason = self._why_not(by_ids=self._given is not None)
        if reason is not None:
            return NotExact(reason)
        if self._transcript.finish_reason is not None:
            return self._end()
        if not self._begun:
            return self._from_start(asks_ids=self._transcript.asks_ids)
        if repeat:
            return self._repeat() if self._certain else NotExact("`temperature` in the request")
        found = None if self._given is None else self._by_ids(self._given)
        return self._by_text() if found is None else found

    def _why_not(self, *, by_ids: bool) -> str | None:
        sent = self._request.keys()
        reason = why_not(self._judged, begun=self._begun, by_ids=by_ids, sent=sent)
        if reason is not None or by_ids or not self._begun or self._certain or self._engine.template_fits:
            return reason
        return (
            "the model's chat template is not known to continue a partial answer"
            if self._path == CHAT
            else None
        )

    def _from_start(self, overlap: str = "", *, asks_ids: bool = False) -> Continuation:
        request = next_request.asking_ids(self._request) if asks_ids else self._request
        return Continuation(msgspec.json.encode(request), 0, overlap, asks_ids=asks_ids)

    def _repeat(self) -> Continuation:
        return self._from_start(text_of(self._pieces))

    def _end(self) -> Continuation | Complete | NotExact:
        """The text is complete, and the client was told so."""
        if not self._usage or self._transcript.usage_seen:
            return Complete(_DONE)
        if self._tokens is not None:
            return Complete(_usage_event(self._transcript, self._tokens) + _DONE)
        if not self._engine.one_token_events:
            return NotExact(UNCOUNTED)
        return self._only_usage(len(self._pieces), None)

    def _only_usage(self, tokens: int, finish_reason: str | None) -> Continuation:
        body = msgspec.json.encode(next_request.one_token(self._request))
        return Continuation(body, tokens, only_usage=True, finish_reason=finish_reason)

    def _by_ids(self, tokens: Tokens) -> Continuation | None:
        """None where no token is known to end where a text does."""
        pieces, held = self._pieces, held_back(self._request)
        count = self._boundary(tokens.events, held)
        if count is None and not self._certain:
            return None
        count = count or 0
        handed = [*chain(*tokens.events[:count])]
        request = next_request.shortened(self._path, self._request, len(handed))
        if request is None:
            return None
        prompt = tokens.prompt + handed
        request = next_request.asking_ids(next_request.with_prompt_ids(self._path, request, prompt))
        length = sum(len(part_of(piece)) for piece in pieces[:count]) + held if count else 0
        # Tokens after the last event with text are forgotten (Transcript.forget_silent).
        last = len(pieces) - silent(pieces)
        return Continuation(
            msgspec.json.encode(request), len(handed), text_of(pieces)[length:], prompt_tokens=len(tokens.prompt),
            prompt_ids=prompt, repeated_ids=(*chain(*tokens.events[count:last]),), asks_ids=True,
        )  # fmt: skip

    def _boundary(self, events: list[list[int]], held: int) -> int | None:
        """How many events the next instance is given by their tokens; None: there is no such number.

        The last of them must bring one token and text: then all text up to that token has come but `held` characters,
        and no half character. At temperature 0 some text after it is repeated, so that a divergence is noticed; else
        none may be.
        """
        lengths = [len(part_of(piece)) for piece in self._pieces]
        told = end = sum(lengths)
        for index in range(len(lengths) - 1, -1, -1):
            reached = told + held
            fits = reached < end if self._certain else reached == end
            if lengths[index] and len(events[index]) == 1 and fits:
                return index + 1
            told -= lengths[index]
        return None

    def _by_text(self) -> Continuation | NotExact:
        if self._certain and len(self._pieces) <= REPEAT_EVENTS:
            return self._repeat()
        reason = self._why_not(by_ids=False)
        if reason is not None:
            return NotExact(reason)
        text, overlap, events = self._cut()
        counted = self._counted(events)
        plan = self._after_text(text, overlap, events if counted is None else counted)
        if not isinstance(plan, Continuation):
            return plan
        if counted is not None and self._tokens is not None:
            return replace(plan, prompt_tokens=len(self._tokens.prompt))
        if self._miscounts(plan):
            return self._repeat() if self._certain else NotExact(UNCOUNTED)
        return plan

    def _after_text(self, text: str, overlap: str, tokens: int) -> Continuation | NotExact:
        if not text:
            return self._from_start(overlap)
        if "<think>" in text or "</think>" in text:  # templates leave an assistant's thoughts out
            return NotExact("thoughts in the text")
        request = next_request.shortened(self._path, self._request, tokens)
        if request is None:
            return self._only_usage(tokens, "length")
        longer = next_request.with_text(self._path, request, text)
        if isinstance(longer, str):
            return NotExact(longer)
        return Continuation(msgspec.json.encode(longer), tokens, overlap)

    def _cut(self) -> tuple[str, str, int]:
        """The text for the next instance's prompt, the text that it repeats, and the events of the first."""
        pieces = self._pieces
        if self._certain:
            cut = _word_start(pieces)
            text, overlap = text_of(pieces[:cut]), text_of(pieces[cut:])
        else:
            whole = text_of(pieces)
            text = whole.rstrip() if self._path == CHAT else whole
            overlap = whole[len(text) :]
            cut, left = len(pieces), len(overlap)
            while left and len(part_of(pieces[cut - 1])) <= left:
                cut -= 1
                left -= len(part_of(pieces[cut]))
        # Tokens whose text had not come yet: half a character, or what may become a stop string.
        held = silent(pieces[:cut])
        if field_value(self._request, "stop"):
            held = max(held, next(index for index, piece in enumerate(pieces) if piece))
        return text, overlap, max(cut - held, 0)

    def _counted(self, events: int) -> int | None:
        """The tokens of so many events; None where they are not known, or may be more than their text's."""
        if self._tokens is None or not events or held_back(self._request):
            return None
        told = self._tokens.events[:events]
        return sum(map(len, told)) if len(told[-1]) == 1 else None

    def _miscounts(self, plan: Continuation) -> bool:
        """Whether the number of tokens that were delivered matters, and is not known."""
        if not plan.base_tokens or plan.only_usage:
            return plan.only_usage and not self._engine.one_token_events
        limits = [field_value(self._request, key) for key in next_request.LIMITS]
        limited = self._path == COMPLETIONS or any(limit is not None for limit in limits)
        return self._usage or (limited and not self._engine.one_token_events)


def _word_start(pieces: list[bytes]) -> int:
    """The last event but REWIND_LEAST that begins with white space while the text before it does not end so.

    Without one among the last REWIND_EVENTS: after the last of them that does not end in white space.
    """
    texts = [part_of(piece) for piece in pieces[-REWIND_EVENTS:]]
    skipped = len(pieces) - len(texts)
    candidates = range(len(texts) - REWIND_LEAST, 0, -1)
    for index in candidates:
        if texts[index][:1].isspace() and not "".join(texts[:index])[-1:].isspace():
            return skipped + index
    for index in candidates:
        if texts[index - 1] and not texts[index - 1][-1:].isspace():
            return skipped + index
    return skipped


def _usage_event(transcript: Transcript, tokens: Tokens) -> bytes:
    """As vLLM's last event but one."""
    prompt, completion = len(tokens.prompt), tokens.count
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
    head = {"id": transcript.id, "object": transcript.object, "created": transcript.created}
    chunk: dict[str, object] = {**head, "model": transcript.model, "choices": [], "usage": usage}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
