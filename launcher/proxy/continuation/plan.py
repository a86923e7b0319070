"""Going on with a cut stream on another instance: may it, with which request.

A plain answer is a function of its prompt, so a second instance that is given the prompt and the answer so far
says what the first would have said. What an answer depends on besides (tools, grammars, log probabilities, several
choices, penalties that count output tokens only, a seeded sampler) can't be handed over, and such a stream ends in
an honest error (handover.py).

vLLM's instances are asked for token ids (token_ids.py), and the next one is given the same tokens: exact, and counted
exactly (by_ids.py). Of other engines only the text is known: chat goes on by vLLM's `continue_final_message`
(chat_completion/protocol.py, 0.32), completions by a longer prompt.

Text is not tokens. A text may be cut into other tokens than the engine had chosen, and chat templates trim
white space. So at temperature 0 the text that is handed over stops some words before the cut: `eat` is what
the next instance must say again first, word for word, and what the client does not get twice. An instance
that says something else is on another way (Diverged), and the answer is repeated from its beginning. At
other temperatures only white space that a template may trim has to come again: a sampled word would differ.
There a chat template that makes another prompt of a partial answer would not be noticed, so it must be known
not to (template_check.py). Nor does a text tell how many tokens it was: an instance on a busy machine puts several
into one event (vLLM's v1/engine/output_processor.py, RequestOutputCollector), and the next one may make more of the
text, or fewer. So where a client asks for its usage, its answer is repeated from the beginning, or ends in an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from launcher.proxy.continuation.by_ids import ByIds, hand_over, held_back, texts_only, usage_event
from launcher.proxy.continuation.eligibility import Raws, field_value, why_not, with_defaults
from launcher.proxy.continuation.transcript import UNREADABLE, Tokens, Transcript, part_of, text_of

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
COMPLETION_MAX_TOKENS = (
    16  # what vLLM assumes without `max_tokens`, or with null (completion/protocol.py, as OpenAI's API)
)
_LIMITS = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}  # and the least that each may be
_RETURN_IDS: Final = "return_token_ids"
_TRUE: Final = msgspec.Raw(b"true")
REPEAT_EVENTS = 8  # an answer that had come no further begins again: as fast, and exact in any case
# Tokens that must come again where there is no chance. Measured with vLLM 0.32 and a random model, whose
# choices no tokenizer would make: of 120 cut streams the text alone went on otherwise in 65 cases; 10 of them
# were not noticed by one word that came again, 1 of about 100 by four tokens. `repeat` was exact every time.
UNCOUNTED = "its tokens can't be counted: the engine tells no token ids"
REWIND_LEAST = 6
REWIND_EVENTS = 16  # no more than so many; languages without spaces have no word to begin with


@dataclass(frozen=True, slots=True)
class Server:
    """What is known of a model's instances."""

    template_fits: bool = True  # False: the chat template is known not to go on with a partial answer
    one_token_events: bool = True  # False: an event may bring several tokens
    takes_ids: bool = True  # False: it ignores token ids that are given as a prompt
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """What the server applies to requests that name none, by vLLM's names; `most_tokens` caps every request."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """The request that goes to the next instance, and how its answer joins what the client has."""

    body: bytes
    base_tokens: int  # tokens of the answer that are part of the new prompt
    eat: str = ""  # the text that the next instance repeats first
    prompt_tokens: int | None = None  # of the client's own request, where they are known
    by_ids: ByIds | None = None  # the prompt is given by token ids
    asks_ids: bool = False  # for those of its answer
    only_usage: bool = False  # the text is whole: one token is asked for, just to learn the prompt's length
    finish_reason: str | None = None  # with only_usage: the end that the client has not been told yet


@dataclass(frozen=True, slots=True)
class Complete:
    """Nothing is missing but these bytes; nobody needs to be asked."""

    tail: bytes


@dataclass(frozen=True, slots=True)
class NotExact:
    """The stream can't be continued honestly."""

    reason: str


def plan_continuation(
    path: str, body: bytes, transcript: Transcript, server: Server = Server(), *, repeat: bool = False
) -> Continuation | Complete | NotExact:
    """What to do about a stream that was cut after what `transcript` holds.

    `body` is the client's own request, also at a second cut. `repeat` has the next instance say everything
    again: for a second attempt after `Diverged`, and only where there is no chance in the answer.
    """
    reason = transcript.odd if path in {CHAT, COMPLETIONS} else f"{path} is no plain stream"
    if reason is not None:
        return NotExact(reason)
    if transcript.done:
        return Complete(b"")
    try:
        request = _limited(path, msgspec.json.decode(body, type=Raws), server.sampling_defaults)
        return _Planner(path, request, transcript, server).plan(repeat=repeat)
    except UNREADABLE:
        return NotExact("a request or a text that can't be read")


class _Planner:
    """One decision."""

    def __init__(self, path: str, request: Raws, transcript: Transcript, server: Server) -> None:
        self._path = path
        self._request = request
        self._transcript = transcript
        self._server = server
        self._pieces = transcript.pieces()
        tokens = transcript.tokens()
        self._tokens = tokens if tokens is not None and len(tokens.events) == len(self._pieces) else None
        can_take = server.takes_ids and (path != CHAT or texts_only(request))
        self._given = self._tokens if can_take else None  # to the next instance, as its prompt
        self._judged = judged = with_defaults(request, server.sampling_defaults)
        self._going_on = any(self._pieces) and transcript.finish_reason is None
        self._certain = field_value(judged, "temperature") == 0
        self._usage = bool((field_value(request, "stream_options") or {}).get("include_usage"))

    def plan(self, *, repeat: bool) -> Continuation | Complete | NotExact:
        reason = self._why_not(by_ids=self._given is not None)
        if reason is not None:
            return NotExact(reason)
        if self._transcript.finish_reason is not None:
            return self._end()
        if not self._going_on:
            return self._from_start(asks_ids=self._transcript.asks_ids)
        if repeat:
            return self._repeat() if self._certain else NotExact("`temperature` in the request")
        found = None if self._given is None else self._by_ids(self._given)
        return self._by_text() if found is None else found

    def _why_not(self, *, by_ids: bool) -> str | None:
        return why_not(self._judged, spoken=self._going_on, by_ids=by_ids, sent=self._request.keys())

    def _from_start(self, eat: str = "", *, asks_ids: bool = False) -> Continuation:
        request = self._request | ({_RETURN_IDS: _TRUE} if asks_ids else {})
        return Continuation(msgspec.json.encode(request), 0, eat, asks_ids=asks_ids)

    def _repeat(self) -> Continuation:
        return self._from_start(text_of(self._pieces))

    def _end(self) -> Continuation | Complete | NotExact:
        """The text is whole, and so the end was told."""
        if not self._usage or self._transcript.usage_seen:
            return Complete(b"data: [DONE]\n\n")
        if self._tokens is not None:
            return Complete(usage_event(self._transcript, self._tokens) + b"data: [DONE]\n\n")
        if not self._server.one_token_events:
            return NotExact(UNCOUNTED)
        return _usage(self._request, len(self._pieces), None)

    def _by_ids(self, tokens: Tokens) -> Continuation | None:
        """None where no token is known to end where a text does."""
        handed = hand_over(self._pieces, tokens, held_back(self._request), certain=self._certain)
        new = dict(self._request)
        if handed is None or not _shorten(self._path, new, handed.count):
            return None
        new[_RETURN_IDS] = _TRUE
        ids = msgspec.Raw(msgspec.json.encode(handed.plan.prompt))
        if self._path == CHAT:  # vllm#48145; vllm#55771 proposes a field of its own for it
            new["kv_transfer_params"] = msgspec.Raw(msgspec.json.encode({"prompt_token_ids": ids}))
        else:
            new["prompt"] = ids
        body = msgspec.json.encode(new)
        return Continuation(
            body, handed.count, handed.eat,
            prompt_tokens=len(tokens.prompt), by_ids=handed.plan, asks_ids=True,
        )  # fmt: skip

    def _by_text(self) -> Continuation | NotExact:
        if self._certain and len(self._pieces) <= REPEAT_EVENTS:
            return self._repeat()
        reason = self._why_not_by_text()
        if reason is not None:
            return NotExact(reason)
        handed = _hand_over(self._path, self._request, self._pieces, certain=self._certain)
        counted = self._counted(handed.tokens)
        if counted is not None:
            handed = replace(handed, tokens=counted)
        plan = _go_on(self._path, self._request, handed)
        if not isinstance(plan, Continuation):
            return plan
        if counted is not None and self._tokens is not None:
            return replace(plan, prompt_tokens=len(self._tokens.prompt))
        if self._miscounts(plan):
            return self._repeat() if self._certain else NotExact(UNCOUNTED)
        return plan

    def _why_not_by_text(self) -> str | None:
        if self._path == CHAT and not self._server.template_fits and not self._certain:
            return "the chat template of the model does not go on with a partial answer"
        return self._why_not(by_ids=False)

    def _counted(self, events: int) -> int | None:
        """The tokens of so many events; None where they are not known, or may be more than their text's."""
        if self._tokens is None or not events or held_back(self._request):
            return None
        told = self._tokens.events[:events]
        return sum(len(event) for event in told) if len(told[-1]) == 1 else None

    def _miscounts(self, plan: Continuation) -> bool:
        """Whether the number of tokens that were delivered matters, and is not known."""
        if not plan.base_tokens or plan.only_usage:
            return plan.only_usage and not self._server.one_token_events
        limited = self._path == COMPLETIONS or any(
            field_value(self._request, key) is not None for key in _LIMITS
        )
        return self._usage or (limited and not self._server.one_token_events)


def _limited(path: str, request: Raws, defaults: Mapping[str, float]) -> Raws:
    """The request with the limits that the server would set, written out (vLLM's get_max_tokens)."""
    governing = "max_tokens"
    if path == CHAT and field_value(request, "max_completion_tokens") is not None:
        governing = "max_completion_tokens"
    limit = field_value(request, governing)
    if limit is None:
        limit = defaults.get("max_tokens") if path == CHAT else COMPLETION_MAX_TOKENS
    most = defaults.get("most_tokens")
    limits = [value for value in (limit, most) if value is not None]
    if not limits or (path == COMPLETIONS and most is None):
        return request
    return request | {governing: msgspec.Raw(b"%d" % min(limits))}


@dataclass(frozen=True, slots=True)
class _Handed:
    text: str  # for the next instance's prompt
    eat: str
    tokens: int  # in text


def _go_on(path: str, request: Raws, handed: _Handed) -> Continuation | NotExact:
    if not handed.text:
        return Continuation(msgspec.json.encode(request), 0, handed.eat)
    if "<think>" in handed.text or "</think>" in handed.text:  # templates leave an assistant's thoughts out
        return NotExact("thoughts in the text")
    tokens = handed.tokens
    new = dict(request)
    if not _shorten(path, new, tokens):
        return _usage(request, tokens, "length")
    reason = _extend_messages(new, handed.text) if path == CHAT else _extend_prompt(new, handed.text)
    return Continuation(msgspec.json.encode(new), tokens, handed.eat) if reason is None else NotExact(reason)


def _usage(request: Raws, tokens: int, finish_reason: str | None) -> Continuation:
    """The client's own request for one token: its usage tells the prompt's length."""
    new = dict(request)
    for key in ("max_tokens", "max_completion_tokens"):
        if key in new:
            new[key] = msgspec.Raw(b"1")
    new["max_tokens"] = msgspec.Raw(b"1")
    new["min_tokens"] = msgspec.Raw(b"0")
    return Continuation(msgspec.json.encode(new), tokens, only_usage=True, finish_reason=finish_reason)


def _hand_over(path: str, request: Raws, pieces: list[bytes], *, certain: bool) -> _Handed:
    if certain:
        cut = _word_start(pieces)
        text, eat = text_of(pieces[:cut]), text_of(pieces[cut:])
    else:
        whole = text_of(pieces)
        text = whole.rstrip() if path == CHAT else whole
        eat = whole[len(text) :]
        cut, left = len(pieces), len(eat)
        while left and len(part_of(pieces[cut - 1])) <= left:
            cut -= 1
            left -= len(part_of(pieces[cut]))
    held = 0  # tokens whose text had not come yet: half a character, or what may become a stop string
    while held < cut and not pieces[cut - held - 1]:
        held += 1
    if field_value(request, "stop"):
        held = max(held, next(index for index, piece in enumerate(pieces) if piece))
    return _Handed(text, eat, max(cut - held, 0))


def _word_start(pieces: list[bytes]) -> int:
    """The last event but REWIND_LEAST that begins with white space while the text before it does not end so.

    Without one among the last REWIND_EVENTS: after the last of them that does not end in white space.
    """
    texts = [part_of(piece) for piece in pieces[-REWIND_EVENTS:]]
    skipped = len(pieces) - len(texts)
    for index in range(len(texts) - REWIND_LEAST, 0, -1):
        if texts[index][:1].isspace() and not "".join(texts[:index])[-1:].isspace():
            return skipped + index
    for index in range(len(texts) - REWIND_LEAST, 0, -1):
        if texts[index - 1] and not texts[index - 1][-1:].isspace():
            return skipped + index
    return skipped


def _shorten(path: str, request: Raws, tokens: int) -> bool:
    """Take what was delivered off the limits; False when nothing is left to say."""
    if path == COMPLETIONS and field_value(request, "max_tokens") is None:
        request["max_tokens"] = msgspec.Raw(b"%d" % COMPLETION_MAX_TOKENS)
    # The one that vLLM goes by (chat_completion/serving.py); the other says nothing, whatever it says.
    chat = path == CHAT and field_value(request, "max_completion_tokens") is not None
    governing = "max_completion_tokens" if chat else "max_tokens"
    for key, least in _LIMITS.items():
        limit = field_value(request, key)
        if limit is None:
            continue
        if key == governing and limit <= tokens:
            return False
        request[key] = msgspec.Raw(b"%d" % max(limit - tokens, least))
    return True


def _extend_messages(request: Raws, text: str) -> str | None:
    """Put the text into an assistant's turn that is to be continued. Returns why that can't be."""
    messages = msgspec.json.decode(request["messages"], type=list[msgspec.Raw])
    going_on = field_value(request, "continue_final_message") is True
    if not going_on and field_value(request, "add_generation_prompt") is False:
        return "`add_generation_prompt` in the request"
    if going_on:
        last = msgspec.json.decode(messages.pop(), type=dict[str, Any])
        content = last.get("content")
        if isinstance(content, str):
            last["content"] = content + text
        elif isinstance(content, list) and content and content[-1].get("type") == "text":
            content[-1]["text"] += text
        else:
            return "a last message that is no text"
    else:
        last = {"role": "assistant", "content": text}
    messages.append(msgspec.Raw(msgspec.json.encode(last)))
    request["messages"] = msgspec.Raw(msgspec.json.encode(messages))
    request["continue_final_message"] = msgspec.Raw(b"true")
    request["add_generation_prompt"] = msgspec.Raw(b"false")
    return None


def _extend_prompt(request: Raws, text: str) -> str | None:
    """Put the text behind the prompt. Returns why that can't be."""
    prompt = field_value(request, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        return "a prompt that is not one text"
    request["prompt"] = msgspec.Raw(msgspec.json.encode(prompt + text))
    return None
