"""What the daemon's own log handlers write: journald's fields, a terminal's lines, and the events of `events`."""

from __future__ import annotations

import io
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from launcher.base.log_lines import EventRing, FieldsHandler, LineFormatter


class FakeJournal:
    """A socket in the place of journald's, and the handler that sends to it. No entry is taken before it is asked for."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("")  # a free abstract name (unix(7), autobind)
        self.handler = FieldsHandler(self._socket.getsockname())
        self._taken: list[dict[str, str]] = []

    @property
    def entries(self) -> list[dict[str, str]]:
        """All so far."""
        written = False
        while not written:
            written = self.handler.drained(0.001)
            while (raw := self._received()) is not None:
                self._taken.append(dict(_fields(raw)))
        return self._taken

    def close(self) -> None:
        self._socket.close()
        self.handler.close()

    def _received(self) -> bytes | None:
        try:
            raw, rights, _, _ = self._socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        except BlockingIOError:
            return None
        if rights:
            with open(struct.unpack("i", rights[0][2])[0], "rb") as file:  # noqa: PTH123  a descriptor
                file.seek(0)
                return file.read()
        return raw


def _fields(raw: bytes) -> Iterator[tuple[str, str]]:
    """Of an entry in systemd's native protocol."""
    while raw:
        line, _, rest = raw.partition(b"\n")
        name, given, value = line.partition(b"=")
        if not given:
            (size,) = struct.unpack("<Q", rest[:8])
            value, rest = rest[8 : 8 + size], rest[8 + size + 1 :]
        assert name.decode() == name.decode().upper(), name
        yield name.decode(), value.decode()
        raw = rest


class Logs:
    """Every place that the daemon's log records go to."""

    def __init__(self) -> None:
        self.text = io.StringIO()
        self.ring = EventRing()
        terminal = logging.StreamHandler(self.text)
        terminal.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
        self._journal = FakeJournal()
        self.handlers = (terminal, self._journal.handler, self.ring)

        self.close = self._journal.close

    @property
    def entries(self) -> list[dict[str, str]]:
        return self._journal.entries


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
    made.close()
    log.setLevel(before)
