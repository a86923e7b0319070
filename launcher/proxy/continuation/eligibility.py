"""Which requests have an answer that another instance may go on with.

Judged by a list of what is known to be harmless: a field we have never heard of forbids it. Before the first
word of an answer there is nothing to go on with but the beginning, and only what makes several answers of
one request counts.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any, Final

import msgspec

Raws = dict[str, msgspec.Raw]
"""A request's fields, their values as they were sent."""


def _falsy(value: object) -> bool:
    return not value


def _one(value: object) -> bool:
    return value == 1


def _true(value: object) -> bool:
    return value is True


_FREE = frozenset(
    (
        *("model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "min_tokens"),
        # Sampling that looks at the whole context, or at nothing.
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids"),
        *("stop", "stop_token_ids", "ignore_eos", "seed"),
        # How the prompt is made of the messages.
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "documents"),
        *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"),
        "spaces_between_special_tokens",
        # Words to the service, not to the model.
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "session_id", "request_id", "priority", "cache_salt", "parallel_tool_calls"),
    )
)
"""Fields that are harmless whatever they say (but for _UNSURE, and a list in `prompt`: see below)."""

_UNSURE = ("seed", "chat_template", "chat_template_kwargs")
"""Those that are not where no word is said again: a seeded sampler has no way back to its state, and of another chat
template nobody knows whether it goes on with a partial answer (template_check.py asks for the model's own)."""

_DEFAULTED = frozenset({"temperature", "frequency_penalty", "presence_penalty"})
"""Of what a server may apply by itself (vLLM's --generation-config), what decides here. Both penalties count output
tokens only (vLLM's model_executor/layers/utils.py, apply_penalties): where output becomes prompt they are lost."""

_JUDGED: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (
            *("frequency_penalty", "presence_penalty", "logprobs", "top_logprobs", "tools", "functions"),
            *("echo", "suffix", "bad_words", "use_beam_search", "return_token_ids"),
            *("return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
            *("include_stop_str_in_output", "watermarking"),
        ),
        _falsy,
    ),
    **dict.fromkeys(("n", "best_of", "length_penalty", "stream_interval"), _one),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning"), _true),
    "tool_choice": lambda value: str(value) in {"none", "auto"},
    "function_call": lambda value: str(value) in {"none", "auto"},
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "stream_options": lambda value: not value.get("continuous_usage_stats"),
}
"""Field -> whether its value is harmless; `null` always is. A field of neither table never is."""


_ASKS_IDS: Final = b'"return_token_ids"'
ASK_IDS: Final = b'{"return_token_ids":true,'
"""What a request's `{` becomes where its instance is asked for token ids."""
MOST_ASKING_BYTES: Final = 256 * 1024
"""Instances are not asked for the ids of larger requests: the first event would bring hundreds of thousands."""

_LONG = frozenset({"messages", "prompt", "documents", "metadata", "logit_bias", "allowed_token_ids"})
LONG_BYTES = 65536
"""Other fields say what they say in less; a longer value may take seconds to decode."""


def may_ask_ids(body: bytes | bytearray) -> bool:
    """Whether a stream's instance may be asked for token ids; not where the client says anything of them."""
    return len(body) <= MOST_ASKING_BYTES and _ASKS_IDS not in body


def field_value(request: Raws, key: str) -> Any:
    """A field's value; None where there is none."""
    return msgspec.json.decode(request[key]) if key in request else None


def with_defaults(request: Raws, defaults: Mapping[str, float]) -> Raws:
    """What an instance takes the request for: `defaults` are its own for sampling, by vLLM's names."""
    filled = dict(request)
    for name in _DEFAULTED & defaults.keys():
        if field_value(request, name) is None:
            filled[name] = msgspec.Raw(msgspec.json.encode(defaults[name]))
    return filled


def why_not(
    request: Raws, *, spoken: bool, by_ids: bool = False, sent: Container[str] | None = None
) -> str | None:
    """What of a request forbids to go on with its answer; `spoken`: some of its text has been delivered.

    `by_ids`: the next instance is given tokens, so no template and no tokenizer has a say. `sent`: the fields of the
    client's own request, where `request` has the server's defaults, too (`with_defaults`).
    """
    for key in request.keys() - _LONG if spoken else ():
        if memoryview(request[key]).nbytes > LONG_BYTES:
            return f"a long `{key}` in the request"
    prompt = field_value(request, "prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several prompts"
    for key in request.keys() - _FREE if spoken else request.keys() & {"n", "best_of"}:
        value = field_value(request, key)
        if value is not None and (key not in _JUDGED or not _JUDGED[key](value)):
            whose = (
                "in the request" if sent is None or key in sent else "among the server's sampling defaults"
            )
            return f"`{key}` {whose}"
    if spoken and field_value(request, "temperature") != 0:
        for key in _UNSURE[:1] if by_ids else _UNSURE:
            if field_value(request, key) not in (None, "", {}):
                return f"`{key}` in the request"
    return None
