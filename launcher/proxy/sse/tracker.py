"""Follow a stream of server-sent events: where events end, whether one is an error, whether [DONE] came.

vLLM 0.32 ends a stream whose engine died with `data: {"error": ...}` and then `data: [DONE]` (measured;
entrypoints/openai/chat_completion/serving.py). A client that sees [DONE] takes the response for complete, so [DONE] is
left out after an error.

Only whole events pass: the bytes of an unfinished event are held until its blank line comes, so that a cut stream
leaves no half event with the client. vLLM writes whole events, so nothing waits; an event past HOLD_BYTES passes as it
comes.
"""

from __future__ import annotations

import re

HOLD_BYTES = 1 << 20

EVENT_END = re.compile(rb"\r\n\r\n|\n\r\n|\n\n|\r\r")
_ERROR_DATA = re.compile(rb'data:\s*\{\s*"error"\s*:\s*[{"]')
_ERROR_NAME = re.compile(rb"event:\s*(?:error|response\.failed)\s*(?:[\r\n]|$)")
_DONE = re.compile(rb"data:\s*\[DONE\]\s*$")
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_ABORT_ERROR = (
    b'data: {"error":{"message":"the engine aborted the request","type":"engine_aborted","code":503}}\n\n'
)
_CODE = re.compile(rb'"code"\s*:\s*"?(\d{3})\b')
_SIGNS = (b"error", b"failed", b"[DONE]", b'"abort"')  # signs of an error or an end; text may hold them, too


def aborted(answer: bytes) -> bool:
    """Whether an event, or a whole response, says that the engine aborted the request.

    vLLM 0.32 ends requests this way during engine shutdown, with status 200 (v1/engine/core.py).
    """
    return b'"abort"' in answer and _ABORTED.search(answer) is not None


def event_data(event: bytes) -> bytes | None:
    """The data of one event, its lines joined as the standard says; None for a comment or an empty event.

    Source: HTML Living Standard, 9.2.6 "Interpreting an event stream".
    """
    found = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(found) if found else None


class EventTracker:
    def __init__(self) -> None:
        self.events = 0  # whole events passed or left out
        self.done = False  # [DONE] came, and no error before it
        self.error: bytes | None = None  # the first error event; one of the engine was not passed
        self.error_first = False  # nothing came before it
        self._held = b""
        self._open = False  # part of an unfinished event has passed (it is larger than HOLD_BYTES)

    def feed(self, chunk: bytes) -> bytes:
        """Take what the instance sent; return what may pass to the client, possibly nothing."""
        if not self._held and chunk.endswith(b"\n\n"):
            return self._judge(chunk)  # nearly always
        data = self._held + chunk if self._held else chunk
        cut = len(data) if data.endswith(b"\n\n") else _last_boundary(data)
        if cut == 0:
            self._held = data
            return self._overflow()
        whole, self._held = (data, b"") if cut == len(data) else (data[:cut], data[cut:])
        passed = self._judge(whole)
        return passed + self._overflow() if len(self._held) > HOLD_BYTES else passed

    def _overflow(self) -> bytes:
        if len(self._held) <= HOLD_BYTES:
            return b""
        # The last 3 bytes may begin a boundary.
        passed, self._held = self._held[:-3], self._held[-3:]
        self._open = True
        return passed

    def _judge(self, whole: bytes) -> bytes:
        """Whole events in, the same without [DONE] after an error out."""
        if self.error is None and not any(sign in whole for sign in _SIGNS):
            self.events += whole.count(b"\n\n") or 1
            self._open = False
            return whole
        passed = bytearray()
        start = 0
        for found in EVENT_END.finditer(whole):
            event = whole[start : found.end()]
            start = found.end()
            if self._keep(event):
                passed += event
        passed += whole[start:]
        return bytes(passed)

    def _keep(self, event: bytes) -> bool:
        rest_of_open, self._open = self._open, False
        if rest_of_open:
            self.events += 1
            return True
        if self.error is None and aborted(event):
            self.error = _ABORT_ERROR
            self.error_first = self.events == 0
        is_done = False
        for line in event.splitlines():
            if _DONE.match(line):
                is_done = True
            elif self.error is None and (_ERROR_DATA.match(line) or _ERROR_NAME.match(line)):
                self.error = event
                self.error_first = self.events == 0
        if self.engine_fault:
            return False  # withheld, with all after it: another instance may continue the stream
        self.events += 1
        if is_done and self.error is None:
            self.done = True
        return not (is_done and self.error is not None)

    def rest(self) -> bytes:
        """The unfinished event at the end of a stream; it passes as it is."""
        rest, self._held = self._held, b""
        if _DONE.match(rest.strip()):  # a last event without its blank line
            if self.error is not None:
                return b""
            self.done = True
        return b"" if self.engine_fault else rest

    def break_off(self) -> bytes:
        """Bytes that must precede an event of ours after a break: the end of an open event. Held bytes are dropped."""
        self._held = b""
        was_open, self._open = self._open, False
        return b"\n\n" if was_open else b""

    @property
    def between_events(self) -> bool:
        """Whether no part of an unfinished event has come, and no error."""
        return not self._held and not self._open and self.error is None

    @property
    def inside_event(self) -> bool:
        return self._open

    @property
    def engine_fault(self) -> bool:
        """Whether the error is the engine's, not the request's: the event has no 4xx code."""
        if self.error is None:
            return False
        code = _CODE.search(self.error)
        return code is None or not code[1].startswith(b"4")


def _last_boundary(data: bytes) -> int:
    """Index after the last blank line; 0 when there is none."""
    return max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in (b"\n\n", b"\n\r\n", b"\r\r"))
