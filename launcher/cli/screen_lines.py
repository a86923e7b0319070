"""Lines that a long-running verb prints."""

from __future__ import annotations

import contextlib
from typing import IO


class Output:
    """Lines for a person. One that nobody reads any longer ends no run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def print(self, *lines: str) -> None:
        with contextlib.suppress(OSError):
            print(*lines, sep="\n", file=self._stream, flush=True)
