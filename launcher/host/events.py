"""The daemon's last log records with fields, for `numa-launcher events`."""

from __future__ import annotations

import logging
from collections import deque
from typing import Any, Final

from launcher.host.journal import fields_of, message_of

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
