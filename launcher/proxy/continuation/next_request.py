"""The next instance's request, made of the client's: other limits, a longer prompt. Values stay as they were sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from launcher.proxy.continuation.eligibility import Fields, field_value

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


def with_limit(path: str, request: Fields, defaults: Mapping[str, float]) -> Fields:
    """With the limit that the server would apply, written out (vLLM's get_max_tokens)."""
    governing = _governing(path, request)
    limit = field_value(request, governing)
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
    if path == COMPLETIONS and field_value(request, "max_tokens") is None:
        request["max_tokens"] = _number(COMPLETION_MAX_TOKENS)
    governing = _governing(path, request)
    for key, least in LIMITS.items():
        limit = field_value(request, key)
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
    going_on = field_value(request, "continue_final_message") is True
    if not going_on and field_value(request, "add_generation_prompt") is False:
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
