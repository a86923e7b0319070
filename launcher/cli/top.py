"""`numa-launcher top`: the state of things, live, on the whole terminal."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from launcher.cli import options
from launcher.errors import LauncherError

if TYPE_CHECKING:
    from launcher.cli.screen import TerminalScreen
    from launcher.cli.top_frame import View
    from launcher.control.client import ControlClient
    from launcher.cpuset import CpuSet
    from launcher.topology.model import Topology

# A daemon that hangs must not keep a key from being seen for long.
ANSWER_S: Final = 5.0
MIN_INTERVAL_S: Final = 0.2
_STAT: Final = Path("/proc/stat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which daemon, and how often."""
    options.add_socket(parser)
    parser.add_argument(
        "-d",
        "--interval",
        type=options.seconds,
        default=2.0,
        metavar="S",
        help="seconds between two looks (default 2)",
    )


def run(args: argparse.Namespace) -> int:
    """Draw until q or Ctrl-C."""
    from launcher.cli.screen import TerminalScreen, refuse_unless_terminal  # noqa: PLC0415  heavy

    refuse_unless_terminal()
    watcher = Watcher(options.client_of(args))
    try:
        with TerminalScreen() as screen:
            _watch(watcher, screen, max(MIN_INTERVAL_S, args.interval))
    except KeyboardInterrupt:
        return 0
    return 0


def _watch(watcher: Watcher, screen: TerminalScreen, interval_s: float) -> None:
    from launcher.cli.screen import Woken  # noqa: PLC0415  heavy
    from launcher.cli.top_frame import compose  # noqa: PLC0415  heavy

    due = time.monotonic() + interval_s
    while True:
        screen.draw(compose(watcher.view, *screen.size))
        match screen.wait(max(0.0, due - time.monotonic())):
            case Woken.QUIT:
                return
            case Woken.TIME:
                watcher.look()
                due = time.monotonic() + interval_s
            case Woken.RESIZED:
                pass


class Watcher:
    """Asks the daemon and the machine; keeps what it saw last where there is no answer."""

    def __init__(self, client: ControlClient) -> None:
        """Raises LauncherError when nobody answers at all."""
        self._client = client
        self._topology: Topology | None = None
        self._reserved: CpuSet | None = None
        self._times: dict[int, tuple[int, int]] = {}
        self._busy: dict[int, float] | None = None
        self._trouble = ""
        self._status = self._ask()
        self._look_at_cpus()
        self._look_at_machine()

    def _ask(self) -> dict[str, Any]:
        status = self._client.get("/status", ANSWER_S)
        self._answered = time.monotonic()
        return status

    @property
    def view(self) -> View:
        """What there is to show."""
        from launcher.cli.top_frame import View  # noqa: PLC0415  heavy

        return View(self._status, time.time(), self._topology, self._reserved, self._busy, self._trouble)

    def look(self) -> None:
        """Once more. Never raises: what is wrong is shown."""
        self._look_at_cpus()
        before = self._status["pid"]
        try:
            self._status, self._trouble = self._ask(), ""
        except LauncherError as error:
            silent = time.monotonic() - self._answered
            self._trouble = f"no answer for {silent:.0f} s: {error.message}; trying again"
            return
        if (
            self._status["pid"] != before
        ):  # another daemon may have another plan, on a machine that has changed
            self._look_at_machine()

    def _look_at_machine(self) -> None:
        from dataclasses import replace  # noqa: PLC0415

        from launcher.cpuset import CpuSet  # noqa: PLC0415  heavy
        from launcher.topology import sysfs  # noqa: PLC0415  heavy

        self._topology = self._reserved = None
        with contextlib.suppress(LauncherError):  # no picture; all else is shown
            topology = sysfs.read()
            # What this shell may use is of no interest; what the daemon may, the plan tells.
            self._topology = replace(topology, allowed=topology.online)
        with contextlib.suppress(LauncherError, ValueError, KeyError):
            self._reserved = CpuSet.parse(self._client.get("/plan", ANSWER_S)["reserved"])

    def _look_at_cpus(self) -> None:
        from launcher.cli.top_frame import busy_shares, read_times  # noqa: PLC0415  heavy

        try:
            times = read_times(_STAT.read_text())
        except (OSError, ValueError):
            return
        self._busy = busy_shares(self._times, times) if self._times else None
        self._times = times
