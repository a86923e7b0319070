"""The fast path: usual events pass from the instance's connection to the client's transport without being decoded.

A read is relayed here only if it is whole chunks (RFC 9112 section 7.1; sizes as vLLM's uvicorn writes them: lower-case
hex, no extensions) with usual events; any other read changes nothing here and takes the slow path. There are three
kinds of streams:

    plain           one event per token, alike but for the text: EventPattern; the read goes on as it came
    with token ids  the instance was asked for token ids, the client gets null in their place
    any events      nothing is kept of the stream; an event is usual if its data begins and ends as a JSON object does, has
                    the key of the API's pieces of text, and tells no end, no error and no usage

An event of the first two kinds is JSON but for its text, which is not looked into; of the third kind no more than the two
ends are checked. Half an event, as a dying engine writes it, has another end: it takes the slow path, which parses it
(sse/tracker.py). So do comments.

What a relayed event of the first two kinds tells is appended to `text` as `text"`, or as `text"12,13]` with its ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from launcher.proxy.sse.ends import MARKS, USUAL_KEYS, StreamEnd

NEVER: Final = b"\x00"  # in no event
SIZES: Final = 4096  # bytes of a chunk with its framing; a longer one takes the slow path
LINE_BYTES: Final = 5  # the longest size line

IDS_KEY: Final = b'"token_ids":['
IDS_NULL: Final = b'"token_ids":null'
PROMPT_KEY: Final = b'"prompt_token_ids":['

_BLANK_LINE: Final = b"\n\n"
# How the data of an event begins and ends that is a JSON object.
_OBJECT: Final = b"\ndata: {"
_OBJECT_END: Final = b"}\n\n"
_EVENT_END: Final = b"}\n\n\r\n"  # the same, and of its chunk
WORDLESS: Final = b'"delta":{}'  # vLLM writes such an event for its ids alone: the client gets none
NO_USAGE: Final = (
    b'"usage":null'  # OpenAI's API writes it into each event but the last, where usage is asked for
)
_REASON: Final = b'"finish_reason"'
_NO_REASON: Final = b'"finish_reason":null'
# The same as other servers write it (sse/ends.py, NO_REASONS).
_NO_REASONS: Final = tuple(
    b'"finish_reason":' + value for value in (b" null", b'""', b' ""', b'"null"', b' "null"')
)
_TEXT_KEY = re.compile(rb'"(?:content|text)":"')
ESCAPED_TEXT: Final = re.compile(rb'(?:[^"\\]|\\.)*+', re.DOTALL)  # a JSON string's inside


def _size_lines() -> list[bytes]:
    lines = [NEVER] * SIZES
    for size in range(1, SIZES):
        line = b"%x\r\n" % size
        if len(line) + size + 2 < SIZES:
            lines[len(line) + size + 2] = line
    return lines


SIZE_LINES: Final = _size_lines()
"""The size line of a chunk, by the length of the chunk with its framing; NEVER where no chunk has this length."""
CHUNK_SIZES: Final = {line: size for size, line in enumerate(SIZE_LINES) if line != NEVER}
_LINES: Final = [b"%x\r\n" % size for size in range(SIZES)]  # by the length of the data

_NO_TEXT: Final = bytearray()  # of a fast path that is not armed: nothing is appended
_SHARED: dict[bytes, bytes] = {}
_MAX_SHARED: Final = 256


def _shared(value: bytes) -> bytes:
    """One object for equal bytes of many streams, so that it stays in the CPU's cache."""
    if len(_SHARED) > _MAX_SHARED:
        _SHARED.clear()
    return _SHARED.setdefault(value, value)


class EventPattern:
    """The constant bytes around the text of one stream's usual events, as its client gets them."""

    __slots__ = ("prefix", "suffix")

    def __init__(self) -> None:
        self.prefix = NEVER
        self.suffix = NEVER

    @property
    def known(self) -> bool:
        return self.prefix is not NEVER

    def learn(self, event: bytes) -> bool:
        """Learn from an event that carries text and nothing else.

        False: the text can't be found without a parser (spaces in the JSON); nothing is learned.
        """
        key = _TEXT_KEY.search(event)
        text = None if key is None else ESCAPED_TEXT.match(event, key.end())
        if key is None or text is None or event[text.end() : text.end() + 1] != b'"':
            return False
        self.prefix, self.suffix = event[: key.end()], _shared(event[text.end() :])
        return True

    def piece(self, event: bytes) -> bytes | None:
        """The escaped text of an event of this shape; None when it has another."""
        prefix, suffix = self.prefix, self.suffix
        end = len(event) - len(suffix)
        if end < len(prefix) or not event.startswith(prefix) or not event.endswith(suffix):
            return None
        text = event[len(prefix) : end]
        return text if b'"' not in text or ESCAPED_TEXT.fullmatch(text) else None

    def around_ids(self) -> tuple[bytes, bytes] | None:
        """Of an instance's event with token ids: the bytes from its text's closing quotation mark to the ids, and
        those from the bracket that ends the ids. None where the client's events have no null for ids.
        """
        until, key, after = self.suffix[1:].rpartition(IDS_NULL)
        return (until + IDS_KEY, b"]" + after) if key else None


class FastPath:
    """One upstream connection's fast path. Armed at a chunk's boundary, by the slow path, once a stream is usual."""

    __slots__ = (
        "_any", "_client_end", "_end", "_key", "_mark", "_other_mark", "_prefix", "_skip", "_tail", "_text",
        "_until", "_without_ids", "_write", "bytes", "events",
    )  # fmt: skip

    def __init__(self) -> None:
        self.events = 0  # relayed here
        self.bytes = 0  # of them, as the client got them
        self._text: bytearray
        self._write: Callable[[bytes], None]
        self._client_end = b""
        self._mark = self._other_mark = self._key = NEVER
        self.disarm()

    def disarm(self) -> None:
        """Relay nothing here until it is armed again, and keep nothing of the stream."""
        self._text, self._write = _NO_TEXT, _nowhere
        self._prefix, self._end, self._skip, self._tail = NEVER, NEVER, 0, 0
        self._until = b""
        self._any = self._without_ids = False

    def arm(
        self, pattern: EventPattern, text: bytearray, write: Callable[[bytes], None], *, ids: bool = False
    ) -> None:
        """Relay events of this pattern. `ids`: as the instance writes them, they have token ids."""
        self.disarm()
        around = pattern.around_ids() if ids else None
        if not pattern.known or (ids and around is None):
            return
        self._text, self._write = text, write
        self._prefix, self._skip = pattern.prefix, len(pattern.prefix)
        if around is None:
            self._end = _shared(pattern.suffix + b"\r\n")
        else:
            self._until, self._end = _shared(around[0]), _shared(around[1] + b"\r\n")
            self._client_end = _shared(pattern.suffix[1:] + b"\r\n")
        self._tail = len(self._end)

    def arm_any(
        self,
        write: Callable[[bytes], None],
        *,
        without_ids: bool = False,
        end: StreamEnd = StreamEnd.DONE,
    ) -> None:
        """Relay any usual events. `without_ids`: with null in the place of token ids; `end`: of the stream."""
        self.disarm()
        self._mark, self._other_mark = MARKS[end]
        self._key = USUAL_KEYS[end]
        self._any, self._without_ids, self._write = True, without_ids, write

    def data_received(self, data: bytes) -> bool:
        """One read. True: it was relayed here. No `try` and no call that can be avoided: this is each token."""
        size = len(data)
        if size < SIZES:
            line = SIZE_LINES[size]
            begin = len(line)
            if data.startswith(line) and data.startswith(self._prefix, begin) and data.endswith(self._end):
                at = begin + self._skip
                cut = data.find(b'"', at) + 1
                end = size - self._tail + 1
                if cut == end:
                    text = self._text
                    text += data[at:cut]
                    self.events += 1
                    self.bytes += size
                    self._write(data)
                    return True
                until = self._until
                ids = cut + len(until)
                if until and data.startswith(until, cut) and data.find(b"]", ids) + 1 == end:
                    text = self._text
                    text += data[at:cut]
                    text += data[ids:end]
                    told = data[begin:cut] + self._client_end
                    told = _LINES[len(told) - 2] + told
                    self.events += 1
                    self.bytes += len(told)
                    self._write(told)
                    return True
        return self.slow(data)

    def slow(self, data: bytes) -> bool:
        """A read that is not one usual event of the pattern: several events, or the slow path's."""
        return self.relay_more(data)

    def relay_more(self, data: bytes) -> bool:
        """Several chunks, text with quotation marks, streams of any events. False: nothing was done."""
        if self._prefix is NEVER and not self._any:
            return False
        return self._relay_any(data) if self._any else self._relay_pattern(data, _chunks(data))

    def _relay_pattern(self, data: bytes, chunks: list[bytes]) -> bool:
        prefix, until, end = self._prefix, self._until, self._end
        kept: list[bytes] = []
        told: list[bytes] = []
        for chunk in chunks:
            text = ESCAPED_TEXT.match(chunk, self._skip)
            if text is None or not chunk.startswith(prefix):
                return False
            cut = text.end() + 1
            kept.append(chunk[self._skip : cut])
            close = cut - 1
            if until:
                close = chunk.find(b"]", cut + len(until))
                kept.append(chunk[cut + len(until) : close + 1])
                told.append(_framed(chunk[:cut] + self._client_end))
            if chunk[close:] != end or not chunk.startswith(until, cut):
                return False
        text_so_far = self._text
        text_so_far += b"".join(kept)
        return self._pass(len(chunks), b"".join(told) if until else data)

    def _relay_any(self, data: bytes) -> bool:
        if (
            not data.endswith(_EVENT_END)
            or _OBJECT not in data
            or b"error" in data
            or self._mark in data
            or self._other_mark in data
            or (b'"usage"' in data and data.count(b'"usage"') != data.count(NO_USAGE))
        ):
            return False
        # Two events and their chunk's framing have six line ends or more; this count is the cheaper one.
        events = 1 if data.count(b"\n") < 6 else data.count(_BLANK_LINE)
        reasons = data.count(_REASON)
        if (reasons and reasons != data.count(_NO_REASON) and _ends_choice(data, reasons)) or (
            reasons != events and data.count(self._key) != events  # others are rare, and one may be a ping
        ):
            return False
        if (
            events == 1
            and len(data) < SIZES
            and data.startswith(SIZE_LINES[len(data)])
            and not self._without_ids
        ):
            return self._pass(1, data)
        chunks = _chunks(data)
        if not _are_objects(data, events, chunks):
            return False
        if self._without_ids:
            if events != len(chunks) or WORDLESS in data or PROMPT_KEY in data:
                return False
            data = b"".join(_framed(take_list(chunk, IDS_KEY)[0]) for chunk in chunks)
        return self._pass(len(chunks) and events, data)

    def _pass(self, events: int, data: bytes) -> bool:
        if not events:
            return False
        self.events += events
        self.bytes += len(data)
        self._write(data)
        return True


def _ends_choice(data: bytes, reasons: int) -> bool:
    """Whether a choice may say why it ends: not all of so many finish_reasons are as one server writes null."""
    return all(reasons != data.count(form) for form in _NO_REASONS)


def _are_objects(data: bytes, events: int, chunks: list[bytes]) -> bool:
    """Whether the data of each event begins and ends as a JSON object does, and each chunk is whole events."""
    if events > 1 and events != data.count(_OBJECT):
        return False
    if not all(chunk.endswith(_EVENT_END) for chunk in chunks):
        return False
    return events == len(chunks) or events == data.count(_OBJECT_END)


def _chunks(data: bytes) -> list[bytes]:
    """The chunks of a read, each with the line end behind it; none unless all are whole."""
    chunks: list[bytes] = []
    at, size = 0, len(data)
    while at < size:
        begin = data.find(b"\n", at, at + LINE_BYTES) + 1
        till = at + CHUNK_SIZES.get(data[at:begin], size + 1)
        if till > size:
            return []
        chunks.append(data[begin:till])
        at = till
    return chunks


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b" % (len(data) - 2, data)


def take_list(event: bytes, key: bytes) -> tuple[bytes, bytes | None]:
    """An event with null in the place of the list behind `key`, and what was in the list; None: there is no `key`."""
    start = event.find(key) + len(key)
    if start < len(key):
        return event, None
    end = event.find(b"]", start)
    return (event[: start - 1] + b"null" + event[end + 1 :], event[start:end]) if end >= 0 else (event, b"")


def _nowhere(_data: bytes) -> None:
    raise AssertionError("the fast path is not armed")
