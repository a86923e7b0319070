"""Going on with a cut stream on another instance: may it, with which request.

A plain answer is a function of its prompt, so a second instance that is given the prompt and the text that
the client has already got says what the first would have said: chat by vLLM's `continue_final_message`
(chat_completion/protocol.py, 0.32), completions by a longer prompt. What an answer depends on besides its
text (tools, grammars, log probabilities, several choices, penalties that count output tokens only, a
seeded sampler) can't be handed over, and such a stream ends in an honest error (handover.py).

Text is not tokens. A text may be cut into other tokens than the engine had chosen, and chat templates trim
white space. So at temperature 0 the text that is handed over stops some words before the cut: `eat` is what
the next instance must say again first, word for word, and what the client does not get twice. An instance
that says something else is on another way (Diverged), and the answer is repeated from its beginning. At
other temperatures only white space that a template may trim has to come again: a sampled word would differ.
There a chat template that makes another prompt of a partial answer would not be noticed, so it must be known
not to (template_check.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from launcher.proxy.handover import Raws, field_value, why_not
from launcher.proxy.transcript import UNREADABLE, Transcript

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
COMPLETION_MAX_TOKENS = (
    16  # what vLLM assumes without `max_tokens`, or with null (completion/protocol.py, as OpenAI's API)
)
_LIMITS = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}  # and the least that each may be
REPEAT_EVENTS = 8  # an answer that had come no further begins again: as fast, and exact in any case
# Tokens that must come again where there is no chance. Measured with vLLM 0.32 and a random model, whose
# choices no tokenizer would make: of 120 cut streams the text alone went on otherwise in 65 cases; 10 of them
# were not noticed by one word that came again, 1 of about 100 by four tokens. `repeat` was exact every time.
REWIND_LEAST = 6
REWIND_EVENTS = 16  # no more than so many; languages without spaces have no word to begin with


@dataclass(frozen=True, slots=True)
class Continuation:
    """The request that goes to the next instance, and how its answer joins what the client has."""

    body: bytes
    base_tokens: int  # tokens of the answer that are part of the new prompt
    eat: str = ""  # the text that the next instance repeats first
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
    path: str,
    body: bytes,
    transcript: Transcript,
    *,
    repeat: bool = False,
    template_fits: bool = True,
    one_token_events: bool = True,
) -> Continuation | Complete | NotExact:
    """What to do about a stream that was cut after what `transcript` holds.

    `body` is the client's own request, also at a second cut. `repeat` has the next instance say everything
    again: for a second attempt after `Diverged`, and only where there is no chance in the answer. An event
    counts as one token, less those that brought no text yet; `one_token_events`: False where the engine puts several
    into one, so that nothing can be counted. `template_fits`: False where the model's chat template is known not to
    go on with a partial answer.
    """
    reason = transcript.odd if path in {CHAT, COMPLETIONS} else f"{path} is no plain stream"
    if reason is not None:
        return NotExact(reason)
    if transcript.done:
        return Complete(b"")
    try:
        request = msgspec.json.decode(body, type=Raws)
        noticed = path != CHAT or template_fits or field_value(request, "temperature") == 0
        if not noticed and _going_on(transcript):
            return NotExact("the chat template of the model does not go on with a partial answer")
        plan = _plan(path, request, transcript, repeat)
        counts = isinstance(plan, Continuation) and _counts(path, request, plan)
    except UNREADABLE:
        return NotExact("a request or a text that can't be read")
    if counts and not one_token_events:
        return NotExact("its events bring several tokens each, so they can't be counted")
    return plan


def _going_on(transcript: Transcript) -> bool:
    """Some of the answer was told, not its end."""
    return any(transcript.pieces()) and transcript.finish_reason is None


def _counts(path: str, request: Raws, plan: Continuation) -> bool:
    """Whether the plan stands on the number of tokens that were delivered: for a limit, or for the usage."""
    if plan.only_usage or not plan.base_tokens:
        return plan.only_usage
    told = bool((field_value(request, "stream_options") or {}).get("include_usage"))
    return told or path == COMPLETIONS or any(field_value(request, key) is not None for key in _LIMITS)


def _plan(
    path: str, request: Raws, transcript: Transcript, repeat: bool
) -> Continuation | Complete | NotExact:
    pieces = transcript.pieces()
    going_on = _going_on(transcript)
    reason = why_not(request, spoken=going_on)
    if reason is not None:
        return NotExact(reason)
    if transcript.finish_reason is not None:
        return _end(request, len(pieces), usage_seen=transcript.usage_seen)
    if not going_on:
        return Continuation(msgspec.json.encode(request), 0)
    certain = field_value(request, "temperature") == 0
    if repeat and not certain:
        return NotExact("`temperature` in the request")
    if certain and (repeat or len(pieces) <= REPEAT_EVENTS):
        return Continuation(msgspec.json.encode(request), 0, _text(pieces))
    return _go_on(path, request, _hand_over(path, request, pieces, certain=certain))


@dataclass(frozen=True, slots=True)
class _Handed:
    text: str  # for the next instance's prompt
    eat: str
    tokens: int  # in text


def _end(request: Raws, tokens: int, *, usage_seen: bool) -> Continuation | Complete:
    """The text is whole, and so the end was told."""
    usage_due = (field_value(request, "stream_options") or {}).get("include_usage") and not usage_seen
    return _usage(request, tokens, None) if usage_due else Complete(b"data: [DONE]\n\n")


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
        text, eat = _text(pieces[:cut]), _text(pieces[cut:])
    else:
        whole = _text(pieces)
        text = whole.rstrip() if path == CHAT else whole
        eat = whole[len(text) :]
        cut, left = len(pieces), len(eat)
        while left and len(_part(pieces[cut - 1])) <= left:
            cut -= 1
            left -= len(_part(pieces[cut]))
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
    texts = [_part(piece) for piece in pieces[-REWIND_EVENTS:]]
    skipped = len(pieces) - len(texts)
    for index in range(len(texts) - REWIND_LEAST, 0, -1):
        if texts[index][:1].isspace() and not "".join(texts[:index])[-1:].isspace():
            return skipped + index
    for index in range(len(texts) - REWIND_LEAST, 0, -1):
        if texts[index - 1] and not texts[index - 1][-1:].isspace():
            return skipped + index
    return skipped


def _part(piece: bytes) -> str:
    """One event's text; a letter for half a surrogate pair, the other half of which is the next event's."""
    try:
        return _text([piece])
    except msgspec.DecodeError:
        return "x"


def _text(pieces: list[bytes]) -> str:
    return str(msgspec.json.decode(b'"' + b"".join(pieces) + b'"'))


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
