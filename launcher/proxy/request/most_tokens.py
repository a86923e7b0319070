"""The most tokens that a request can take, for the reservation of its key's budget. An estimate would not do: many
requests at once that are larger than estimated exceed a budget together.

A token is at least one byte of text in the tokenizers of all models that vLLM serves, so a body's length bounds its
prompt; only what the body names and does not contain (images, a stored conversation) is bounded by the context alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

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
_SCORING: Final = frozenset({"/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank"})
_POOLING: Final = _SCORING | {"/v1/embeddings", "/v2/embed", "/classify", "/pooling"}
# What the server loads from elsewhere, or decodes: image_url, audio_url, video_url, input_audio.
_LOADED: Final = (b'_url"', b'"input_audio"', b'"source"')
# Where a list's first item begins, except behind more white space than any client sends.
_BEGIN_BYTES: Final = 64
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])


class MostTokens(NamedTuple):
    prompt: int
    output: int
    unlimited: int = 0  # choices without a limit of the client's; another server may generate more of them


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
    count = _prompts(said, any_list=path in _SCORING)
    prompt = len(body) + TEMPLATE_TOKENS + SPECIAL_TOKENS * count
    if path in _SCORING:  # each document is scored together with the query, the first field
        prompt += count * len(next(iter(said.prompt.values()), b""))
    if said.previous_response_id is not None or any(mark in body for mark in _LOADED):
        prompt = count * each
    prompt = min(prompt, count * each)
    if path in _POOLING:
        return MostTokens(prompt, 0)
    named = said.max_tokens or (COMPLETION_TOKENS if path == _COMPLETIONS else defaults.get("max_tokens"))
    output = min(each, int(named or each), int(defaults.get("most_tokens", each)))
    choices = count * said.n
    return MostTokens(prompt, choices * output, 0 if said.max_tokens or path == _COMPLETIONS else choices)


def _prompts(said: RequestBody, *, any_list: bool) -> int:
    """How many prompts a body has: /v1/completions and /v1/embeddings take lists of texts or of lists of tokens, the batch
    route a list of conversations. `any_list`: also lists of objects, which else are one conversation."""
    most = 1
    for field in said.prompt.values():
        begin = bytes(field[:_BEGIN_BYTES])
        if begin[:1] != b"[" or not (any_list or begin[1:].lstrip()[:1] in {b'"', b"[", b""}):
            continue
        try:
            most = max(most, len(_LIST.decode(field)))
        except (msgspec.MsgspecError, RecursionError):
            continue
    return most
