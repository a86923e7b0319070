"""A terminal that one program draws on, and that is as it was before whatever ends it.

rich draws (the alternate screen, the cursor, colours, NO_COLOR, the size); what it does not do is here: single keys,
a resize that is seen at once, Ctrl-Z, and signals that end a program without its `finally`.
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

from launcher.errors import LauncherError

_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
_SEEN: Final = (signal.SIGWINCH, signal.SIGTSTP)


class Woken(StrEnum):
    """Why a wait ended."""

    TIME = "time"
    QUIT = "quit"
    RESIZED = "resized"


def refuse_unless_terminal() -> None:
    """Raises LauncherError: where nothing can be drawn over, nothing is drawn."""
    remedy = "use `numa-launcher status --watch`, or `status --json` for machines"
    if not sys.stdout.isatty():
        raise LauncherError("cannot draw: standard output is no terminal", remedy)
    if (term := os.environ.get("TERM", "")) in {"", "dumb", "unknown"}:
        raise LauncherError(f"cannot draw: TERM='{term}' can't move the cursor", remedy)


class TerminalScreen:
    """The whole terminal, within `with`."""

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
        """Columns and lines, now."""
        size = os.get_terminal_size(sys.stdout.fileno())
        return max(1, size.columns), max(1, size.lines)

    def draw(self, lines: Sequence[Text]) -> None:
        """Show these lines and no other."""
        width, height = self.size
        self._console.size = (width, height)
        for line in lines:
            line.no_wrap, line.overflow = True, "crop"
        self._console.control(Control.home())
        self._screen.update(Group(*lines[:height]))

    def wait(self, seconds: float) -> Woken:
        """Until time is over, a key quits, or the terminal has another size. Ctrl-Z stops the program in here."""
        watched = [self._wakeup, *([] if self._keys is None else [self._keys])]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._wakeup in ready:
            numbers = os.read(self._wakeup, 64)
            if signal.SIGTSTP in numbers:
                self._stop()
            return Woken.RESIZED
        if self._keys in ready:
            keys = os.read(self._keys, 64)
            if not keys:  # the terminal's other end has gone
                return Woken.QUIT
            return Woken.QUIT if set(keys) & set(b"qQ\x04") else Woken.RESIZED
        return Woken.TIME

    def _stop(self) -> None:
        """As a shell's job: the terminal is the shell's until the program goes on."""
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
        """The alternate screen, without cursor, and keys as they are pressed."""
        before = None if self._keys is None else termios.tcgetattr(self._keys)
        try:
            if self._keys is not None:
                tty.setcbreak(self._keys)
            with self._console.screen(hide_cursor=True) as self._screen:
                yield
        finally:
            if self._keys is not None and before is not None:
                with contextlib.suppress(termios.error):  # a terminal that is gone
                    termios.tcsetattr(self._keys, termios.TCSADRAIN, before)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Those that end the program unwind it; those that are to be seen wake `wait`."""
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
