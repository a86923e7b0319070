"""`numa-launcher top`: a live view of slots and cores on the whole terminal."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from launcher.base.errors import LauncherError
from launcher.cli import options

if TYPE_CHECKING:
    from launcher.base.cpuset import CpuSet
    from launcher.cli.screen import TerminalScreen
    from launcher.cli.top_frame import View
    from launcher.control.client import ControlClient
    from launcher.machine.topology import Topology

# Keys are not read while a request to a hung daemon waits.
ANSWER_S: Final = 5.0
MIN_INTERVAL_S: Final = 0.2
_STAT: Final = Path("/proc/stat")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    parser.add_argument(
        "-d", "--interval", type=options.seconds, default=2.0, metavar="S",
        help="refresh every S seconds (default: 2)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
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
    """Polls the daemon and the machine; keeps the latest answer of each."""

    def __init__(self, client: ControlClient) -> None:
        """Raises LauncherError when the daemon does not answer."""
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
        from launcher.cli.top_frame import View  # noqa: PLC0415  heavy

        return View(self._status, time.time(), self._topology, self._reserved, self._busy, self._trouble)

    def look(self) -> None:
        self._look_at_cpus()
        before = self._status["pid"]
        try:
            self._status, self._trouble = self._ask(), ""
        except LauncherError as error:
            silent = time.monotonic() - self._answered
            self._trouble = f"no answer for {silent:.0f} s: {error.message}; retrying"
            return
        if self._status["pid"] != before:  # the plan and the machine may have changed
            self._look_at_machine()

    def _look_at_machine(self) -> None:
        from msgspec.structs import replace  # noqa: PLC0415  heavy

        from launcher.base.cpuset import CpuSet  # noqa: PLC0415  heavy
        from launcher.machine import sysfs  # noqa: PLC0415  heavy

        self._topology = self._reserved = None
        with contextlib.suppress(LauncherError):  # the view then has no drawing
            topology = sysfs.read()
            # The plan already respects the daemon's allowed cpus; those of this shell do not matter.
            self._topology = replace(topology, allowed=topology.online)
        with contextlib.suppress(LauncherError, ValueError, KeyError):
            self._reserved = CpuSet.parse(self._client.get("/plan", ANSWER_S)["reserved"])

    def _look_at_cpus(self) -> None:
        from launcher.machine.load import busy_shares, read_times  # noqa: PLC0415  heavy

        try:
            times = read_times(_STAT.read_text())
        except (OSError, ValueError):
            return
        self._busy = busy_shares(self._times, times) if self._times else None
        self._times = times
