"""Reads a JSON request body: what it costs and where it goes, nothing else.

vLLM validates fields with pydantic's lax mode: `"stream": "on"`, `"n": "8"` and `"max_tokens": 4000.0` are valid there. They
are read the same here. Where pydantic refuses a value, the engine answers 400: here the field counts as absent.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from launcher.base.api_errors import HttpError
from launcher.base.foreign_json import UNREADABLE
from launcher.base.text import printable
from launcher.proxy.openai.body_schema import ABSENT, RequestBody, decoder

MAX_PRIORITY: Final = 1000  # priorities are clamped to this, positive and negative
MAX_TOKENS: Final = 1 << 24  # no context is as long, and no response
# vLLM refuses more than 16,384 choices unless VLLM_MAX_N_SEQUENCES is raised; sums stay exact below this.
MAX_CHOICES: Final = 1 << 20

CHAT: Final = "/v1/chat/completions"
# Where `max_completion_tokens` comes before `max_tokens`, and where `max_output_tokens` is the only limit of a response. The
# engine ignores them elsewhere (vLLM 0.32, the protocol.py of each route).
_CHATS: Final = frozenset({CHAT, f"{CHAT}/batch"})
_RESPONSES: Final = "/v1/responses"
# Where `n` and `max_tokens` are fields of `sampling_params` (scale_out/token_in_token_out/protocol.py).
_OTHERS: Final = frozenset({_RESPONSES, "/inference/v1/generate"})

# pydantic-core 2.4x, src/input/shared.rs (str_as_bool, str_as_int) and input_python.rs.
_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})
_FALSE: Final = frozenset({"0", "off", "f", "false", "n", "no"})
_FLAG_BYTES: Final = 64  # of a string that may be one of these words, however it is escaped
_DIGITS: Final = 4300  # of an integer: the most that pydantic, and Python's JSON parser, take
_SHORT: Final = 7  # so few digits are below all bounds here
_NUMBER: Final = re.compile(r"([+-]?)([0-9][0-9_]*)(?:\.0+)?")
# White space of Unicode, which Rust's str::trim takes off. str.strip() takes more.
_SPACE: Final = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


def read_body(
    body: bytes | bytearray, prompt: tuple[str, ...] = ("messages",), path: str = CHAT
) -> RequestBody:
    """One pass over a JSON object. Raises HttpError: no JSON, no object, or `model` is not a string.

    `prompt`: the fields that hold the prompt of the route `path`. A field of a wrong type is the instance's to refuse; here
    it counts as absent.
    """
    try:
        raw = decoder(prompt).decode(body)
    except msgspec.ValidationError as error:
        raise HttpError(400, f"cannot read the request: {error}", code="invalid_request") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if body.startswith(MARK):
            return read_body(b"   " + body[len(MARK) :], prompt, path)
        raise _fault_of(body, error) from None
    except RecursionError:
        raise invalid_json("nested too deeply") from None
    stream, n, priority = raw.stream, raw.n, raw.priority
    limit, newer = raw.max_tokens, raw.max_completion_tokens
    if newer is not ABSENT and path in _CHATS and bytes(newer) != b"null":
        limit = newer
    elif path in _OTHERS:
        n, limit = (n, raw.max_output_tokens) if path == _RESPONSES else _sampling(raw.sampling_params)
    fields = {}
    for name in prompt:
        value = getattr(raw, name)
        if value is not ABSENT:
            fields[name] = memoryview(value)
    return RequestBody(
        raw.model or None,
        raw.previous_response_id or None,
        stream is not ABSENT
        and ((text := bytes(stream)) == b"true" or (text != b"false" and flag(text) is True)),
        1 if n is ABSENT else _amount(bytes(n), MAX_CHOICES) or 1,
        None if limit is ABSENT else _amount(bytes(limit), MAX_TOKENS),
        fields,
        b"" if raw.tools is ABSENT else memoryview(raw.tools),
        0 if priority is ABSENT else _priority(bytes(priority)),
        b"" if raw.stream_options is ABSENT else memoryview(raw.stream_options),
    )


def _sampling(params: Raw) -> tuple[Raw, Raw]:
    try:
        raw = decoder(()).decode(params)
    except UNREADABLE:  # the instance's to refuse
        return ABSENT, ABSENT
    return raw.n, raw.max_tokens


def flag(text: bytes) -> bool | None:
    """A JSON value as pydantic's lax mode reads a bool; None: null, or not valid."""
    if text == b"true":
        return True
    if text == b"false":
        return False
    if text[:1] != b'"':
        number = _number(text)
        return bool(number) if number in {0, 1} else None
    word = _string(text) if len(text) <= _FLAG_BYTES else None
    if word is None:
        return None
    lowered = word.lower()
    return True if lowered in _TRUE else False if lowered in _FALSE else None


def whole_number(text: bytes) -> int | None:
    """A JSON value as pydantic's lax mode reads an int; None: null, or not valid."""
    if text.isdigit() and len(text) <= _DIGITS:
        return int(text)
    if text[:1] == b'"':
        word = _string(text)
        return None if word is None else _from_string(word.strip(_SPACE))
    if text in {b"true", b"false"}:
        return int(text == b"true")
    return _number(text)


def _from_string(word: str) -> int | None:
    """ "8", "+1_000", "8.0"; None: no whole number."""
    found = _NUMBER.fullmatch(word)
    if found is None or found[2][-1] == "_":
        return None
    digits = found[2].lstrip("0_")
    if "__" in digits:
        return None
    digits = digits.replace("_", "")
    return None if len(digits) > _DIGITS else int(found[1] + (digits or "0"))


def _number(text: bytes) -> int | None:
    """A JSON number; None: it is none, or no whole one."""
    if text.removeprefix(b"-").isdigit():
        return int(text) if len(text) <= _DIGITS else None
    if text[:1] not in b"-0123456789":
        return None
    value = float(text)
    return int(value) if value.is_integer() and -(2.0**63) < value < 2.0**63 else None


def _string(text: bytes) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # half a surrogate pair
        return None


def _amount(text: bytes, most: int) -> int | None:
    """None unless it is above 0."""
    if text.isdigit() and len(text) < _SHORT:
        return int(text) or None
    value = whole_number(text)
    return None if value is None or value < 1 else min(value, most)


def _priority(text: bytes) -> int:
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, whole_number(text) or 0))


# --- What is wrong with a body that is not JSON: the cause, the byte, what is there. ---

MARK: Final = b"\xef\xbb\xbf"
"""A byte order mark, which RFC 8259 8.1 allows a reader to ignore; vLLM does. Instances get it as it was sent."""

# In msgspec's messages.
_AT: Final = re.compile(r"\(byte ([0-9]+)\)")
_TRAILING: Final = "JSON is malformed: trailing characters"
_NOT_UTF8: Final = "Invalid UTF-8 encoded string"  # from 0.23 on; a UnicodeDecodeError before
# An escaped half of a surrogate pair without the other. Pairs are passed over in C, but for those behind several escaped
# backslashes: `half_of_pair` judges what is found.
_BEFORE: Final = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD]"
_HALF: Final = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F][0-9a-fA-F]{2})"
    rb"|(?=[c-fC-F])(?<!(?<!\\)%b)(?<!(?<!\\)\\\\%b)[c-fC-F][0-9a-fA-F]{2})" % (_BEFORE, _BEFORE)
)
_HIGH: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_BACKSLASH: Final = ord("\\")
_ESCAPE_BYTES: Final = 6  # of \uXXXX
# The beginning of a low half.
_CUT_OFF: Final = re.compile(rb"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?\Z")
_NO_HEX: Final = re.compile(rb"\\u(?![0-9a-fA-F]{4}|[0-9a-fA-F]{0,3}\Z)")


def without_mark(body: bytes | bytearray) -> bytes | bytearray:
    """The body without a byte order mark, for a parser that knows none."""
    return body.removeprefix(MARK)


def half_of_pair(body: bytes | bytearray, start: int, end: int, *, whole: bool) -> int:
    """Where the first half of a surrogate pair between `start` and `end` is that has no other half (RFC 8259 8.2); -1: none.

    `whole`: the body ends at `end`. Else a half so near to it that the other may come counts as found."""
    if body.find(b"\\", start, end) < 0:
        return -1
    for found in _HALF.finditer(body, start, end):
        at = found.start()
        if _escaped(body, at):
            continue
        low = body[at + 3] in b"cdefCDEF"
        before = at - _ESCAPE_BYTES
        if low and before >= 0 and _HIGH.match(body, before, at) and not _escaped(body, before):
            continue
        if low or not whole or not _CUT_OFF.match(body, found.end(), end):
            return at
    return -1


def _escaped(body: bytes | bytearray, at: int) -> bool:
    """Whether the backslash at `at` is the second one of an escaped backslash."""
    before = at
    while before and body[before - 1] == _BACKSLASH:
        before -= 1
    return (at - before) % 2 == 1


def half_pair(body: bytes | bytearray, at: int) -> HttpError:
    escape = bytes(body[at : at + _ESCAPE_BYTES]).decode("ascii", "replace")
    return invalid_json(f"{escape} is half of a surrogate pair (byte {at}), its other half is missing")


def _fault_of(body: bytes | bytearray, error: Exception) -> HttpError:
    words = str(error)
    if isinstance(error, UnicodeDecodeError) or words == _NOT_UTF8:
        try:
            body.decode()
        except UnicodeDecodeError as wrong:
            return no_json(body, f"it is not UTF-8 (byte {wrong.start})", wrong.start)
    place = _AT.search(words)
    at = len(body) if place is None else int(place[1])
    half = half_of_pair(body, 0, len(body), whole=True)
    if 0 <= half < at:
        return half_pair(body, half)
    if place is not None:
        # msgspec 0.22 counts the first of trailing characters in.
        at -= words.startswith(_TRAILING)
        return no_json(body, _AT.sub(f"(byte {at})", words), at)
    for found in _NO_HEX.finditer(body):
        if not _escaped(body, found.start()):
            return no_json(body, f"\\u without four hexadecimal digits (byte {found.start()})", found.end())
    return no_json(body, words)


def no_json(body: bytes | bytearray, why: str, at: int | None = None) -> HttpError:
    """The error for a body that is not JSON; `at`: the byte to show."""
    begin = bytes(body[:4])
    if not without_mark(body[:64]).strip() and not body.strip():
        return invalid_json("it is empty")
    if (coding := _coding_of(begin)) is not None:
        return invalid_json(f"it is {coding}, and JSON must be UTF-8 (RFC 8259 section 8.1)")
    if begin.startswith(b"\x1f\x8b"):
        return invalid_json("it is compressed with gzip: send it uncompressed")
    return invalid_json(why if at is None or at >= len(body) else f"{why}, found {_shown(body, at)}")


def _coding_of(begin: bytes) -> str | None:
    """By the byte order mark or, as JSON begins with two ASCII characters, by the zeros (RFC 4627 section 3)."""
    if begin in {b"\xff\xfe\0\0", b"\0\0\xfe\xff"} or begin[:3] == b"\0\0\0" or begin[1:] == b"\0\0\0":
        return "UTF-32"
    if begin[:2] in {b"\xff\xfe", b"\xfe\xff"} or (len(begin) > 1 and 0 in begin[:2]):
        return "UTF-16"
    return None


def _shown(body: bytes | bytearray, at: int) -> str:
    """The character at `at`, by its number where it is no ASCII; a byte that begins none."""
    for size in range(1, 5):
        try:
            char = bytes(body[at : at + size]).decode()
        except UnicodeDecodeError:
            continue
        if char.isascii() and char.isprintable():
            return repr(char)
        return f"'{printable(char)}' (U+{ord(char):04X})"
    return f"0x{body[at]:02x}"


def invalid_json(why: str) -> HttpError:
    return HttpError(400, f"cannot parse the request body as JSON: {why}", code="invalid_json")
