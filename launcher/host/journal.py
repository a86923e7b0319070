"""Log lines: events with fields to journald, readable lines to a terminal."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, TextIO

from launcher.printable import MAX_LINE, printable, printable_lines, quoted
from systemd import journal

# Attributes of every LogRecord; what else a record has came in by `extra=` and is a field.
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
# Prompts are logged where that is asked for, and then whole.
_WHOLE: Final = "launcher.prompts"
# The log of requests.
ACCESS: Final = "launcher.access"
_TIME: Final = "%H:%M:%S"
# Characters of a traceback; of a longer one the end is kept, which names the error.
_MAX_TRACEBACK: Final = 32_768


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


class FieldsHandler(journal.JournalHandler):  # type: ignore[misc]
    """Sends a record to journald with its fields: NUMA_LAUNCHER_SLOT=, NUMA_LAUNCHER_GENERATION=, ..."""

    takes_fields: Final = True
    sendv = staticmethod(journal.sendv)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record. Never raises: logging must not end the daemon."""
        try:
            exception = (
                self.formatter.formatException(record.exc_info) if record.exc_info and self.formatter else ""
            )
            self.send(
                message_of(record) + (f"\n{_traceback(exception)}" if exception else ""),
                PRIORITY=str(self.map_priority(record.levelno)),
                LOGGER=record.name,
                SYSLOG_IDENTIFIER="numa-launcher",
                CODE_FILE=record.pathname,
                CODE_LINE=record.lineno,  # the one that systemd-python formats as a number
                CODE_FUNC=record.funcName,
                **_journal_fields(_texts(record.__dict__)),
            )
        except Exception:
            self.handleError(record)

    def write_lines(self, logger: str, lines: Sequence[tuple[int, str, Mapping[str, object]]]) -> None:
        """Write events of one logger: their levels, messages and fields. Never raises."""
        try:
            for level, message, fields in lines:
                # Not `send`: it takes three times as long to make the same call.
                self.sendv(
                    f"MESSAGE={quoted(message, MAX_LINE)}",
                    f"PRIORITY={self.map_priority(level)}",
                    f"LOGGER={logger}",
                    "SYSLOG_IDENTIFIER=numa-launcher",
                    *[f"{name}={value}" for name, value in _journal_fields(fields).items()],
                )
        except Exception:
            self.handleError(logging.makeLogRecord({"name": logger, "msg": "cannot write log lines"}))


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


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes lines to a terminal or a file."""

    takes_fields: Final = False

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s", _TIME))

    def write_lines(self, logger: str, lines: Sequence[tuple[int, str, Mapping[str, object]]]) -> None:
        now = time.strftime(_TIME)
        try:
            text = "".join(
                f"{now} {logging.getLevelName(level):7} {quoted(message, MAX_LINE)}\n"
                for level, message, _ in lines
            )
            with self.lock or contextlib.nullcontext():
                self.stream.write(text)
                self.flush()
        except Exception:
            self.handleError(logging.makeLogRecord({"name": logger, "msg": "cannot write log lines"}))


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
    """Route the root logger. `form` is "auto", "journal" or "text"."""
    with contextlib.suppress(OSError, ValueError):  # stderr is no file
        faulthandler.enable()  # the watchdog's SIGABRT prints where each thread was
    root = logging.getLogger()
    handler: logging.Handler
    if form == "journal" or (form == "auto" and under_journal()):
        handler = FieldsHandler()
        handler.setFormatter(logging.Formatter())
    else:
        handler = LineHandler(sys.stderr)
        # A terminal shows what instances print only at level "debug"; `numa-launcher logs` has it always.
        logging.getLogger("launcher.output").setLevel(logging.INFO if level == "debug" else logging.WARNING)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Nobody else reads access lines, so that they can be written many at once.
    access = logging.getLogger(ACCESS)
    access.handlers[:] = [handler]
    access.propagate = False
    # aiohttp's own access log would say everything twice.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
