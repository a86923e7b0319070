"""Eight instances that fail on purpose, restarted one after the other all along, and 64 clients.

    scripts/chaos [--seconds N] [--seed N] [--faults SHARE] [--json FILE]

Ends with a report, and with exit status 1 when a bound is broken: no request fails before its first byte,
no answer ends as if whole when it is not, at least 99 % of the cut plain streams go on exactly, accounts
add up, memory stays flat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from chaos.clients import KINDS, Client, Result
from chaos.verdict import Fault, judge, readable
from launcher.control.client import ControlClient
from launcher.errors import LauncherError

TESTS = Path(__file__).resolve().parents[1]
INSTANCES = 8
READY_S = 180.0
CONFIG = """
[[models]]
name = "chaos"
path = "chaos"
max_num_seqs = 32
[layout]
instances_per_socket = {instances}
reserve_cores = 0
[engine]
kind = "command"
command = {command}
[engine.env]
PYTHONPATH = "{path}"
[proxy]
listen = ["127.0.0.1:{port}"]
connect_timeout_s = 2
first_token_timeout_s = 3
first_token_timeout_per_1k_s = 1
answer_timeout_s = 6
idle_timeout_s = 3
hung_timeout_s = 2
eject_s = 2
slow_start_s = 2
park_timeout_s = 30
access_log = "errors"
[control]
socket = "{folder}/c.sock"
[supervision]
probe_interval_s = 0.5
probe_timeout_s = 3
drain_timeout_s = 20
stop_timeout_s = 2
backoff_initial_s = 0.2
backoff_max_s = 0.5
crash_limit = 1000000
[logging]
level = "info"
"""


class Chaos:
    """One run."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.log = folder / "faults.jsonl"
        self.log.touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        command = [
            sys.executable, "-m", "chaos.engine", "--uds", "{uds}", "--model", "{name}", "--log", str(self.log),
            "--seed", str(args.seed), "--faults", str(args.faults), "--token-s", str(args.token_s),
        ]  # fmt: skip
        config = folder / "config.toml"
        config.write_text(
            CONFIG.format(
                instances=INSTANCES, command=json.dumps(command), path=TESTS, port=self.port, folder=folder
            )
        )
        self.daemon_log = folder / "daemon.log"
        with self.daemon_log.open("wb") as out:
            self.daemon = subprocess.Popen(
                [sys.executable, "-m", "chaos.eight", str(config)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env=os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS.parent}"},
            )  # fmt: skip
        self.control = ControlClient(str(folder / "c.sock"))
        self.restarts = 0
        self.rss: list[int] = []
        self.results: list[Result] = []

    def status(self) -> dict[str, Any]:
        """The daemon's own view; {} while it does not answer."""
        try:
            return self.control.get("/status")
        except LauncherError:
            return {}

    def ready(self) -> bool:
        """All instances are."""
        if self.daemon.poll() is not None:
            raise RuntimeError(f"the daemon ended: {self.daemon_log.read_text()[-3000:]}")
        return self.status().get("ready") == INSTANCES

    async def run(self) -> dict[str, Any]:
        """Clients, restarts and measurements side by side; then the report."""
        async with asyncio.timeout(READY_S):
            while not await asyncio.to_thread(self.ready):  # noqa: ASYNC110 - another process is polled
                await asyncio.sleep(0.1)
        until = time.monotonic() + self.args.seconds
        share = self.args.clients / sum(KINDS.values())
        kinds = [kind for kind, count in KINDS.items() for _ in range(max(round(count * share), 1))]
        async with asyncio.TaskGroup() as group:
            others = [group.create_task(self._restart_all_along()), group.create_task(self._measure())]
            clients = [
                group.create_task(Client(number, kind, self.args.seed, self.port, self.results).run(until))
                for number, kind in enumerate(kinds)
            ]
            await asyncio.wait(clients)
            for other in others:
                other.cancel()
        requests: dict[str, Any] = {}
        for _ in range(100):
            requests = (await asyncio.to_thread(self.status)).get("requests", requests)
            if requests and requests["in_flight"] == 0:
                break
            await asyncio.sleep(0.1)
        faults = [Fault(**json.loads(line)) for line in self.log.read_text().splitlines()]
        report = judge(self.results, faults, requests, self.rss)
        return report | {"seconds": self.args.seconds, "seed": self.args.seed, "restarts": self.restarts}

    async def _restart_all_along(self) -> None:
        while True:
            for slot in range(INSTANCES):
                with contextlib.suppress(LauncherError):
                    before = (await asyncio.to_thread(self.status))["slots"][slot]["generation"]
                    await asyncio.to_thread(self.control.post, f"/slots/{slot}/restart")
                    self.restarts += 1
                    await self._back(slot, before)
                await asyncio.sleep(self.args.pause_s)

    async def _back(self, slot: int, before: int) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            status = await asyncio.to_thread(self.status)
            found = status["slots"][slot] if status else None
            if found and found["generation"] > before and found["state"] == "ready":
                return
            await asyncio.sleep(0.2)

    async def _measure(self) -> None:
        process = psutil.Process(self.daemon.pid)
        while True:
            self.rss.append(process.memory_info().rss)
            await asyncio.sleep(0.5)

    def end(self) -> None:
        """Stop the daemon and everything below it."""
        below = (
            [] if self.daemon.poll() is not None else psutil.Process(self.daemon.pid).children(recursive=True)
        )
        for name in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self.daemon.poll() is not None:
                break
            self.daemon.send_signal(name)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.daemon.wait(15)
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One run in a folder of its own; the report."""
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(args.keep) if args.keep else Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        chaos = Chaos(folder, args)
        try:
            return asyncio.run(chaos.run())
        finally:
            chaos.end()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options of one run."""
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=float, default=0.08, help="share of requests that draw a fault")
    parser.add_argument("--token-s", type=float, default=0.03, help="mean time between tokens")
    parser.add_argument("--pause-s", type=float, default=0.5, help="between one restart and the next")
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument("--keep", help="keep logs in this folder")
    return parser.parse_args(words)


def main() -> int:
    """Run, tell, and say whether all bounds hold."""
    args = parse()
    report = run(args)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(readable(report))
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
