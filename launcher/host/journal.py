"""Log lines: events with fields to journald, readable lines to a terminal."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import sys
from typing import Any, Final

from launcher.printable import MAX_LINE, printable, printable_lines, quoted
from systemd import journal

# Attributes of every LogRecord; what else a record has came in by `extra=` and is a field.
_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
# Prompts are logged where that is asked for, and then whole.
_WHOLE: Final = "launcher.prompts"
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
    """The event in words, on one line: a client, an operator or an instance may have written a part of it."""
    text = record.getMessage()
    return printable(text) if record.name == _WHOLE else quoted(text, MAX_LINE)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """The event's own fields: what the caller gave as `extra`; texts as in `message_of`."""
    return {
        name: quoted(value, MAX_LINE) if type(value) is str else value
        for name, value in record.__dict__.items()
        if name not in _STANDARD
    }


def _traceback(text: str) -> str:
    return printable_lines(text[-_MAX_TRACEBACK:])


class FieldsHandler(journal.JournalHandler):  # type: ignore[misc]
    """Sends a record to journald with its fields: NUMA_LAUNCHER_SLOT=, NUMA_LAUNCHER_GENERATION=, ..."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record. Never raises: logging must not end the daemon."""
        try:
            fields = {
                f"NUMA_LAUNCHER_{name}".upper(): str(value)
                for name, value in record.__dict__.items()
                if name not in _STANDARD
            }
            every = "".join(fields.values())  # one look at all: an access line has many
            if len(every) > MAX_LINE or not (every.isascii() and every.isprintable()):
                fields = {name: quoted(value, MAX_LINE) for name, value in fields.items()}
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
                **fields,
            )
        except Exception:
            self.handleError(record)


class LineFormatter(logging.Formatter):
    """One line for each event, with the time of day, which is made once a second, not once a line."""

    _second = -1
    _text = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  logging's
        """The time of the record."""
        second = int(record.created)
        if second != self._second:
            self._second, self._text = second, super().formatTime(record, datefmt)
        return self._text

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's
        """The line."""
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
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
        # A terminal shows what instances print only at level "debug"; `numa-launcher logs` has it always.
        logging.getLogger("launcher.output").setLevel(logging.INFO if level == "debug" else logging.WARNING)
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # aiohttp's own access log would say everything twice.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
