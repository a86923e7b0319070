"""What we must know of a request, and no more; error bodies in OpenAI's form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from msgspec import Raw

from launcher.printable import quoted

JSON = "application/json"
MAX_PRIORITY = 1000  # either way
_NOTHING = Raw(b"")
_NAME_BYTES = 4096  # of a session's name
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # what decoding foreign JSON raises
REPLY_PREFIX_BYTES = 65536  # the id of a stored response is in its first event or near its object's head


@dataclass(frozen=True, slots=True)
class RequestBody:
    """What a request's body says of where it goes and what it costs; nothing else of it is looked at."""

    model: str | None = None
    previous_response_id: str | None = None
    stream: bool = False
    n: int = 1  # answers asked for
    max_tokens: int | None = None  # of each answer
    prompt: Mapping[str, memoryview] = field(default_factory=dict)  # raw JSON of the route's prompt; views
    tools: memoryview | bytes = b""  # raw JSON; the templates put it before the messages
    cache_key: str | None = None  # prompt_cache_key, else user
    priority: int = 0
    media: Mapping[str, list[tuple[int, int]]] | None = (
        None  # where the prompt has some, if it was looked for
    )


class _Body(msgspec.Struct):
    """Raw values are not decoded: what a value of another kind costs to build, no limit bounds."""

    model: str | None = None
    previous_response_id: str | None = None
    stream: Raw = _NOTHING
    n: Raw = _NOTHING
    max_tokens: Raw = _NOTHING
    max_completion_tokens: Raw = _NOTHING
    max_output_tokens: Raw = _NOTHING
    tools: Raw = _NOTHING
    prompt_cache_key: Raw = _NOTHING
    user: Raw = _NOTHING
    priority: Raw = _NOTHING


@cache
def _decoder(prompt: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Reads a body whose prompt is in these fields."""
    fields = [(name, Raw, _NOTHING) for name in prompt if name not in _Body.__struct_fields__]
    return msgspec.json.Decoder(msgspec.defstruct("Body", fields, bases=(_Body,)))


def known_fields(prompt: tuple[str, ...]) -> frozenset[str]:
    """The names that `peek_json` looks for."""
    return frozenset((*_Body.__struct_fields__, *prompt))


_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})')
_COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')
# Anthropic's `input_tokens` are those that no cache had (vLLM 0.32, anthropic/serving.py).
_CACHE_READ = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,9})')
_CACHE_CREATED = re.compile(rb'"cache_creation_input_tokens"\s*:\s*(\d{1,9})')
_BEGINS = re.compile(rb"^event: ?response\.(?:created|in_progress|queued)\r?$", re.MULTILINE)
_REPLY_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,195})"')


class HttpError(Exception):
    """A request that we answer with an error of our own."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type_
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.close = close  # what follows on the connection can't be trusted or won't be read

    def body(self) -> bytes:
        """The answer's JSON body."""
        return error_body(self.message, self.type, self.param, self.code)


def error_body(message: str, type_: str, param: str | None = None, code: str | int | None = None) -> bytes:
    """`{"error": {...}}` as OpenAI's clients parse it."""
    return msgspec.json.encode({"error": {"message": message, "type": type_, "param": param, "code": code}})


def error_event(path: str, message: str, type_: str, code: int) -> bytes:
    """One event that ends a broken stream, in the form that the route's clients raise as an error."""
    error = {"message": message, "type": type_, "param": None, "code": code}
    if path == "/v1/messages":  # Anthropic's form, as vLLM's own (entrypoints/anthropic/serving.py)
        payload = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(payload) + b"\n\n"
    return b"data: " + msgspec.json.encode({"error": error}) + b"\n\n"


def error_event_of(path: str, body: bytes, status: int) -> bytes:
    """An error that an instance gave as a whole answer, as the event that ends a stream."""
    message, type_ = "the request failed", "upstream_error"
    try:
        error = msgspec.json.decode(body, type=dict[str, object]).get("error")
    except _UNREADABLE:
        error = None
    if isinstance(error, dict):
        message, type_ = str(error.get("message", message)), str(error.get("type", type_))
    return error_event(path, message, type_, status)


def peek_json(body: bytes | bytearray, prompt: tuple[str, ...] = ("messages",)) -> RequestBody:
    """One pass over a JSON object. Raises HttpError: not JSON, no object, or `model` is no text.

    `prompt`: the fields that the route's prompt is in. A field of a wrong type is the instance's to refuse; here it
    counts as absent.
    """
    try:
        found = _decoder(prompt).decode(body)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"cannot read the request: {error}", code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_json(str(error)) from None
    except RecursionError:
        raise invalid_json("nested too deeply") from None
    stream, n, priority, key = found.stream, found.n, found.priority, found.prompt_cache_key or found.user
    return RequestBody(
        found.model or None,
        found.previous_response_id or None,
        stream is not _NOTHING and bytes(stream) == b"true",
        1 if n is _NOTHING else _integer(n) or 1,
        _integer(found.max_completion_tokens)
        or _integer(found.max_tokens)
        or _integer(found.max_output_tokens),
        {name: memoryview(raw) for name in prompt if (raw := getattr(found, name)) is not _NOTHING},
        memoryview(found.tools),
        None if key is _NOTHING else _text(found.prompt_cache_key) or _text(found.user) or None,
        0 if priority is _NOTHING else _priority(priority),
    )


def _integer(raw: Raw) -> int | None:
    """None where it is none, or not above 0."""
    if raw is _NOTHING:
        return None
    text = bytes(raw)
    return int(text) or None if text.isdigit() and len(text) < 20 else None


def _priority(raw: Raw) -> int:
    text = bytes(raw)
    negative = text[:1] == b"-"
    value = min(MAX_PRIORITY, _integer(Raw(text[negative:])) or 0)
    return -value if negative else value


def _text(raw: Raw) -> str | None:
    """None where it is none, or longer than any name."""
    text = bytes(raw)
    return msgspec.json.decode(text, type=str) if text[:1] == b'"' and len(text) < _NAME_BYTES else None


def invalid_json(why: str) -> HttpError:
    """400."""
    return HttpError(400, f"cannot parse the request body as JSON: {why}", code="invalid_json")


@dataclass(frozen=True, slots=True)
class Names:
    """The models that the configuration serves."""

    names: tuple[str, ...] = field(default=())
    aliases: Mapping[str, str] = field(default_factory=dict)  # to a name

    def all_of(self, name: str) -> tuple[str, ...]:
        """A model's own name and its aliases."""
        return (name, *(alias for alias, real in self.aliases.items() if real == name))

    def resolve(self, wanted: str | None) -> str:
        """The model a request goes to. Raises HttpError when it names none of ours."""
        if wanted is None:
            if len(self.names) == 1:
                return self.names[0]
            raise HttpError(400, "you must name a model in `model`", param="model", code="model_required")
        if wanted in self.names:
            return wanted
        if (real := self.aliases.get(wanted)) is not None:
            return real
        raise HttpError(
            404,
            f"The model `{quoted(wanted)}` does not exist.",
            type_="NotFoundError",
            param="model",
            code="model_not_found",
        )


def response_id(answer: bytes) -> str | None:
    """The id of the stored response that an answer of /v1/responses (or its first event) announces."""
    found = _REPLY_ID.search(answer, 0, REPLY_PREFIX_BYTES)
    return found[1].decode() if found else None


def begins_response(events: bytes) -> bool:
    """Whether these events of /v1/responses are all from before the prompt was computed.

    Source: vLLM 0.32, entrypoints/openai/responses/serving.py.
    """
    return 0 < events.count(b"\n\n") == len(_BEGINS.findall(events))


def usage_of(data: bytes) -> tuple[int, int, int | None] | None:
    """`(prompt, completion, cached)` tokens that an answer's end, or its last events, tell; None: nothing.

    /v1/responses and /v1/messages call them input and output. Looked for without a parser: in an answer's text a
    quotation mark is escaped, so no words can pass for it.
    """
    at = data.rfind(b'"usage":')
    if at < 0:
        return None
    prompt = _PROMPT_TOKENS.search(data, at)
    if prompt is None:
        return None
    completion, cached = _COMPLETION_TOKENS.search(data, at), _CACHED_TOKENS.search(data, at)
    tokens = int(prompt[1])
    if b"_input_tokens" in data:
        cached, created = _CACHE_READ.search(data, at), _CACHE_CREATED.search(data, at)
        tokens += (int(cached[1]) if cached else 0) + (int(created[1]) if created else 0)
    return tokens, int(completion[1]) if completion else 0, int(cached[1]) if cached else None


def rewrite_detail(status: int, body: bytes, method: str, path: str) -> bytes | None:
    """FastAPI's `{"detail": ...}` in OpenAI's form; None when the body is something else.

    vLLM attaches routes by the model's task: 404 means that this model can't do this.
    """
    if not body.startswith(b"{") or len(body) > REPLY_PREFIX_BYTES:
        return None
    try:
        parsed = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if set(parsed) != {"detail"}:
            return None
        detail = msgspec.json.decode(parsed["detail"])
        text = detail if isinstance(detail, str) else bytes(parsed["detail"]).decode()
    except _UNREADABLE:
        return None
    if status in {404, 405}:
        text = f"this model's instance does not serve {method} {path} ({text})"
    type_ = "NotFoundError" if status == 404 else "invalid_request_error"
    return error_body(text, type_, None, status)
