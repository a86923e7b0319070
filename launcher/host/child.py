"""Child processes that the kernel kills with their parent, however the parent ends."""

from __future__ import annotations

import ctypes
import os
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
