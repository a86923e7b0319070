"""The access log: one line per request, written together with others at the event loop's next turn."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from launcher.accounts.ended_request import EndedRequest
from launcher.base.api_errors import CLIENT_ERROR
from launcher.base.text import MAX_LINE, MAX_QUOTED, cut, quoted
from launcher.proxy.request.record import Request

ACCESS: Final = logging.getLogger("launcher.access")
MOST_LINES: Final = 64  # so many lines are written without waiting for the event loop
# Asked for every second: logged at DEBUG.
_QUIET: Final = frozenset({"/health", "/metrics", "/metrics/host", "/load"})
_NO_FIELDS: Final[Mapping[str, object]] = {}
# The attributes that all lines share. The record that logging would make costs as much as the rest of the line: it looks
# up the thread, the process and the file's parts.
_BLANK: Final = vars(logging.makeLogRecord({}))

Line = tuple[int, str, Mapping[str, object]]  # level, message, fields


class LineWriter(Protocol):
    """A log handler that writes many lines at once. It logs its own errors and never raises."""

    takes_fields: bool

    def write_lines(self, logger: str, lines: Sequence[Line]) -> None:
        """Write them in one go, in this order. Without `takes_fields` the fields are empty."""


class AccessLog:
    def __init__(self, wanted: str, call_soon: Callable[[Callable[[], None]], object]) -> None:
        """`wanted`: "all", "errors" or "off". `call_soon`: runs a callback at the event loop's next turn."""
        self._wanted = wanted
        self._call_soon = call_soon
        self._lines: list[tuple[int, str, EndedRequest]] = []

    def add(self, request: Request, _event: object, _now: float) -> None:
        """A request has ended. No prompt text gets into the log."""
        ended = request.ended
        if ended is None or (
            self._wanted != "all"
            and (self._wanted == "off" or (ended.outcome == "completed" and ended.status < CLIENT_ERROR))
        ):
            return
        path = ended.path
        level = logging.DEBUG if path in _QUIET else logging.INFO
        if not ACCESS.isEnabledFor(level):
            return
        slot = "-" if ended.slot is None else ended.slot
        why = f": {quoted(ended.reason, MAX_LINE)}" if ended.reason else ""
        text = (
            f"{ended.method} {quoted(path)} {ended.status or '-'} slot={slot} {ended.duration_s * 1000:.1f} ms "
            f"{ended.outcome} {ended.request_id}{why}"
        )
        self._lines.append((level, text, ended))
        if len(self._lines) == 1:
            self._call_soon(self.flush)
        elif len(self._lines) >= MOST_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered. The server calls it once more when it stops."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        if (writer := _writer()) is None:
            for level, text, ended in lines:
                ACCESS.handle(_record(level, text, _fields(ended)))
        elif writer.takes_fields:
            writer.write_lines(ACCESS.name, [(level, text, _fields(ended)) for level, text, ended in lines])
        else:
            writer.write_lines(ACCESS.name, [(level, text, _NO_FIELDS) for level, text, _ in lines])


def _fields(ended: EndedRequest) -> dict[str, object]:
    """Names are those of docs."""
    return {
        "request_id": ended.request_id,
        "method": ended.method,
        "path": ended.path if len(ended.path) <= MAX_QUOTED else cut(ended.path),
        "status": ended.status,
        "model": ended.model or None,
        "adapter": ended.adapter or None,
        "slot": ended.slot,
        "duration_s": round(ended.duration_s, 6),
        "queued_s": None if ended.queued_s is None else round(ended.queued_s, 6),
        "first_byte_s": None if ended.first_byte_s is None else round(ended.first_byte_s, 6),
        "predicted_s": None if ended.predicted_s is None else round(ended.predicted_s, 6),
        "bytes_in": ended.bytes_in,
        "bytes_out": ended.bytes_out,
        "attempts": ended.attempts,
        "continued": ended.continued,
        "key": ended.key or None,
        "overflowed": ended.overflow != "",
        "overflow": ended.overflow or None,
        "overflow_reason": ended.overflow_reason or None,
        "outcome": ended.outcome,
        "reason": ended.reason or None,
    }


def _writer() -> LineWriter | None:
    """The log's only handler, if it can write many lines at once."""
    if ACCESS.propagate or len(ACCESS.handlers) != 1:
        return None
    handler: Any = ACCESS.handlers[0]
    return handler if hasattr(handler, "write_lines") else None


def _record(level: int, text: str, fields: Mapping[str, object]) -> logging.LogRecord:
    created = time.time()
    record = logging.LogRecord.__new__(logging.LogRecord)
    record.__dict__ = {
        **_BLANK,
        "name": ACCESS.name,
        "msg": text,
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "pathname": __file__,
        "created": created,
        "msecs": created % 1 * 1000,
        **fields,
    }
    return record
