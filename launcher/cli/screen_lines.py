"""Lines that a long-running verb prints."""

from __future__ import annotations

import contextlib
from typing import IO, Final

_CLEAR: Final = "\r\x1b[K"


class Output:
    """Lines for a person. One that nobody reads any longer ends no run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._terminal = stream.isatty()

    def show(self, text: str) -> None:
        """On a terminal: a line that the next one replaces."""
        if self._terminal:
            self._write(f"{_CLEAR}{text}")

    def print(self, *lines: str) -> None:
        self._write((_CLEAR if self._terminal else "") + "\n".join(lines) + "\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()
