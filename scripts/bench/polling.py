"""What a client of the control socket that polls costs a running daemon: CPU time per request, and share of a core."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import psutil

from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient

# What a dashboard asks every 2 s, with what it has seen.
POLLED: Final = (
    "/status?redact=1",
    "/machine",
    "/events?after=900000000000000",
    "/history?span=1h&slots=none&after={}",
)
# What it asks once, or seldom.
ASKED: Final = ("/topology", "/plan", "/measurements")


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench-polling", description=__doc__)
    parser.add_argument(
        "--socket", default="/run/numa-launcher/control.sock", help="control socket of the daemon"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="of an idle and a polled phase (default: %(default)s)"
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, help="seconds between polls (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=100, help="of each kind (default: %(default)s)")
    args = parser.parse_args(argv)
    client = ControlClient(args.socket)
    try:
        daemon = psutil.Process(client.get("/status")["pid"])
        _print_requests(client, daemon, args.requests)
        rounds = [
            (
                _share(daemon, args.seconds, lambda: time.sleep(args.interval)),
                _share(daemon, args.seconds, lambda: _poll(client, args.interval)),
            )
            for _ in range(args.rounds)
        ]
    except LauncherError as error:
        print(f"{error.message}\n  what to do: {error.remedy}", file=sys.stderr)
        return 2
    except psutil.NoSuchProcess:
        print("cannot measure the daemon: it has exited\n  what to do: start it, and repeat", file=sys.stderr)
        return 2
    added = [polled - idle for idle, polled in rounds]
    print(f"share of a core without polls: {statistics.median(idle for idle, _ in rounds):.2%}")
    print(
        f"added by a poll every {args.interval:g} s: {statistics.median(added):.2%} ({min(added):.2%} to {max(added):.2%})"
    )
    return 0


def _print_requests(client: ControlClient, daemon: psutil.Process, requests: int) -> None:
    print("CPU time of the daemon per request, in ms:")
    for path in (*POLLED, *ASKED):
        before = _cpu_s(daemon)
        for _ in range(requests):
            client.get(_now(path))
        print(f"  {path.partition('?')[0][1:]:13} {(_cpu_s(daemon) - before) / requests * 1000:.2f}")


def _poll(client: ControlClient, interval_s: float) -> None:
    due = time.monotonic() + interval_s
    for path in POLLED:
        client.get(_now(path))
    time.sleep(max(0.0, due - time.monotonic()))


def _now(path: str) -> str:
    """The history is asked for what is newer than the last two rows."""
    return path.format(int(time.time() * 1000) - 4000)


def _share(daemon: psutil.Process, seconds: float, turn: Callable[[], None]) -> float:
    """CPU time of the daemon over wall time, while `turn` is repeated."""
    began, before = time.monotonic(), _cpu_s(daemon)
    while time.monotonic() < began + seconds:
        turn()
    return (_cpu_s(daemon) - before) / (time.monotonic() - began)


def _cpu_s(daemon: psutil.Process) -> float:
    times = daemon.cpu_times()
    return float(times.user + times.system)
