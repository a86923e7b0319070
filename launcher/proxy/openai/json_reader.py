"""Reads a large JSON body while its bytes arrive.

A decoder reads 64 MiB in one call of up to 0.2 s, which blocks the event loop; another thread does not help, because the
call holds the interpreter's lock. So a large body is read in steps while it arrives: each step reads new bytes only,
strings and numbers in C, arrays and objects one by one, up to MAX_VALUES. Only the top level is checked; errors below it
are the instance's to refuse.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from launcher.base.api_errors import HttpError
from launcher.base.foreign_json import UNREADABLE
from launcher.proxy.openai.body import CHAT, MARK, half_of_pair, half_pair, invalid_json, no_json, read_body
from launcher.proxy.openai.body_schema import RequestBody, known_fields
from launcher.proxy.openai.prompts import MediaFinder

STEP_BYTES = 16_384  # of one step: 5 ms at worst
MAX_VALUES = 262_144  # arrays and objects of a body: 0.2 s in total
MAX_FIELDS = 1024  # of the object itself
MAX_DEPTH = 1000  # the limit of Python's own parser, which vLLM uses
MAX_SHORT_BYTES = 65536  # of the value of a field outside the prompt
MAX_SAMPLING_BYTES = 1 << 20  # of `sampling_params`, which may name many tokens
_MAX_SCALAR_BYTES = 1024
_MAX_KEY_BYTES = 256  # a longer name is none of the known ones, however it is escaped

_ESCAPE_BYTES = 6  # of \\uXXXX

_SPACE = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# The last `*` is not possessive, as in other patterns: before 3.11.5 Python takes half a repetition for a whole one
# (gh-106052). What it keeps to go back is bounded by STEP_BYTES.
_BELOW = re.compile(rb'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)*', re.DOTALL)
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]++")
_QUOTE, _OPEN, _CLOSE = ord('"'), b"[{", b"]}"


class _Next(Enum):
    """What must come next at the top level."""

    OBJECT = "{"
    FIELD_OR_END = '" or }'
    FIELD = '"'
    COLON = ":"
    VALUE = "a value"
    MORE = ", or }"
    NOTHING = "nothing"


class JsonReader:
    """Reads one body: `feed` it as it grows, then `finish`. Both raise HttpError."""

    def __init__(self, prompt: tuple[str, ...], path: str = CHAT) -> None:
        """`prompt`: the fields that the prompt of the route `path` is in."""
        self._prompt = prompt
        self._path = path
        self._names = known_fields(prompt)
        self._media = MediaFinder()
        # Everything before it has been read; steps have tried up to `_stepped`: a string or number may be incomplete.
        self._at = 0
        self._stepped = 0
        self._paired = 0  # up to where no half of a surrogate pair is alone
        self._depth = 0
        self._next = _Next.OBJECT
        self._in_string = False
        # Where the current field's name, then its value, begins.
        self._begun = 0
        self._name = ""
        self._fields = 0
        self._values = 0
        self._spans: dict[str, tuple[int, int]] = {}  # of known fields; the last one of a name counts

    def feed(self, body: bytes | bytearray) -> bool:
        """Read one step; `body` is all that has arrived. True: there is no more to read."""
        self._stepped = min(len(body), self._stepped + STEP_BYTES)
        self._pair(body, self._stepped, whole=False)
        self._read(body, self._stepped)
        return self._stepped == len(body)

    def finish(self, body: bytes | bytearray) -> RequestBody:
        while not self.feed(body):
            pass
        self._pair(body, len(body), whole=True)
        if self._next is not _Next.NOTHING:
            raise no_json(body, "unexpected end")
        return self._found(body)

    def so_far(self, body: bytes) -> RequestBody:
        """What a body says that may be cut off: its complete fields, and what there is of the prompt's incomplete one.

        Raises HttpError."""
        while not self.feed(body):
            pass
        if self._next is _Next.MORE:
            if self._depth == 1 and not self._in_string:
                self._end_field()
            elif self._name in self._prompt:
                self._spans[self._name] = self._begun, len(body)
                self._media.cut(len(body))
        return self._found(body)

    def _found(self, body: bytes | bytearray) -> RequestBody:
        short = {name: span for name, span in self._spans.items() if name not in (*self._prompt, "tools")}
        for name, (start, end) in short.items():
            if end - start > (MAX_SAMPLING_BYTES if name == "sampling_params" else MAX_SHORT_BYTES):
                raise HttpError(400, f"cannot read the request: `{name}` is too long", param=name)
        text = b",".join(b'"%b":%b' % (name.encode(), bytes(body[a:b])) for name, (a, b) in short.items())
        try:
            found = read_body(b"{%b}" % text, self._prompt, self._path)
        except HttpError as error:
            raise _fault_of(body, short, error) from None
        view = memoryview(body)
        found.prompt = {name: view[slice(*self._spans[name])] for name in self._prompt if name in self._spans}
        found.tools = view[slice(*self._spans.get("tools", (0, 0)))]
        found.media = {name: self._media_within(name) for name in found.prompt}
        return found

    def _media_within(self, name: str) -> list[tuple[int, int]]:
        first, last = self._spans[name]
        return [(start - first, end - first) for start, end in self._media.spans if first < start < last]

    def _read(self, body: bytes | bytearray, end: int) -> None:
        """Read tokens up to `end`; _string, _below and _top return False for an incomplete one."""
        self._media.feed(body, end)
        while self._at < end:
            if self._in_string:
                more = self._string(body, end)
            elif self._depth > 1:
                more = self._below(body, end)
            else:
                more = self._top(body, end)
            if not more:
                return

    def _pair(self, body: bytes | bytearray, end: int, *, whole: bool) -> None:
        """Look for halves of surrogate pairs, which a decoder of small bodies finds by itself."""
        at = half_of_pair(body, self._paired, end, whole=whole)
        if at < 0:
            self._paired = max(self._paired, end - _ESCAPE_BYTES + 1)
        elif whole or at + 2 * _ESCAPE_BYTES <= end:
            raise half_pair(body, at)
        else:  # its other half may come
            self._paired = at

    def _string(self, body: bytes | bytearray, end: int) -> bool:
        self._at = _match(_IN_STRING, body, self._at, end)
        if self._at == end or body[self._at] != _QUOTE:  # or half an escape
            return False
        self._at += 1
        self._in_string = False
        if self._depth == 1 and self._next is _Next.COLON:
            self._name = _name(body, self._begun, self._at)
        return True

    def _below(self, body: bytes | bytearray, end: int) -> bool:
        """Read to the end of a value, from bracket to bracket."""
        at, depth, values = self._at, self._depth, self._values
        while depth > 1 and (at := _match(_BELOW, body, at, end)) < end:
            char = body[at]
            at += 1
            if char in _CLOSE:
                depth -= 1
            elif char in _OPEN:
                depth += 1
                values += 1
                if values > MAX_VALUES or depth > MAX_DEPTH:
                    raise _too_much()
            else:
                self._in_string = True
                break
        self._at, self._depth, self._values = at, depth, values
        return at < end

    def _top(self, body: bytes | bytearray, end: int) -> bool:
        self._at = _match(_SPACE, body, self._at, end)
        if self._at == end:
            return False
        char = bytes(body[self._at : self._at + 1])
        if self._next is _Next.VALUE:
            return self._value(body, end, char)
        if self._next is _Next.OBJECT and char == b"{":
            self._depth, self._next = 1, _Next.FIELD_OR_END
        elif self._next in {_Next.FIELD, _Next.FIELD_OR_END} and char == b'"':
            self._begun, self._in_string, self._next = self._at, True, _Next.COLON
        elif self._next is _Next.COLON and char == b":":
            self._next = _Next.VALUE
        elif self._next is _Next.MORE and char in {b",", b"}"}:
            self._end_field()
            self._next = _Next.FIELD if char == b"," else _Next.NOTHING
        elif self._next is _Next.FIELD_OR_END and char == b"}":
            self._next = _Next.NOTHING
        elif not self._at and MARK.startswith(body[: len(MARK)]):
            self._at = len(MARK) if end >= len(MARK) else 0
            return self._at > 0
        else:
            raise no_json(body, f"expected {self._next.value} (byte {self._at})", self._at)
        self._at += 1
        return True

    def _value(self, body: bytes | bytearray, end: int, char: bytes) -> bool:
        self._begun = self._at
        if char == b'"':
            self._in_string = True
        elif char in {b"[", b"{"}:
            self._depth = 2
            self._values += 1
            if self._values > MAX_VALUES:
                raise _too_much()
        else:
            stop = _match(_SCALAR, body, self._at, end)
            if stop == self._at or stop - self._at > _MAX_SCALAR_BYTES:
                raise no_json(body, f"expected a value (byte {self._at})", self._at)
            if stop == end:  # perhaps incomplete
                return False
            self._at = stop - 1
        self._at += 1
        self._next = _Next.MORE
        return True

    def _end_field(self) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise invalid_json(f"more than {MAX_FIELDS} fields")
        if self._name in self._names:
            self._spans[self._name] = self._begun, self._at


def _match(pattern: re.Pattern[bytes], body: bytes | bytearray, at: int, end: int) -> int:
    found = pattern.match(body, at, end)
    return at if found is None else found.end()


def _fault_of(body: bytes | bytearray, fields: dict[str, tuple[int, int]], error: HttpError) -> HttpError:
    """The error of the fields read together, with the place in the body."""
    for name, (start, end) in fields.items():
        try:
            msgspec.json.decode(bytes(body[start:end]))
        except UNREADABLE:
            return no_json(body, f"the value of `{name}` is malformed (byte {start})", start)
    return error


def _too_much() -> HttpError:
    return invalid_json(f"more than {MAX_VALUES} arrays and objects, or nested deeper than {MAX_DEPTH}")


def _name(body: bytes | bytearray, start: int, end: int) -> str:
    if end - start > _MAX_KEY_BYTES:
        return ""
    try:
        return msgspec.json.decode(bytes(body[start:end]), type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise invalid_json(f"invalid field name (byte {start})") from None
