"""Follow a stream of server-sent events: where events end, whether one is an error or no JSON, and whether
the last one came.

vLLM 0.32 ends a stream whose engine died with `data: {"error": ...}` and then `data: [DONE]` (measured;
entrypoints/openai/chat_completion/serving.py). A client that sees [DONE] takes the response for complete, so [DONE] is
left out after an error.

Only whole events pass: the bytes of an unfinished event are held until its blank line comes, so that a cut stream
leaves no half event with the client. vLLM writes whole events, so nothing waits; an event past HOLD_BYTES passes as it
comes.

An instance may write half an event and go on. Data that begins with `{`, and all data after the first such event, must
be JSON, or [DONE]. Comments, events without data and pings say nothing (`quiet`): they are no progress.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from launcher.base.api_errors import blames_request
from launcher.base.foreign_json import UNREADABLE
from launcher.proxy.openai.answers import is_json
from launcher.proxy.sse.ends import (
    PING_SIGNS,
    SIGNS,
    Event,
    StreamEnd,
    aborted,
    brings_output,
    finished_choices,
    is_ping,
    read_event,
)
from launcher.proxy.sse.engine_errors import status_of_error

HOLD_BYTES = 1 << 20
_NAME_BYTES = 64  # of an event's first line
_PING_BYTES = 256
_PING_EVENT_BYTES = 4096  # with comments before it; looking for its name takes 20 ms of a MiB

_EVENT_END = re.compile(rb"\r\n\r\n|\n\r\n|\n\n|\r\r")
_ERROR_NAME = re.compile(rb"event:\s*(?:error|response\.failed)\s*(?:[\r\n]|$)")
_DONE_DATA = b"[DONE]"
_DONE_BYTES = 64  # with blanks
# What is missing of a stream that is whole otherwise. Cohere's own API has no [DONE].
_LAST_EVENTS = {
    StreamEnd.DONE: b"data: [DONE]\n\n",
    StreamEnd.MESSAGE_END: b"",
    StreamEnd.MESSAGE_STOP: b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}
_ABORT_ERROR = (
    b'data: {"error":{"message":"the engine aborted the request","type":"engine_aborted",'
    b'"param":null,"code":503}}\n\n'
)
_FIELD = re.compile(
    rb"(?:data|event|id|retry)?:|(?:data|event|id|retry)?$"
)  # of a line: others are ignored by clients
_NOT_A_COMMENT = re.compile(rb"\r|\n[^:\n]")  # behind a comment
# Signs of an error, an end or a ping; text may hold them, too.
_SIGNS = (b"error", b"failed", b"[DONE]", b'"abort"', *PING_SIGNS)
_PING_NAME = re.compile(rb"(?:^|[\r\n])event:[ ]?(?:ping|keep-?alive|heartbeat)[\r\n]")


def event_ends(events: bytes) -> Iterator[int]:
    """The offsets behind the blank lines that end events."""
    if b"\r" in events:  # no server known writes it
        yield from (found.end() for found in _EVENT_END.finditer(events))
        return
    at = events.find(b"\n\n") + 2
    while at > 1:
        yield at
        at = events.find(b"\n\n", at) + 2


def event_data(event: bytes) -> bytes | None:
    """The data of one event, its lines joined as the standard says; None for a comment and an event with empty data.

    Source: HTML Living Standard, 9.2.6 "Interpreting an event stream".
    """
    found = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(found) or None


def _is_ping(event: bytes, data: bytes) -> bool:
    return _PING_NAME.search(event) is not None or is_ping(data)


class EventTracker:
    def __init__(self, end: StreamEnd = StreamEnd.DONE, *, choices: int = 1) -> None:
        """`choices`: how many the request asked for."""
        self.end = end
        self.events = 0  # whole events with data, passed or left out; pings are none
        self.output = False  # a part of the answer came, or something unknown
        self.done = False  # its end came, and no error before it
        self.error: bytes | None = None  # the first error event; one of the engine was not passed
        self.error_first = False  # no output came before it
        self.engine_fault = False  # the error is the engine's, by its code and words, and not the request's
        self.broken = False  # an event was no JSON; it was not passed, nor was what came after it
        self.quiet = False  # the last bytes fed were comments, pings, or other events without data
        self._signs = _SIGNS + SIGNS[end]
        self._json = False  # an event's data was a JSON object
        self._closing = False  # the event came that must precede the last one
        self._held = b""
        self._choices = choices
        self._finished: set[int] = set()  # choices that said why they end
        self._open = False  # part of an unfinished event has passed (it is larger than HOLD_BYTES)
        self._open_is_last = False

    def feed(self, chunk: bytes) -> bytes:
        """Take what the instance sent; return what may pass to the client, possibly nothing."""
        self.quiet = False
        if not self._held and chunk.endswith(b"\n\n"):
            return self._judge(chunk)  # nearly always
        data = self._held + chunk if self._held else chunk
        # The last 3 held bytes may begin a boundary.
        cut = len(data) if data.endswith(b"\n\n") else _last_boundary(data, max(0, len(self._held) - 3))
        if cut == 0:
            self._held = data
            self.quiet = _may_say_nothing(data)
            return self._overflow()
        whole, self._held = (data, b"") if cut == len(data) else (data[:cut], data[cut:])
        passed = self._judge(whole)
        self.quiet = self.quiet and _may_say_nothing(self._held)
        return passed + self._overflow() if len(self._held) > HOLD_BYTES else passed

    def _overflow(self) -> bytes:
        if len(self._held) <= HOLD_BYTES:
            return b""
        # The last 3 bytes may begin a boundary.
        passed, self._held = self._held[:-3], self._held[-3:]
        self.output = True
        if not self._open:
            self._open = True
            # The last event of a response repeats all of it.
            name = passed[:_NAME_BYTES].partition(b"\n")[0]
            self._open_is_last = self.end is StreamEnd.RESPONSE_COMPLETED and any(
                sign in name for sign in SIGNS[self.end]
            )
        return passed

    def _judge(self, whole: bytes) -> bytes:
        """Whole events in, the same without [DONE] after an error out."""
        if whole.startswith(b"data: {") and whole.find(b"\n\n") == len(whole) - 2 and self._is_usual(whole):
            self.events += 1
            self._json = True
            self._note(whole[6:])
            return whole
        self.quiet = True
        if whole.startswith(b":") and not self._open and _NOT_A_COMMENT.search(whole) is None:
            return b"" if self.engine_fault or self.broken else whole
        passed = bytearray()
        start = 0
        for end in event_ends(whole):
            event, start = whole[start:end], end
            if self._keep(event):
                passed += event
        passed += whole[start:]
        return whole if len(passed) == len(whole) else bytes(passed)

    def _is_usual(self, event: bytes) -> bool:
        """A single event on one line that is JSON, and tells no error and no end."""
        if self.error is not None or self.broken or self._open:
            return False
        return not any(sign in event for sign in self._signs) and is_json(event[6:])

    def _keep(self, event: bytes) -> bool:
        rest_of_open, self._open = self._open, False
        if rest_of_open:
            self.events += 1
            self.quiet = False
            self.done = self.done or self._open_is_last
            self._open_is_last = False
            return True
        data = event_data(event)
        if data is not None and len(event) <= _PING_EVENT_BYTES and _is_ping(event, data):
            data = None
        if self.error is None and not self.broken and not self.done:
            self._read(event, data)
        if self.engine_fault or self.broken:
            self.quiet = False
            return False  # withheld, with all after it: another instance may continue the stream
        if data is None:
            return True
        self.quiet = False
        if not self.done and _is_done(data):
            return False  # before the API's own end, or behind an error: clients would take it for the end
        self.events += 1
        self._note(data)
        return True

    def _read(self, event: bytes, data: bytes | None) -> None:
        """Whether it is no JSON, an error, or the end."""
        if self._is_broken(event, data):
            self.broken = True
        elif not any(sign in event for sign in self._signs):
            return
        elif aborted(event):
            self._fail(_ABORT_ERROR)
        elif any(_ERROR_NAME.match(line) for line in event.splitlines()):
            self._fail(event)
        elif data is not None:
            self._read_end(event, data)

    def _note(self, data: bytes) -> None:
        """Note output and finished choices of an event with data."""
        if not self.output:
            self.output = brings_output(self.end, data)
        if self.end is StreamEnd.DONE:
            self._finished.update(finished_choices(data))

    def _fail(self, error: bytes) -> None:
        self.error = error
        self.error_first = not self.output
        self.engine_fault = not blames_request(status_of_error(event_data(error) or b""))

    def _is_broken(self, event: bytes, data: bytes | None) -> bool:
        if data is None:
            return self._json and not all(_FIELD.match(line) for line in event.splitlines())
        if not self._json and not data.lstrip().startswith(b"{"):
            return False
        if _is_done(data):
            return False
        self._json = is_json(data)
        return not self._json

    def _read_end(self, event: bytes, data: bytes) -> None:
        if _is_done(data):
            # Servers may add it to a stream whose end is another event: it says nothing there.
            if self.end is StreamEnd.MESSAGE_END and not self._closing:
                self._fail(_ABORT_ERROR)
            self.done = self.end is StreamEnd.DONE or (self.end is StreamEnd.MESSAGE_END and self._closing)
            return
        match read_event(self.end, data):
            case Event.GIVEN_UP:
                self._fail(_ABORT_ERROR)
            case Event.ERROR:
                self._fail(event)
            case Event.CLOSING:
                self._closing = True
            case Event.LAST if self._closing or self.end is StreamEnd.RESPONSE_COMPLETED:
                self.done = True
            case Event.LAST:
                self._fail(_ABORT_ERROR)
            case Event.USUAL:
                pass

    def rest(self) -> bytes:
        """The unfinished event at the end of a stream. It passes as it is, unless it is half of one; it may be the last."""
        rest, self._held = self._held, b""
        if self._open or not rest:
            return rest
        return rest if self._keep(rest) else b""

    def missing_end(self, rest: bytes) -> bytes:
        """`rest`, ended, and the last event, where nothing else is missing of a stream whose body has ended; else nothing.

        Some engines end a stream without it (MLC LLM, text-generation-inference 2.1, llama-box, LiteLLM 1.15): an answer
        is whole once every choice has told why it ends, with one of the API's reasons.
        """
        if self.done or self.error is not None or self.broken or self._open:
            return b""
        last = _LAST_EVENTS.get(self.end)
        if last is None or not (self._closing or self._finished_all):
            return b""
        self.done = True
        gap = b"" if not rest or rest.endswith(b"\n\n") else b"\n\n"
        return rest + gap + last

    @property
    def _finished_all(self) -> bool:
        return self.end is StreamEnd.DONE and len(self._finished) >= self._choices

    def break_off(self) -> bytes:
        """Bytes that must precede an event of ours after a break: the end of an open event. Held bytes are dropped."""
        self._held = b""
        was_open, self._open = self._open, False
        return b"\n\n" if was_open else b""

    @property
    def between_events(self) -> bool:
        """Whether no part of an unfinished event has come, and no error, and data must be JSON from here on.

        Before the first JSON the data of each event decide this, so that they have to be read.
        """
        return self._json and not self._held and not self._open and self.error is None and not self.broken

    @property
    def inside_event(self) -> bool:
        return self._open


def _is_done(data: bytes) -> bool:
    return len(data) <= _DONE_BYTES and data.strip() == _DONE_DATA


def _may_say_nothing(held: bytes) -> bool:
    """Whether the beginning of an event, or of none, may be that of a comment or a ping."""
    return len(held) <= _PING_BYTES or (held.startswith(b":") and len(held) <= HOLD_BYTES)


def _last_boundary(data: bytes, begin: int) -> int:
    """Index after the last blank line from `begin` on; 0 when there is none."""
    cut = 0
    for mark in (b"\n\n", b"\n\r\n", b"\r\r"):
        at = data.rfind(mark, begin)
        if at >= 0:
            cut = max(cut, at + len(mark))
    return cut


# --- The usage of a stream. ---

USAGE_EVENT_BYTES: Final = 16 * 1024
"""The most bytes of an event whose usage is looked at."""
USAGE_KEY: Final = b'"usage"'  # in no text: within a JSON string every quotation mark is escaped
_TIMINGS_KEY: Final = b'"timings"'


def usage_apart(events: bytes, *, keep: bool) -> bytes:
    """Whole events, with usage in an event of its own as OpenAI's API tells it, or without that event where `keep` is False;
    the very same bytes where nothing changes.

    llama.cpp's server adds the usage of a completion to the event with its finish_reason (build 11549, as of all before:
    tools/server/server-task.cpp, to_json_oaicompat), where clients do not look. Its `timings` tell such an event from
    those of vLLM's continuous_usage_stats, which a client has asked for."""
    if keep and _TIMINGS_KEY not in events:
        return events
    told, start = bytearray(), 0
    for end in event_ends(events):
        event, start = events[start:end], end
        chunk = _with_usage(event) if USAGE_KEY in event and len(event) <= USAGE_EVENT_BYTES else None
        if (
            chunk is None
            or (chunk["choices"] and _TIMINGS_KEY not in event)
            or (keep and not chunk["choices"])
        ):
            told += event
            continue
        apart = chunk | {"choices": []}
        for key in ("usage", "timings"):
            chunk.pop(key, None)
        for each in ([chunk] if chunk["choices"] else []) + ([apart] if keep else []):
            told += b"data: " + msgspec.json.encode(each) + b"\n\n"
    told += events[start:]
    return events if told == events else bytes(told)


def _with_usage(event: bytes) -> dict[str, Any] | None:
    """The data of an event of OpenAI's API that tells usage."""
    data = event_data(event)
    try:
        chunk = None if data is None else msgspec.json.decode(data)
    except UNREADABLE:
        return None
    if not isinstance(chunk, dict) or "choices" not in chunk or not isinstance(chunk.get("usage"), dict):
        return None
    return chunk
