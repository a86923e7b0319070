"""What the daemon's own log handlers write: journald's fields, a terminal's lines, and the events of `events`."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from launcher.host.events import EventRing
from launcher.host.journal import FieldsHandler, LineFormatter


class Logs:
    """Every place that the daemon's log records go to."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.entries: list[dict[str, Any]] = []
        self.ring = EventRing()
        terminal = logging.StreamHandler(self.text)
        terminal.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
        journal = FieldsHandler(sender_function=self._send)
        journal.setFormatter(logging.Formatter())
        self.handlers = (terminal, journal, self.ring)

    def _send(self, message: str, **fields: Any) -> None:
        self.entries.append({"MESSAGE": message, **fields})


@contextmanager
def collected(level: int) -> Iterator[Logs]:
    """The records of launcher's loggers from this level on."""
    made, log = Logs(), logging.getLogger("launcher")
    before = log.level
    log.setLevel(level)
    for handler in made.handlers:
        log.addHandler(handler)
    yield made
    for handler in made.handlers:
        log.removeHandler(handler)
    log.setLevel(before)
