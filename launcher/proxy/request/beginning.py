"""What a request asks for, as far as its first bytes tell: for another process that chooses a host for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from msgspec import Struct

from launcher.balancing.prefix_cache import fingerprint
from launcher.base.api_errors import HttpError
from launcher.proxy.openai.json_reader import JsonReader
from launcher.proxy.openai.prompts import read_prompt
from launcher.proxy.request.most_tokens import within_context
from launcher.proxy.routes import Kind, Match, Route, match

# The field `model` of a form (RFC 7578). Whether the form is well made is the daemon's to judge.
_FORM_MODEL: Final = re.compile(
    rb'form-data[ \t]*(?:;[^\r\n]*)?;[ \t]*name=(?:"model"|model)[ \t]*(?:;[^\r\n]*)?\r\n'
    rb"(?:[^\r\n]+\r\n)*\r\n([^\r\n]{1,1000})\r\n",
    re.IGNORECASE,
)

_NOTHING: Final = (None, False)  # behind a body that is whole


class Asked(Struct, frozen=True, kw_only=True):
    """One request."""

    id: str
    model: str | None = None  # the name that it uses; None: its first bytes do not say
    key: str | None = None  # names its authorization without telling it
    prompt_bytes: int = 0  # all of its prompt, estimated from its length
    prefix: tuple[int, ...] = ()  # prefix_cache.fingerprint of what there is of it
    stream: bool = False
    max_tokens: int | None = None
    choices: int = 1
    takes_place: bool = True  # the model runs for it


def read_asked(arguments: Mapping[str, object]) -> Asked | None:
    """`arguments`: id, path, key and api-key (headers that authorize it), body (what there is of it), model and stream (its
    fields, where they were found behind that), length (of all of it).

    None: it has no body, or one that cannot be read."""
    path, body = _text(arguments.get("path")), _bytes(arguments.get("body"))
    found = match("POST", path)
    route = found.route if isinstance(found, Match) else None
    if route is None or not body or route.kind not in {Kind.JSON, Kind.FORM}:
        return None
    id_, secret = _text(arguments.get("id")), _bytes(arguments.get("key") or arguments.get("api-key"))
    key = blake2b(secret, digest_size=8).hexdigest() if secret else None
    if route.kind is Kind.FORM:
        named = _FORM_MODEL.search(body)
        return Asked(id=id_, key=key, model=named[1].decode(errors="replace") if named else None)
    length = arguments.get("length")
    missing = max(0, length - len(body)) if isinstance(length, int) else 0
    behind = (_text(arguments.get("model")) or None, arguments.get("stream") is True) if missing else _NOTHING
    try:
        return _of_json(id_, key, route, body, missing=missing, behind=behind)
    except HttpError:
        return None  # the daemon refuses it


def _of_json(
    id_: str, key: str | None, route: Route, body: bytes, *, missing: int, behind: tuple[str | None, bool]
) -> Asked:
    """`behind`: model and stream, as found in the `missing` bytes behind `body`."""
    said = JsonReader(route.prompt, route.path).so_far(body)
    model = behind[0] if said.model is None else said.model
    prompt = read_prompt(said.prompt, said.media)
    size = prompt.size
    if not said.prompt and missing:
        size = len(body) if route.prompt else 0
    within_image = any(
        spans and spans[-1][1] == len(said.prompt[name]) for name, spans in (said.media or {}).items()
    )
    if size and not within_image:
        size += missing
    salt = hash((bytes(said.tools), model))
    return Asked(
        id=id_,
        model=model,
        key=key,
        prompt_bytes=size + len(said.tools),
        prefix=fingerprint(prompt.text, salt) if prompt.size else (),
        stream=(said.stream or behind[1]) and route.stream is not None,
        max_tokens=within_context(said.max_tokens, None),
        choices=said.n,
        takes_place=route.computes,
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else _bytes(value).decode(errors="replace")


def _bytes(value: object) -> bytes:
    return value if isinstance(value, bytes) else value.encode() if isinstance(value, str) else b""
