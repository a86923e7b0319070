"""A full-screen terminal that is restored however the program ends.

rich draws (alternate screen, cursor, colours, NO_COLOR, size). This module adds single keys, immediate reaction to a
resize, Ctrl-Z, and clean-up on signals that end a program without running `finally`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, Self

from rich.console import Console, Group
from rich.control import Control
from rich.text import Text

from launcher.base.errors import LauncherError

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_SEEN: Final = (signal.SIGWINCH, signal.SIGTSTP)


class Woken(StrEnum):
    TIME = "time"
    QUIT = "quit"
    RESIZED = "resized"


def refuse_unless_terminal() -> None:
    """Raises LauncherError when standard output is not a terminal with cursor control."""
    remedy = "use `numa-launcher status --watch`, or `numa-launcher status --json`"
    if not sys.stdout.isatty():
        raise LauncherError("cannot draw: standard output is not a terminal", remedy)
    if (term := os.environ.get("TERM", "")) in {"", "dumb", "unknown"}:
        raise LauncherError(f"cannot draw: TERM='{term}' has no cursor control", remedy)


class TerminalScreen:
    """The whole terminal, as a context manager."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._stack = contextlib.ExitStack()
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._signals())
            stack.enter_context(self._taken())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def size(self) -> tuple[int, int]:
        size = os.get_terminal_size(sys.stdout.fileno())
        return max(1, size.columns), max(1, size.lines)

    def draw(self, lines: Sequence[Text]) -> None:
        width, height = self.size
        self._console.size = (width, height)
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        self._console.control(Control.home())
        self._screen.update(Group(*lines[:height]))

    def wait(self, seconds: float) -> Woken:
        """Wait for the time, a quit key or a resize. Ctrl-Z suspends the program here.

        Python drops what a signal's handler raises inside a finalizer or a callback of the garbage collector; the
        number of each signal is in the pipe all the same."""
        watched = [self._wakeup, *([] if self._keys is None else [self._keys])]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._wakeup in ready:
            numbers = os.read(self._wakeup, 64)
            for number in set(numbers) & set(_ENDING):
                _end(number, None)
            if signal.SIGINT in numbers:
                return Woken.QUIT
            if signal.SIGTSTP in numbers:
                self._stop()
            return Woken.RESIZED
        if self._keys in ready:
            keys = os.read(self._keys, 64)
            if not keys:  # the terminal was closed
                return Woken.QUIT
            return Woken.QUIT if set(keys) & set(b"qQ\x04") else Woken.RESIZED
        return Woken.TIME

    def _stop(self) -> None:
        self._drawing.close()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._drawing.enter_context(self._drawn())

    @contextlib.contextmanager
    def _taken(self) -> Iterator[None]:
        with contextlib.ExitStack() as drawing:
            self._drawing = drawing
            drawing.enter_context(self._drawn())
            yield

    @contextlib.contextmanager
    def _drawn(self) -> Iterator[None]:
        """The alternate screen without cursor; keys are read unbuffered."""
        before = None if self._keys is None else termios.tcgetattr(self._keys)
        try:
            if self._keys is not None:
                tty.setcbreak(self._keys)
            with self._console.screen(hide_cursor=True) as self._screen:
                yield
        finally:
            if self._keys is not None and before is not None:
                with contextlib.suppress(termios.error):  # the terminal was closed
                    termios.tcsetattr(self._keys, termios.TCSADRAIN, before)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGHUP raise SystemExit; SIGWINCH and SIGTSTP wake `wait`."""
        self._wakeup, written = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(written, False)
        before: dict[signal.Signals, Any] = {}
        old = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        try:
            for number in _SEEN:
                before[number] = signal.signal(number, lambda *_: None)
            for number in _ENDING:
                before[number] = signal.signal(number, _end)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old)
            os.close(self._wakeup)
            os.close(written)


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
