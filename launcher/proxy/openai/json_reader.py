"""What must be known of a large JSON body, read as its bytes arrive.

A decoder reads 64 MiB in one call of up to 0.2 s, in which the event loop serves nobody; another thread does not
help, for the call keeps the interpreter's lock. So a large body is walked in steps while it comes: each step looks
at new bytes alone, strings and numbers in C, arrays and objects one by one, up to MAX_VALUES. Only the top level is
judged; what is wrong below it is the instance's to refuse.
"""

from __future__ import annotations

import re
from enum import Enum

import msgspec

from launcher.proxy.errors import HttpError
from launcher.proxy.openai.body import invalid_json, read_body
from launcher.proxy.openai.body_schema import RequestBody, known_fields
from launcher.proxy.openai.prompts import MediaFinder

STEP_BYTES = 16_384  # what one step looks at: 5 ms for the worst
MAX_VALUES = 262_144  # arrays and objects of a large body: 0.2 s in all
MAX_FIELDS = 1024  # of the object itself
MAX_DEPTH = 1000  # Python's own parser, which vLLM uses, goes no deeper
MAX_SHORT_BYTES = 65536  # of the value of a field that is no part of the prompt
_MAX_SCALAR_BYTES = 1024
_MAX_KEY_BYTES = 256  # a longer one is none that we know, however it is escaped

_SPACE = re.compile(rb"[ \t\r\n]*+")
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
_BELOW = re.compile(rb'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)*+', re.DOTALL)
_SCALAR = re.compile(rb"[-+.0-9A-Za-z]++")
_QUOTE, _OPEN, _CLOSE = ord('"'), b"[{", b"]}"


class _Next(Enum):
    """What must come next in the object itself."""

    OBJECT = "{"
    FIELD_OR_END = '" or }'
    FIELD = '"'
    COLON = ":"
    VALUE = "a value"
    MORE = ", or }"
    NOTHING = "nothing"


class JsonReader:
    """One body. `feed` it as it grows, then `finish`. Both raise HttpError."""

    def __init__(self, prompt: tuple[str, ...]) -> None:
        """`prompt`: the fields that the route's prompt is in."""
        self._prompt = prompt
        self._names = known_fields(prompt)
        self._media = MediaFinder()
        self._at = 0  # up to here all is read
        self._stepped = 0  # up to here it was tried: a string or a number may have no end yet
        self._depth = 0
        self._next = _Next.OBJECT
        self._in_string = False
        self._begun = 0  # where the present field's name, then its value, begins
        self._name = ""
        self._fields = 0
        self._values = 0
        self._spans: dict[str, tuple[int, int]] = {}  # of the fields that matter; the last of a name counts

    def feed(self, body: bytes | bytearray) -> bool:
        """Look at one step of what has come; `body` is all of it. True: there is no more to look at."""
        self._stepped = min(len(body), self._stepped + STEP_BYTES)
        self._read(body, self._stepped)
        return self._stepped == len(body)

    def finish(self, body: bytes | bytearray) -> RequestBody:
        """What the whole body says."""
        self._read(body, len(body))
        if self._next is not _Next.NOTHING:
            raise invalid_json("it ends too early")
        short = {name: span for name, span in self._spans.items() if name not in (*self._prompt, "tools")}
        for name, (start, end) in short.items():
            if end - start > MAX_SHORT_BYTES:
                raise HttpError(400, f"cannot read the request: `{name}` is too long", param=name)
        text = b",".join(b'"%b":%b' % (name.encode(), bytes(body[a:b])) for name, (a, b) in short.items())
        found = read_body(b"{%b}" % text, self._prompt)
        view = memoryview(body)
        found.prompt = {name: view[slice(*self._spans[name])] for name in self._prompt if name in self._spans}
        found.tools = view[slice(*self._spans.get("tools", (0, 0)))]
        found.media = {name: self._media_within(name) for name in found.prompt}
        return found

    def _media_within(self, name: str) -> list[tuple[int, int]]:
        first, last = self._spans[name]
        return [(start - first, end - first) for start, end in self._media.spans if first < start < last]

    def _read(self, body: bytes | bytearray, end: int) -> None:
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

    def _string(self, body: bytes | bytearray, end: int) -> bool:
        """On to the end of a string. False: it is not here yet."""
        self._at = _match(_IN_STRING, body, self._at, end)
        if self._at == end or body[self._at] != _QUOTE:  # or half an escape
            return False
        self._at += 1
        self._in_string = False
        if self._depth == 1 and self._next is _Next.COLON:
            self._name = _name(body, self._begun, self._at)
        return True

    def _below(self, body: bytes | bytearray, end: int) -> bool:
        """On to the end of a value, from bracket to bracket. False: it is not here yet."""
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
        """One token of the object itself."""
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
        else:
            raise invalid_json(f"{self._next.value} was expected (byte {self._at})")
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
                raise invalid_json(f"a value was expected (byte {self._at})")
            if stop == end:  # there may be more of it
                return False
            self._at = stop - 1
        self._at += 1
        self._next = _Next.MORE
        return True

    def _end_field(self) -> None:
        self._fields += 1
        if self._fields > MAX_FIELDS:
            raise invalid_json(f"it has more than {MAX_FIELDS} fields")
        if self._name in self._names:
            self._spans[self._name] = self._begun, self._at


def _match(pattern: re.Pattern[bytes], body: bytes | bytearray, at: int, end: int) -> int:
    found = pattern.match(body, at, end)
    return at if found is None else found.end()


def _too_much() -> HttpError:
    return invalid_json(f"a body of this size may have {MAX_VALUES} arrays and objects, {MAX_DEPTH} deep")


def _name(body: bytes | bytearray, start: int, end: int) -> str:
    if end - start > _MAX_KEY_BYTES:
        return ""
    try:
        return msgspec.json.decode(bytes(body[start:end]), type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise invalid_json(f"a field's name can't be read (byte {start})") from None
