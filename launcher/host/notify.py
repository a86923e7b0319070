"""sd_notify: the daemon's state for systemd. Without systemd every call does nothing.

A failed notification is logged once and has no other effect.

Source: sd_notify(3), sd_watchdog_enabled(3), systemd.service(5) Type=notify.
"""

from __future__ import annotations

import functools
import logging
import os

from launcher.errors import reason
from systemd import daemon

log = logging.getLogger("launcher.daemon")


def ready(status: str) -> None:
    """The first instance is ready: dependants may start."""
    _tell(f"READY=1\nSTATUS={_line(status)}")


def status(text: str) -> None:
    _tell(f"STATUS={_line(text)}")


def stopping() -> None:
    """The daemon has begun to stop."""
    _tell("STOPPING=1")


def alive() -> None:
    """Kick the watchdog."""
    _tell("WATCHDOG=1")


class Watchdog:
    """Kicks systemd's watchdog only when every part has made progress since the last kick.

    `parts` are the names of what must: a part that hangs stops the kicks, and systemd restarts the daemon."""

    def __init__(self, *parts: str) -> None:
        self._parts = frozenset(parts)
        self._beaten: set[str] = set()

    def beat(self, part: str) -> None:
        if part not in self._parts:
            raise ValueError(f"{part!r} is no part of this watchdog")
        self._beaten.add(part)

    @property
    def missing(self) -> frozenset[str]:
        return self._parts - self._beaten

    def kick(self) -> bool:
        """Kick if every part has moved; whether it was done."""
        if self.missing:
            return False
        self._beaten.clear()
        alive()
        return True


def extend_timeout(seconds: float) -> None:
    """Starting or stopping takes this much longer (EXTEND_TIMEOUT_USEC=)."""
    _tell(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")


def watchdog_interval_s() -> float | None:
    """How often to kick: half of WatchdogSec=; None when there is no watchdog for this process."""
    usec, pid = os.environ.get("WATCHDOG_USEC"), os.environ.get("WATCHDOG_PID")
    if not usec or not usec.isdigit() or (pid and pid != str(os.getpid())):
        return None
    return int(usec) / 2e6


def _line(text: str) -> str:
    return text.replace("\n", " ")


def _tell(message: str) -> None:
    try:
        daemon.notify(message)
    except OSError as error:  # a socket that an earlier service left in the environment, no descriptor, ...
        complain(reason(error))


@functools.cache
def complain(why: str) -> None:
    """Once for each reason: notifications are sent every few seconds."""
    log.warning("cannot notify systemd: %s; see NOTIFY_SOCKET=", why)
