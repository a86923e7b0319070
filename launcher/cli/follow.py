"""Following a daemon that may end and come back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from launcher.control.client import UnreachableError

POLL_S: Final = 0.5

T = TypeVar("T")


def over_restarts(ask: Callable[[], Iterable[T]]) -> Iterator[T]:
    """One answer after the other, until Ctrl-C. Where nobody answers any more it says so once, and goes on trying.

    Raises LauncherError when the daemon refuses, and when nobody answers the first time.
    """
    reached = said = False
    while True:
        try:
            answer = ask()
            reached, said = True, False
            yield from answer
        except UnreachableError as error:
            if not reached:
                raise
            if not said:
                print(f"{error.message}; waiting for the next daemon", file=sys.stderr, flush=True)
                said = True
        time.sleep(POLL_S)
