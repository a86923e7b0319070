"""The most tokens that a request can take, for the reservation of its key's budget. An estimate would not do: many
requests at once that are larger than estimated exceed a budget together.

A token is at least one byte of text in the tokenizers of all models that vLLM serves, so a body's length bounds its
prompt; only what the body names and does not contain (images, a stored conversation) is bounded by the context alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from launcher.base.foreign_json import UNREADABLE
from launcher.proxy.openai.body_schema import RequestBody

UNKNOWN_CONTEXT: Final = 131_072
"""Tokens; of a model whose context length nobody knows (engine.kind = "command" without max_model_len)."""
TEMPLATE_TOKENS: Final = 512
"""What chat templates add to a conversation: a system prompt of their own, instructions for tools, roles."""
SPECIAL_TOKENS: Final = 8
"""Around each prompt of a list."""
COMPLETION_TOKENS: Final = 16
"""vLLM's max_tokens of /v1/completions where the client names none (openai/completion/protocol.py, 0.32), as OpenAI's."""

_COMPLETIONS: Final = "/v1/completions"
_POOLED_SCORES: Final = frozenset({"/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"})
_SCORING: Final = _POOLED_SCORES | {"/generative_scoring"}
_POOLING: Final = _POOLED_SCORES | {"/v1/embeddings", "/v2/embed", "/classify", "/pooling"}
# All of the prompt is computed for each question (vLLM 0.32, generate/structured_decisions; 0.33, openai/decisions).
_DECISIONS: Final = frozenset({"/v1/decisions", "/v1/systemone"})
_MOST_QUESTIONS: Final = 64  # DecisionLimits there; a request with more is refused
_READ_TOKENS: Final = 256  # of one question or item: one or two, of diffusion models a canvas
# What the server loads from elsewhere, or decodes: image_url, audio_url, video_url, input_audio.
_LOADED: Final = (b'_url"', b'"input_audio"', b'"source"')
_LOADED_STATE: Final = (b'"images"', b'"audio"', b'"videos"')  # of decisions
# Where a list's first item begins, except behind more white space than any client sends.
_BEGIN_BYTES: Final = 64
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_QUESTIONS: Final = msgspec.json.Decoder(list[msgspec.Raw] | dict[str, msgspec.Raw])


class MostTokens(NamedTuple):
    prompt: int
    output: int
    unlimited: int = 0  # choices without a limit of the client's; another server may generate more of them


def within_context(tokens: int | None, context: int | None) -> int | None:
    """A client's limit of a response, which may be any number, as far as the model can generate so much; None: no limit."""
    return None if tokens is None else min(tokens, context or UNKNOWN_CONTEXT)


def prompt_within_context(tokens: int, path: str, said: RequestBody, context: int | None) -> int:
    """Estimated tokens of a body's prompt, as far as the model computes so much of it. A list of prompts may have more."""
    most = context or UNKNOWN_CONTEXT
    if tokens <= most or any(_is_list(field, any_list=path in _SCORING) for field in said.prompt.values()):
        return tokens
    return most


def most_tokens(
    path: str,
    body: bytes | bytearray,
    said: RequestBody,
    *,
    context: int | None,
    defaults: Mapping[str, float],
) -> MostTokens:
    """`context`: of the model, tokens; `defaults`: what its instances apply (EngineTraits.sampling_defaults)."""
    each = context or UNKNOWN_CONTEXT
    count = _questions(said) if path in _DECISIONS else prompts_of(said, any_list=path in _SCORING)
    prompt = count * each
    if not _has_more(path, body, said):
        prompt = min(prompt, _of_body(path, body, said, count))
    if path in _POOLING:
        return MostTokens(prompt, 0)
    if path in _SCORING | _DECISIONS:
        return MostTokens(prompt, count * min(each, _READ_TOKENS))
    named = said.max_tokens or (COMPLETION_TOKENS if path == _COMPLETIONS else defaults.get("max_tokens"))
    output = min(each, int(named or each), int(defaults.get("most_tokens", each)))
    choices = count * said.n
    return MostTokens(prompt, choices * output, 0 if said.max_tokens or path == _COMPLETIONS else choices)


def _has_more(path: str, body: bytes | bytearray, said: RequestBody) -> bool:
    """Whether a body names a part of its prompt that it does not contain."""
    marks = _LOADED + _LOADED_STATE if path in _DECISIONS else _LOADED
    return said.previous_response_id is not None or any(mark in body for mark in marks)


def _of_body(path: str, body: bytes | bytearray, said: RequestBody, count: int) -> int:
    """Tokens of `count` prompts that a body has all of."""
    if path in _DECISIONS:
        return count * (len(body) + TEMPLATE_TOKENS)
    tokens = len(body) + TEMPLATE_TOKENS + SPECIAL_TOKENS * count
    # Each document is scored together with the query, the first field.
    return tokens + count * len(next(iter(said.prompt.values()), b"")) if path in _SCORING else tokens


def _questions(said: RequestBody) -> int:
    """How many a request for decisions asks: a list, or an object by their names."""
    try:
        found = len(_QUESTIONS.decode(said.prompt.get("questions", b"[]")))
    except UNREADABLE:
        return 1
    return max(1, min(found, _MOST_QUESTIONS))


def prompts_of(said: RequestBody, *, any_list: bool = False) -> int:
    """How many prompts a body has: /v1/completions and /v1/embeddings take lists of texts or of lists of tokens, the batch
    route a list of conversations. `any_list`: also lists of objects, which else are one conversation."""
    most = 1
    for field in said.prompt.values():
        if not _is_list(field, any_list=any_list):
            continue
        try:
            most = max(most, len(_LIST.decode(field)))
        except UNREADABLE:
            continue
    return most


def _is_list(field: memoryview, *, any_list: bool) -> bool:
    begin = bytes(field[:_BEGIN_BYTES])
    return begin[:1] == b"[" and (any_list or begin[1:].lstrip()[:1] in {b'"', b"[", b""})
