"""The msgspec Structs of request bodies. Nothing else is in here: mypyc cannot compile Structs."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import msgspec
from msgspec import Raw

ABSENT: Final = Raw(b"")


class RequestBody(msgspec.Struct):
    """What a request's body says about its cost and destination."""

    model: str | None = None
    previous_response_id: str | None = None
    stream: bool = False
    n: int = 1  # choices asked for
    max_tokens: int | None = None  # of each choice
    # Raw JSON of the route's prompt fields, in the route's order; views of the body.
    prompt: dict[str, memoryview] = {}
    tools: memoryview | bytes = b""  # raw JSON; chat templates put it before the messages
    priority: int = 0
    stream_options: memoryview | bytes = b""  # raw JSON
    # Where each prompt field has images and sounds; None: not looked for yet.
    media: dict[str, list[tuple[int, int]]] | None = None


class RawBody(msgspec.Struct):
    """The fields looked for. Raw values are not decoded: no limit bounds what a value of another type costs."""

    model: str | None = None
    previous_response_id: str | None = None
    stream: Raw = ABSENT
    stream_options: Raw = ABSENT
    n: Raw = ABSENT
    max_tokens: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    tools: Raw = ABSENT
    priority: Raw = ABSENT
    sampling_params: Raw = ABSENT


@cache
def decoder(prompt: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Decodes a body into a RawBody that also has the fields named in `prompt`."""
    fields = [(name, Raw, ABSENT) for name in prompt if name not in RawBody.__struct_fields__]
    return msgspec.json.Decoder(msgspec.defstruct("Body", fields, bases=(RawBody,)))


def known_fields(prompt: tuple[str, ...]) -> frozenset[str]:
    return frozenset((*RawBody.__struct_fields__, *prompt))
