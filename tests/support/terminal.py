"""A real terminal for a program: a pty whose other end is read by an emulator, so that a test sees what a person would."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

import pyte

from launcher.cli import fleet_operations
from launcher.cli.options import Parser
from launcher.fleet.config import FleetConfig
from launcher.fleet.hosts import Hosts

WITHIN_S = 60.0
_COLOUR = re.compile(rb"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")


class Terminal:
    """A program on a terminal of its own, as the leader of its session."""

    def __init__(
        self, words: Sequence[str], columns: int = 80, lines: int = 24, environ: dict[str, str] | None = None
    ) -> None:
        self.raw = b""
        self.columns, self.lines = columns, lines
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._master, self._slave = pty.openpty()
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *words], stdin=self._slave, stdout=self._slave, stderr=self._slave,
            env=os.environ | {"TERM": "xterm-256color"} | (environ or {}),
        )  # fmt: skip

    def resize(self, columns: int, lines: int) -> None:
        """As a window does: the kernel sends SIGWINCH."""
        self.columns, self.lines = columns, lines
        self._screen.resize(lines, columns)
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    @property
    def display(self) -> list[str]:
        """What the screen shows, line by line, without spaces at the end."""
        return [line.rstrip() for line in self._screen.display]

    def until(self, check: Callable[[], Any], what: str) -> Any:
        """Read what the program prints until `check` holds; fails the test when time is over."""
        deadline = time.monotonic() + WITHIN_S
        while not (found := check()):
            assert time.monotonic() < deadline, f"not within {WITHIN_S} s: {what}\n" + "\n".join(self.display)
            self.read(0.05)
        return found

    def shows(self, text: str) -> None:
        """Wait for a text on the screen."""
        self.until(lambda: text in "\n".join(self.display), f"'{text}' on the screen")

    def read(self, seconds: float) -> bool:
        """What comes within the time: some KiB at once. Whether anything came."""
        ready, _, _ = select.select([self._master], [], [], seconds)
        if ready:
            with contextlib.suppress(OSError):  # the last one at the other end has gone
                data = os.read(self._master, 1 << 16)
                self.raw += data
                self._stream.feed(data)
                return True
        return False

    def ended(self) -> int:
        """The program's exit code, once it has ended and all is read."""
        self.until(lambda: self.process.poll() is not None, "the program's end")
        while self.read(0.05):
            pass
        return self.process.returncode

    def is_as_before(self) -> bool:
        """The modes of the line, the cursor, and the screen that was there before."""
        left = self.raw.rfind(b"\x1b[?1049l") > self.raw.rfind(b"\x1b[?1049h")
        shown = self.raw.rfind(b"\x1b[?25h") > self.raw.rfind(b"\x1b[?25l")
        return left and shown and termios.tcgetattr(self._slave) == self.modes

    def has_colours(self) -> bool:
        """Whether any was ever asked for."""
        return _COLOUR.search(self.raw) is not None

    def hang_up(self) -> None:
        """The window is closed."""
        os.close(self._slave)
        os.close(self._master)
        self._master = self._slave = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self._master >= 0:
            self.hang_up()


def run(words: Sequence[str], hosts: Hosts, config: FleetConfig) -> int:
    parser = Parser(prog="numa-launcher fleet")
    fleet_operations.add_actions(parser.add_subparsers(dest="action", required=True))
    args: argparse.Namespace = parser.parse([*words, "-c", "fleet.toml"])
    return fleet_operations.run(args.action, args, hosts, config)
