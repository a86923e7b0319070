"""The next instance's request, made of the client's: other limits, a longer prompt. Values stay as they were sent."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Final

import msgspec

from launcher.proxy.openai.body import flag, whole_number

# --- Which requests have an answer that another instance can continue. ---
#
# Judged by a list of fields that are known to be harmless: an unknown field forbids it. Before the first word of an
# answer it is simply asked for again, and only fields that make several answers of one request count.

Fields = dict[str, msgspec.Raw]  # A request's fields, their values as they were sent


_FREE: Final = frozenset(
    (
        *("model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "min_tokens"),
        # Sampling that depends on the whole context, or on nothing.
        *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias", "allowed_token_ids"),
        *("stop", "stop_token_ids", "ignore_eos", "seed"),
        # How the prompt is rendered from the messages.
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "documents"),
        *("chat_template", "chat_template_kwargs", "mm_processor_kwargs", "media_io_kwargs"),
        "spaces_between_special_tokens",
        # For the service, not for the model.
        *("user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "session_id", "request_id", "priority", "cache_salt", "parallel_tool_calls"),
    )
)
"""Fields that are harmless whatever their value (but for _UNSURE, and a list in `prompt`: see below)."""

_UNSURE: Final = ("seed", "chat_template", "chat_template_kwargs")
"""Those that are not, where no text is repeated: a seeded sampler's state can't be restored, and it is not known whether
another chat template continues a partial answer (template_probe.py tries the model's own)."""

_DEFAULTED: Final = frozenset({"temperature", "frequency_penalty", "presence_penalty"})
"""Defaults of the server (vLLM's --generation-config) that decide here. Both penalties count output tokens only (vLLM's
model_executor/layers/utils.py, apply_penalties): where output becomes prompt they are lost."""

_JUDGED: Final[Mapping[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        (
            *("frequency_penalty", "presence_penalty", "logprobs", "top_logprobs", "tools", "functions"),
            *("echo", "suffix", "bad_words", "use_beam_search", "return_token_ids"),
            *("return_tokens_as_token_ids", "return_token_offsets", "return_prompt_text"),
            *("include_stop_str_in_output", "watermarking"),
        ),
        lambda value: not value,
    ),
    **dict.fromkeys(("n", "best_of", "length_penalty", "stream_interval"), lambda value: value == 1),
    **dict.fromkeys(("skip_special_tokens", "include_reasoning"), lambda value: value is True),
    "tool_choice": lambda value: str(value) in {"none", "auto"},
    "function_call": lambda value: str(value) in {"none", "auto"},
    "response_format": lambda value: value == {"type": "text"},
    "modalities": lambda value: value == ["text"],
    "stream_options": lambda value: not value.get("continuous_usage_stats"),
}
"""Field -> whether its value is harmless; `null` always is. A field of neither table never is."""


_ASKS_IDS: Final = b'"return_token_ids"'
ASK_IDS: Final = b'"return_token_ids":true,'
"""Behind the `{` of a request whose instance is asked for token ids."""
MOST_ASKING_BYTES: Final = 256 * 1024
"""Instances are not asked for the ids of larger requests: the first event would bring hundreds of thousands."""

_LONG: Final = frozenset({"messages", "prompt", "documents", "metadata", "logit_bias", "allowed_token_ids"})
LONG_BYTES: Final = 65536  # of any other field; a longer value may take seconds to decode


def may_ask_ids(body: bytes | bytearray) -> bool:
    """Whether a stream's instance may be asked for token ids; not where the client says anything of them."""
    return len(body) <= MOST_ASKING_BYTES and _ASKS_IDS not in body


def field_value(request: Fields, key: str) -> Any:
    return msgspec.json.decode(request[key]) if key in request else None


def with_defaults(request: Fields, defaults: Mapping[str, float]) -> Fields:
    """With the sampling defaults that the server applies, by vLLM's names."""
    filled = dict(request)
    for name in _DEFAULTED.intersection(defaults):
        if field_value(request, name) is None:
            filled[name] = msgspec.Raw(msgspec.json.encode(defaults[name]))
    return filled


def why_not(
    request: Fields, *, begun: bool, by_ids: bool = False, sent: Container[str] | None = None
) -> str | None:
    """What in a request forbids continuing its answer; None: nothing. `begun`: some of its text was delivered.

    `by_ids`: the next instance is given tokens, so no template or tokenizer matters. `sent`: the fields of the client's
    own request, where `request` has the server's defaults, too (`with_defaults`).
    """
    for key in request.keys() - _LONG if begun else ():
        if memoryview(request[key]).nbytes > LONG_BYTES:
            return f"a long `{key}` in the request"
    prompt = field_value(request, "prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several prompts"
    for key in request.keys() - _FREE if begun else request.keys() & {"n", "best_of"}:
        value = field_value(request, key)
        if value is not None and (key not in _JUDGED or not _JUDGED[key](value)):
            own = sent is None or key in sent
            return f"`{key}` in the request" if own else f"`{key}` among the server's sampling defaults"
    if begun and field_value(request, "temperature") != 0:
        for key in _UNSURE[:1] if by_ids else _UNSURE:
            if field_value(request, key) not in (None, "", {}):
                return f"`{key}` in the request"
    return None


def texts_only(request: Fields) -> bool:
    """Whether every part of every message is text: vLLM renders other parts whatever token ids it is given."""
    messages = msgspec.json.decode(request["messages"])
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return all(isinstance(part, str) or part.get("type") == "text" for part in parts)


def held_back(request: Fields) -> int:
    """Characters that an instance may hold back: they might begin a stop string (vLLM's v1/engine/detokenizer.py)."""
    stop = field_value(request, "stop") or []
    return max(len(text) for text in ([stop] if isinstance(stop, str) else stop)) - 1 if stop else 0


CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
COMPLETION_MAX_TOKENS: Final = 16
"""What vLLM assumes without `max_tokens`, or with null (completion/protocol.py, as OpenAI's API)."""
# And the least that each may be.
LIMITS: Final = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}


def _number(value: float) -> msgspec.Raw:
    return msgspec.Raw(b"%d" % value)


def _governing(path: str, request: Fields) -> str:
    """The limit that vLLM applies (chat_completion/serving.py); it ignores the other one."""
    chat = path == CHAT and field_value(request, "max_completion_tokens") is not None
    return "max_completion_tokens" if chat else "max_tokens"


def _limit(request: Fields, name: str) -> int | None:
    """As the engine reads it: "4000" and 4000.0 are valid."""
    return whole_number(bytes(request[name])) if name in request else None


def _flag(request: Fields, name: str) -> bool | None:
    """As the engine reads it: "true" and 1 are valid."""
    return flag(bytes(request[name])) if name in request else None


def with_limit(path: str, request: Fields, defaults: Mapping[str, float]) -> Fields:
    """With the limit that the server would apply, written out (vLLM's get_max_tokens)."""
    governing = _governing(path, request)
    limit: float | None = _limit(request, governing)
    if limit is None:
        limit = defaults.get("max_tokens") if path == CHAT else COMPLETION_MAX_TOKENS
    most = defaults.get("most_tokens")
    limits = [value for value in (limit, most) if value is not None]
    if not limits or (path == COMPLETIONS and most is None):
        return request
    return request | {governing: _number(min(limits))}


def shortened(path: str, request: Fields, tokens: int) -> Fields | None:
    """With limits that are lower by what was delivered; None when no token is left."""
    request = dict(request)
    if path == COMPLETIONS and _limit(request, "max_tokens") is None:
        request["max_tokens"] = _number(COMPLETION_MAX_TOKENS)
    governing = _governing(path, request)
    for key, least in LIMITS.items():
        limit = _limit(request, key)
        if limit is None:
            continue
        if key == governing and limit <= tokens:
            return None
        request[key] = _number(max(limit - tokens, least))
    return request


def one_token(request: Fields) -> Fields:
    """For one token: the usage of its answer tells the prompt's length."""
    limits = {"max_tokens"} | (request.keys() & {"max_completion_tokens"})
    return request | dict.fromkeys(limits, _number(1)) | {"min_tokens": _number(0)}


def asking_ids(request: Fields) -> Fields:
    return request | {"return_token_ids": msgspec.Raw(b"true")}


def with_prompt_ids(path: str, request: Fields, ids: Sequence[int]) -> Fields:
    prompt = msgspec.Raw(msgspec.json.encode(ids))
    if path == COMPLETIONS:
        return request | {"prompt": prompt}
    # vllm#48145; vllm#55771 proposes a field of its own for it
    return request | {"kv_transfer_params": msgspec.Raw(msgspec.json.encode({"prompt_token_ids": prompt}))}


def with_text(path: str, request: Fields, text: str) -> Fields | str:
    """With the answer's text so far in the prompt; or why that can't be."""
    return _longer_chat(request, text) if path == CHAT else _longer_prompt(request, text)


def _longer_chat(request: Fields, text: str) -> Fields | str:
    messages = msgspec.json.decode(request["messages"], type=list[msgspec.Raw])
    going_on = _flag(request, "continue_final_message") is True
    if not going_on and _flag(request, "add_generation_prompt") is False:
        return "`add_generation_prompt` in the request"
    last: dict[str, Any] = {"role": "assistant", "content": text}
    if going_on:
        last = msgspec.json.decode(messages.pop(), type=dict[str, Any])
        content = last.get("content")
        if isinstance(content, str):
            last["content"] = content + text
        elif isinstance(content, list) and content and content[-1].get("type") == "text":
            content[-1]["text"] += text
        else:
            return "a last message that is no text"
    messages.append(msgspec.Raw(msgspec.json.encode(last)))
    return request | {
        "messages": msgspec.Raw(msgspec.json.encode(messages)),
        "continue_final_message": msgspec.Raw(b"true"),
        "add_generation_prompt": msgspec.Raw(b"false"),
    }


def _longer_prompt(request: Fields, text: str) -> Fields | str:
    prompt = field_value(request, "prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        return "a prompt that is not one text"
    return request | {"prompt": msgspec.Raw(msgspec.json.encode(prompt + text))}
