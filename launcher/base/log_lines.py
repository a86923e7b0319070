"""Log lines: events with fields to journald, readable lines to a terminal.

Who logs only appends a line to a bounded queue; a thread writes it. A reader that stops (Ctrl-S in a terminal, a container
runtime that hangs, a full socket of journald) therefore stops no event loop: lines that do not fit are dropped, counted,
and told in a line of their own once the reader goes on.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import fcntl
import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, TextIO

from launcher.base.errors import reason
from launcher.base.text import MAX_LINE, printable, printable_lines, quoted

# Attributes of every LogRecord; what else a record has came in by `extra=` and is a field.
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
# Prompts are logged where that is asked for, and then whole.
_WHOLE: Final = "launcher.prompts"
# The log of requests.
ACCESS: Final = "launcher.access"
_TIME: Final = "%H:%M:%S"
# Characters of a traceback; of a longer one the end is kept, which names the error.
_MAX_TRACEBACK: Final = 32_768
# Bytes of lines that wait for their reader. Once they are reached, lines are dropped until half of them are written.
MOST_BYTES: Final = 4 << 20
# Bytes that the thread writes in one go.
_PIECE_BYTES: Final = 1 << 16
# After it wrote: lines that come meanwhile are written together. Waking a thread costs more than to write a line.
_PAUSE_S: Final = 0.05
# At exit, for the reader to take the last lines.
EXIT_S: Final = 3.0
# systemd's JOURNAL_NATIVE_PROTOCOL.
SOCKET: Final = "/run/systemd/journal/socket"
_SOCKET_BYTES: Final = 8 << 20
# syslog(3)'s priorities, by the highest level of the logging module.
_PRIORITIES: Final = (
    (logging.DEBUG, 7), (logging.INFO, 6), (logging.WARNING, 4), (logging.ERROR, 3), (logging.CRITICAL, 2),
)  # fmt: skip

Line = tuple[int, str, Mapping[str, object]]  # level, message, fields


def under_journal() -> bool:
    """Whether stderr is connected to the journal (systemd.exec(5), JOURNAL_STREAM=DEVICE:INODE)."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        facts = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):
        return False
    return stream == f"{facts.st_dev}:{facts.st_ino}"


def message_of(record: logging.LogRecord) -> str:
    """The event in words, on one line: parts of it may come from a client, an operator or an instance."""
    text = record.getMessage()
    return printable(text) if record.name == _WHOLE else quoted(text, MAX_LINE)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The event's own fields: what the caller gave as `extra`; texts as in `message_of`, a tuple is one of texts."""
    return {name: _shown(value) for name, value in record.__dict__.items() if _is_own(name)}


def _is_own(name: str) -> bool:
    """Libraries may give every record of the process fields, such as ray's `_ray_timestamp_ns`."""
    return name not in _STANDARD and not name.startswith("_")


def _shown(value: object) -> object:
    if type(value) is tuple:
        return [quoted(str(text), MAX_LINE) for text in value]
    return quoted(value, MAX_LINE) if type(value) is str else value


def _traceback(text: str) -> str:
    return printable_lines(text[-_MAX_TRACEBACK:])


class QueuedHandler(logging.Handler, ABC):
    """Encodes records for `reader` where they are logged; its thread writes them."""

    def __init__(self, reader: str) -> None:
        super().__init__()
        self._reader = reader
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        """Of lines that are not written yet."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._writing_since = 0.0
        """When the write in progress began; 0: there is none."""
        self._full = self._closed = False
        self._idle = self._urgent = False
        """The thread waits for a line; a line is not to wait."""
        self._waiters = 0
        """Callers that wait until all is written."""
        self._untold = 0
        """Dropped lines of which no line tells yet."""
        self._unread_since = 0.0
        """When the write began that the first of them waited for."""
        self._error = ""
        """Why the last write failed."""
        self.dropped = 0
        """Lines that were not written, since the start."""

    @abstractmethod
    def _encoded(self, record: logging.LogRecord) -> bytes: ...

    @abstractmethod
    def _encoded_lines(self, logger: str, lines: Sequence[Line]) -> Sequence[bytes]: ...

    @abstractmethod
    def _write(self, lines: Sequence[bytes]) -> None:
        """In the thread: return when the reader has taken all. Raises OSError."""

    def _end(self) -> None:
        """The thread's last call."""

    # --- who logs --------------------------------------------------------------------------------

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record. Never blocks, never raises: logging must not end or delay the daemon."""
        try:
            line = self._encoded(record)
        except Exception as error:
            self.write_lines(record.name, [_not_encoded(error)])
        else:
            self._put((line,), urgent=record.levelno >= logging.WARNING)

    def write_lines(self, logger: str, lines: Sequence[Line]) -> None:
        """Queue events of one logger: their levels, messages and fields. Never blocks, never raises."""
        try:
            encoded = self._encoded_lines(logger, lines)
        except Exception as error:
            encoded = self._encoded_lines(logger, [_not_encoded(error)])
        self._put(encoded, urgent=any(level >= logging.WARNING for level, *_ in lines))

    def warnings(self) -> tuple[str, ...]:
        """While lines are being dropped: since when."""
        with self._changed:
            if not self._full:
                return ()
            return (f"{self._untold} log lines were dropped: {self._unread()}",)

    def drained(self, within_s: float) -> bool:
        """Block until all lines are written. False: they are not, within that time."""
        with self._changed:
            self._waiters += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._bytes and not self._full, within_s)
            finally:
                self._waiters -= 1

    def flush(self) -> None:
        """Block until all lines are written, at most EXIT_S. Of the logging module, at exit."""
        self.drained(EXIT_S)

    def close(self) -> None:
        """End the thread after the lines that it has. Further ones are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        super().close()

    def _put(self, lines: Sequence[bytes], *, urgent: bool) -> None:
        with self._changed:
            if self._closed:
                return
            for line in lines:
                if self._takes(len(line)):
                    self._tell_dropped()
                    self._append(line)
                else:
                    self._drop(1)
            if self._thread is None and lines:
                self._thread = threading.Thread(target=self._run, name=f"log to {self._reader}", daemon=True)
                # Without another thread (a limit, or at the interpreter's end) lines wait for the next one's try.
                try:
                    self._thread.start()
                except RuntimeError:
                    self._thread = None
            self._urgent |= urgent
            if self._idle or self._is_due():
                self._idle = False
                self._changed.notify_all()

    def _takes(self, size: int) -> bool:
        self._full = self._bytes > MOST_BYTES // 2 if self._full else self._bytes + size > MOST_BYTES
        return not self._full

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)

    def _drop(self, count: int) -> None:
        if not self._untold:
            self._unread_since = self._writing_since or time.monotonic()
        self._untold += count
        self.dropped += count

    def _tell_dropped(self) -> None:
        if self._untold:
            text = f"{self._untold} log lines were dropped: {self._unread()}"
            self._untold, self._error = 0, ""
            for line in self._encoded_lines(__name__, [(logging.WARNING, text, {})]):
                self._append(line)

    def _unread(self) -> str:
        if self._error:
            return f"cannot write to {self._reader}: {self._error}"
        return f"{self._reader} was not read for {time.monotonic() - self._unread_since:.0f} s"

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while piece := self._next():
            try:
                self._write(piece)
            except (OSError, ValueError) as error:  # ValueError: the stream is closed
                with self._changed:
                    self._drop(len(piece))
                    self._error = reason(error) if isinstance(error, OSError) else str(error)
            with self._changed:
                self._writing_since = 0.0
                self._bytes -= sum(map(len, piece))
                self._changed.notify_all()
                self._changed.wait_for(self._is_due, _PAUSE_S)
        self._end()

    def _is_due(self) -> bool:
        """Whether what waits is to be written now, not with what comes."""
        return self._closed or self._urgent or self._waiters > 0 or self._bytes >= _PIECE_BYTES

    def _next(self) -> list[bytes]:
        """Lines to write together; none once the handler is closed."""
        with self._changed:
            while not self._lines:
                if self._full:
                    self._full = False
                    self._tell_dropped()
                elif self._closed:
                    return []
                else:
                    self._idle = True
                    self._changed.wait()
            piece, size = [self._lines.popleft()], 0
            while self._lines and (size := size + len(piece[-1])) < _PIECE_BYTES:
                piece.append(self._lines.popleft())
            self._writing_since = time.monotonic()
            self._urgent = False
            return piece


def _not_encoded(error: Exception) -> Line:
    return logging.ERROR, f"cannot write a log line: {type(error).__name__}: {error}", {}


class FieldsHandler(QueuedHandler):
    """Sends a record to journald with its fields: NUMA_LAUNCHER_SLOT=, NUMA_LAUNCHER_GENERATION=, ...

    Not by libsystemd: systemd-python (235) holds the interpreter's lock while journald takes nothing, so every thread
    would wait."""

    takes_fields: Final = True

    def __init__(self, path: str | bytes = SOCKET) -> None:
        super().__init__("the journal")
        self.setFormatter(logging.Formatter())
        self._path = path
        self._socket: socket.socket | None = None

    def _encoded(self, record: logging.LogRecord) -> bytes:
        exception = (
            self.formatter.formatException(record.exc_info) if record.exc_info and self.formatter else ""
        )
        return _datagram(
            {
                "MESSAGE": message_of(record) + (f"\n{_traceback(exception)}" if exception else ""),
                **_head(record.levelno, record.name),
                "CODE_FILE": record.pathname,
                "CODE_LINE": str(record.lineno),
                "CODE_FUNC": record.funcName or "",
                **_journal_fields(_texts(record.__dict__)),
            }
        )

    def _encoded_lines(self, logger: str, lines: Sequence[Line]) -> Sequence[bytes]:
        return [
            _datagram(
                {
                    "MESSAGE": quoted(message, MAX_LINE),
                    **_head(level, logger),
                    **_journal_fields(fields),
                }
            )
            for level, message, fields in lines
        ]

    def _write(self, lines: Sequence[bytes]) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        # No socket: this host has no journal, and nobody misses the line.
        with contextlib.suppress(FileNotFoundError):
            for line in lines:
                try:
                    self._socket.sendto(line, self._path)
                except OSError as error:
                    if error.errno not in {errno.EMSGSIZE, errno.ENOBUFS}:
                        raise
                    self._send_by_file(self._socket, line)

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _send_by_file(self, to: socket.socket, line: bytes) -> None:
        """An entry that is too large for a datagram, as systemd's native protocol has it: a sealed memfd."""
        file = os.memfd_create("journal-data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.write(file, line)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file))
            to.sendmsg([], [rights], 0, self._path)
        finally:
            os.close(file)


def _head(level: int, logger: str) -> dict[str, str]:
    return {"PRIORITY": _priority(level), "LOGGER": logger, "SYSLOG_IDENTIFIER": "numa-launcher"}


def _priority(level: int) -> str:
    """syslog(3)'s, of a level of the logging module."""
    return str(next((number for most, number in _PRIORITIES if level <= most), 1))


def _datagram(fields: Mapping[str, str]) -> bytes:
    """An entry as systemd's native protocol has it (systemd.io, JOURNAL_NATIVE_PROTOCOL): values with line ends have a
    length."""
    parts = []
    for name, value in fields.items():
        raw = value.encode(errors="backslashreplace")
        if b"\n" in raw:
            parts.append(b"%s\n%s%s\n" % (name.encode(), struct.pack("<Q", len(raw)), raw))
        else:
            parts.append(b"%s=%s\n" % (name.encode(), raw))
    return b"".join(parts)


def _texts(fields: Mapping[str, object]) -> dict[str, object]:
    """A record's own fields, a tuple of texts as one."""
    own = {name: value for name, value in fields.items() if _is_own(name)}
    return {
        name: "; ".join(map(str, value)) if type(value) is tuple else value for name, value in own.items()
    }


def _journal_fields(fields: Mapping[str, object]) -> dict[str, str]:
    named = {_journal_name(name): str(value) for name, value in fields.items()}
    # One look at all: an access line has many.
    every = "".join(named.values())
    if len(every) > MAX_LINE or not (every.isascii() and every.isprintable()):
        return {name: quoted(value, MAX_LINE) for name, value in named.items()}
    return named


@cache
def _journal_name(name: str) -> str:
    return f"NUMA_LAUNCHER_{name}".upper()


class LineHandler(QueuedHandler):
    """Writes lines to a terminal, a pipe or a file."""

    takes_fields: Final = False

    def __init__(self, stream: TextIO) -> None:
        super().__init__("stderr")
        self.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s", _TIME))
        self._stream = stream
        # Below the stream, whose lock the interpreter takes at its end: a thread that waits for a reader must not have it.
        self._fd: int | None = None
        with contextlib.suppress(OSError, ValueError):  # it is no file
            self._fd = stream.fileno()

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def _encoded_lines(self, logger: str, lines: Sequence[Line]) -> Sequence[bytes]:  # noqa: ARG002  of all handlers
        now = time.strftime(_TIME)
        return [
            f"{now} {logging.getLevelName(level):7} {quoted(message, MAX_LINE)}\n".encode(
                errors="backslashreplace"
            )
            for level, message, _ in lines
        ]

    def _write(self, lines: Sequence[bytes]) -> None:
        data = b"".join(lines)
        if self._fd is None:
            self._stream.write(data.decode())
            self._stream.flush()
            return
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # whoever shares the terminal may have set O_NONBLOCK
                (writable := select.poll()).register(self._fd, select.POLLOUT)
                writable.poll()


class LineFormatter(logging.Formatter):
    """One line for each event, with the time of day, which is made once a second, not once a line."""

    _second = -1
    _text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  logging's
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, super().formatTime(record, datefmt)
        return self._text

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's
        record.message = message_of(record)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802  logging's
        """The lines of a traceback, whose last ones quote what went wrong."""
        return _traceback(super().formatException(ei))


def set_up(level: str, form: str) -> None:
    """Route the root logger. `form` is "auto", "journal" or "text". `finish` is the last call before the process ends."""
    with contextlib.suppress(OSError, ValueError):  # stderr is no file
        faulthandler.enable()  # the watchdog's SIGABRT prints where each thread was
    root = logging.getLogger()
    handler: logging.Handler
    if form == "journal" or (form == "auto" and under_journal()):
        handler = FieldsHandler()
    else:
        handler = LineHandler(sys.stderr)
        # A terminal shows what instances print only at level "debug"; `numa-launcher logs` has it always.
        logging.getLogger("launcher.output").setLevel(logging.INFO if level == "debug" else logging.WARNING)
    for earlier in _queued():
        earlier.close()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Nobody else reads access lines, so that they can be written many at once.
    access = logging.getLogger(ACCESS)
    access.handlers[:] = [handler]
    access.propagate = False
    # aiohttp's own access log would say everything twice.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def warnings() -> tuple[str, ...]:
    """That lines are being dropped, as long as they are."""
    return tuple(text for handler in _queued() for text in handler.warnings())


def dropped() -> int:
    """Lines that were not written, since the start."""
    return sum(handler.dropped for handler in _queued())


def finish() -> None:
    """Before the process ends: the last lines are written, within EXIT_S. A reader that has stopped is given up: what is
    printed after that is lost, and delays nothing."""
    if not all(handler.drained(EXIT_S) for handler in _queued()):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)
        os.close(null)


def _queued() -> list[QueuedHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, QueuedHandler)]


# --- The daemon's last log records with fields, for `numa-launcher events`. ---

EVENTS_KEPT: Final = 1000
# The instances' output and the access log are kept elsewhere.
_LEFT_OUT: Final = ("launcher.output", "launcher.access")


class EventRing(logging.Handler):
    """A ring of the last events, oldest first. Numbers start at `began`, milliseconds since the epoch, so that
    those of the next daemon are higher."""

    def __init__(self, kept: int = EVENTS_KEPT, *, began: int = 0) -> None:
        super().__init__(logging.INFO)
        self._events: deque[dict[str, Any]] = deque(maxlen=kept)
        self._count = began

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record. Never raises."""
        if record.name.startswith(_LEFT_OUT):
            return
        self._count += 1
        self._events.append(
            {
                "number": self._count, "time": record.created, "level": record.levelname.lower(),
                "logger": record.name, "message": message_of(record), "fields": fields_of(record),
            }
        )  # fmt: skip

    def last(self, count: int, after: int = 0) -> list[dict[str, Any]]:
        """The last `count` events with a number above `after`, oldest first."""
        found = [event for event in list(self._events) if event["number"] > after]
        return found[-count:] if count > 0 else []
