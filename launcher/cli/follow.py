"""Follows output of a daemon across its restarts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from launcher.control.client import UnreachableError

POLL_S: Final = 0.5
T = TypeVar("T")


def over_restarts(ask: Callable[[], Iterable[T]]) -> Iterator[T]:
    """The items of repeated answers, until Ctrl-C. While the daemon is away, prints one note and retries.

    Raises LauncherError when the daemon refuses, or does not answer the first request."""
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
                print(f"{error.message}; waiting for the daemon", file=sys.stderr, flush=True)
                said = True
        time.sleep(POLL_S)
