"""Child processes that the kernel kills with their parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable
from typing import Final

# linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1


def dies_with_parent() -> Callable[[], None]:
    """For `subprocess.Popen(preexec_fn=...)`: SIGKILL to the child when the thread that starts it ends, prctl(2).

    It survives exec, and is not inherited by the child's own children."""
    libc, parent = ctypes.CDLL(None), os.getpid()

    def ask_the_kernel() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)

    return ask_the_kernel


# --- How many files this process may have open: each client's connection is one, and so is each way to an instance.

ENOUGH: Final = 65536  # LimitNOFILE in systemd/numa-launcher.service
SPARE: Final = 1024  # for connections to instances, logs and sockets of our own


def raise_limit() -> int:
    """As many as we need, where the hard limit lets us: what is allowed then.

    A login's soft limit is 1,024, because select() can't count further (systemd.exec(5), LimitNOFILE); we poll."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return limit_now()


def limit_now() -> int:
    """How many files may be open now; ENOUGH where there is no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENOUGH if soft == resource.RLIM_INFINITY else soft


def most_clients(limit: int, max_connections: int, elsewhere: int = 0) -> int:
    """How many clients may be connected where `limit` files may be open: the daemon must be able to look at its
    instances, start and reach them however many clients come.

    `elsewhere`: connections that clients' requests can have to instances at once. Each is a file beside its client's.
    """
    left = limit - min(SPARE, limit // 2)
    return min(max_connections, max(left - elsewhere, left // 2))


def too_few(limit: int, max_connections: int, elsewhere: int = 0) -> str | None:
    """What to say when fewer clients may connect than the configuration lets them."""
    if (most := most_clients(limit, max_connections, elsewhere)) == max_connections:
        return None
    return (
        f"at most {limit} files may be open, so {most} clients can connect, not proxy.max_connections = "
        f"{max_connections}; raise the hard limit (`ulimit -Hn {max_connections + SPARE + elsewhere}`, LimitNOFILE) "
        "or lower it"
    )
