"""The daemon as a process: Python's garbage collector, the threads at the end, signals at the start, systemd."""

from __future__ import annotations

import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final

from launcher.base import log_lines
from launcher.base.background import Failures, persist
from launcher.base.errors import reason
from launcher.instances.slot_state import State
from launcher.instances.supervisor import Supervisor
from launcher.proxy.server import ProxyServer

log = logging.getLogger("launcher.daemon")

# --- Python's cyclic garbage collector, for a process that runs for months and must not pause.

# New containers between two collections of the youngest generation; Python's default is 700. Reference counts free the
# objects of a request, so cycles are rare and small.
YOUNGEST: Final = 5000


def settle() -> None:
    """Exclude all present objects from collection. Call it once everything is loaded.

    Modules, classes and configuration are most of the heap; each full collection would walk them, a pause of tens of
    milliseconds. https://docs.python.org/3/library/gc.html#gc.freeze"""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNGEST, *gc.get_threshold()[1:])


# --- Threads at the end: one that reads a disk that hangs never ends, and Python would wait for it.

END_S: Final = 5.0
# However few CPUs there are: some of them may hang, and slots need others.
THREADS: Final = 32


@contextmanager
def loop_threads(loop: asyncio.AbstractEventLoop, told: Callable[[BaseException], int]) -> Iterator[None]:
    """Give the loop threads for what blocks. At the end, also by an error: end the process where one of them does not end
    within END_S, with exit code 0, or that of `told`, which prints the error."""
    threads = ThreadPoolExecutor(THREADS, "event loop's thread")
    loop.set_default_executor(threads)
    try:
        yield
    except BaseException as error:
        _end_despite(threads, partial(told, error))
        raise
    _end_despite(threads, lambda: 0)


def _end_despite(threads: ThreadPoolExecutor, code: Callable[[], int]) -> None:
    ending = threading.Thread(target=threads.shutdown, name="end", daemon=True)
    ending.start()
    ending.join(END_S)
    if ending.is_alive():
        log.warning("a thread that reads a disk does not end within %g s: the daemon ends without it", END_S)
        log_lines.finish()
        status = code()
        sys.stderr.flush()
        os._exit(status)


# --- SIGHUP before there is an event loop: it must neither end the process nor be lost. ---

_HANGUP: Final = threading.Event()


def note_hangups() -> threading.Event:
    """The event that a SIGHUP sets from now on, until the event loop takes the signal over."""
    signal.signal(signal.SIGHUP, lambda *_: _HANGUP.set())
    return _HANGUP


# --- sd_notify: the daemon's state for systemd. Without systemd every call does nothing. ---
#
# A failed notification is logged once and has no other effect. None waits for systemd: one that has stopped (systemd
# freezes after a crash of its own) takes no message once its queue is full, and the daemon goes on.
#
# Source: sd_notify(3), sd_watchdog_enabled(3), systemd.service(5) Type=notify.


def notify_ready(status: str) -> None:
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


class _Sender:
    """Sends in the caller's turn while the socket takes messages, and in a thread once it does not.

    Not by libsystemd: sd_notify(3) waits, and systemd-python (235) holds the interpreter's lock meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, str] = {}
        """For the thread: the latest message of each kind."""
        self._sending = False
        """Whether there is a thread."""

    def tell(self, message: str) -> None:
        """Never blocks. Raises OSError, and RuntimeError without another thread."""
        with self._lock:
            if not self._sending:
                if _is_taken(message):
                    return
                # It waits for the lock.
                threading.Thread(target=self._run, name="notify", daemon=True).start()
                self._sending = True
            self._waiting[message.partition("=")[0]] = message

    def _run(self) -> None:
        while (message := self._next()) is not None:
            try:
                _send(message)
            except OSError as error:
                complain(reason(error))

    def _next(self) -> str | None:
        with self._lock:
            kind = next(iter(self._waiting), None)
            self._sending = kind is not None
            return None if kind is None else self._waiting.pop(kind)


_SENDER: Final = _Sender()


def _is_taken(message: str) -> bool:
    """Whether it was sent at once. Raises OSError."""
    try:
        _send(message, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


def _send(message: str, flags: int = 0) -> None:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        # "@": an abstract name
        to.sendto(message.encode(errors="replace"), flags, f"\0{path[1:]}" if path[0] == "@" else path)


def _tell(message: str) -> None:
    try:
        _SENDER.tell(message)
    except OSError as error:  # a socket that an earlier service left in the environment, no descriptor, ...
        complain(reason(error))
    except RuntimeError as error:
        complain(str(error))


@functools.cache
def complain(why: str) -> None:
    """Once for each reason: notifications are sent every few seconds."""
    log.warning("cannot notify systemd: %s; see NOTIFY_SOCKET=", why)


# --- What systemd is told while the daemon serves: READY=1, the STATUS= line, the watchdog's kicks. ---

# Between updates of systemd's STATUS= line where no watchdog sets the interval.
STATUS_INTERVAL_S: Final = 5.0


class SystemdStatus:
    def __init__(
        self,
        supervisor: Supervisor,
        proxy: ProxyServer,
        ready: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ready`: whether an instance serves. `clock` stands still while the event loop does not run."""
        self._clock = clock
        self._supervisor = supervisor
        self._proxy = proxy
        self._ready = ready
        self._watchdog = Watchdog("loop", "slots")
        self._failures = Failures(log, "report to systemd")

    async def run(self) -> None:
        """Until it is cancelled."""
        await persist(self._report, self._failures)

    async def _report(self) -> None:
        """READY=1 at the first ready instance, then STATUS= and the watchdog. It runs in the slot controllers' event loop:
        a loop that hangs does not kick the watchdog."""
        announced = False
        interval = min(watchdog_interval_s() or STATUS_INTERVAL_S, STATUS_INTERVAL_S)
        while True:
            text = self._summary()
            if not announced and self._ready():
                announced = True
                notify_ready(text)
            status(text)
            self._watchdog.beat("loop")
            if self._supervisor.makes_progress(self._clock()):
                self._watchdog.beat("slots")
            self._failures.end()
            if not self._watchdog.kick():
                log.error("watchdog withheld: no progress in %s", ", ".join(sorted(self._watchdog.missing)))
            await asyncio.sleep(interval if announced else min(interval, 0.2))

    def _summary(self) -> str:
        states = [controller.slot_state.state.value for controller in self._supervisor.controllers.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in State if state.value in states)
        where = f" at {self._proxy.endpoints[0]}" if self._proxy.endpoints else ""
        return f"{counts}; {self._proxy.readings.stats()['in_flight']} requests in flight{where}"
