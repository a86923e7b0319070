"""Process 1 of a container: reaps orphans and forwards signals to the daemon, its child.

The daemon waits only for its own children; orphans of instances are children of process 1.
"""

from __future__ import annotations

import os
import signal
from typing import Final

# What a container's engine or a person sends; the daemon knows what each means.
FORWARDED: Final = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def become_child_of_init() -> int | None:
    """As process 1: fork. The child returns None; process 1 stays here until the child has ended.

    Returns its exit status, 128 + the signal's number where one ended it. Any other process: None, at once. The child
    may not hold threads or an event loop yet."""
    if os.getpid() != 1:
        return None
    signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*FORWARDED, signal.SIGCHLD})
        return None
    return _reap_until_exit(child)


def _reap_until_exit(child: int) -> int:
    while True:
        number = signal.sigwait({*FORWARDED, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            os.kill(child, number)  # not reaped yet, so the pid is still its own
            continue
        status = _reap(child)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _reap(child: int) -> int | None:
    """Collect every dead child. The daemon's wait status once it is among them."""
    found: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status
