"""Injects faults into eight instances that restart in turn, under 64 clients, and checks what the clients get.

    scripts/chaos [--seconds N] [--seed N] [--faults SHARE] [--json FILE]

Also there: events that are no JSON in the middle of a stream; streams that end behind a finish_reason of "" or "null";
engines that send comments while they hang, and engines that compute and say nothing for longer than every time-out for
silence; requests to which every instance closes the connection; a
client that pipelines thousands of requests; freezes of the whole host; instances that hang
while their health path returns 200 (with and without vLLM's counters, with and without
streams); clients that do not read; uploads that never end; TCP and TLS connections that send nothing; a daemon with a tenth
of its file descriptors left.

Prints a report; exit status 1 if a bound is broken: no request fails before its first byte; no truncated response looks
complete; every refusal has a documented reason; at least 99 % of the cut plain streams continue exactly; counters add up;
the usage ledger, /metrics and the clients count the same tokens;
memory stays flat; every restart and every hang ends in a ready instance in time; every slot is watched; the control socket
and /health always answer.
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
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil

from chaos import agreement
from chaos.actions import Actions
from chaos.clients import KINDS, Client, Result
from chaos.hostile import Pipeliner, Poison, Silent, Unread, Upload
from chaos.verdict import Fault, judge, readable
from chaos.wire import Wire
from launcher.base.errors import LauncherError
from launcher.control.client import ControlClient

TESTS = Path(__file__).resolve().parents[1]
INSTANCES = 8
MAX_NUM_SEQS = 12
# As many as the instances of their model can run at once.
UNREAD = 6 * MAX_NUM_SEQS
# Sent of a body before it drips, or falls silent; the large ones are more than upload_max_bytes together.
UPLOADS = ((1000, True), (1000, False), (4 << 20, True), (4 << 20, False)) * 3
SILENT = 80
POISONS = 3
READY_S = 180.0
CONFIG = """
[[models]]
name = "chaos"
path = "chaos"
max_num_seqs = {max_num_seqs}
nodes = [0, 1, 2, 3, 4, 5]
[[models]]
name = "whole"
path = "whole"
max_num_seqs = {max_num_seqs}
nodes = [6, 7]
[layout]
reserve_cores = 0
[engine]
kind = "command"
command = {command}
[engine.env]
PYTHONPATH = "{path}"
[proxy]
listen = ["127.0.0.1:{port}", "unix:{folder}/p.sock"]
tls_certificate = "{folder}/tls.pem"
header_timeout_s = 10
body_timeout_s = 5
max_body_bytes = 8388608
upload_max_bytes = 16777216
upload_wait_s = 10
slow_client_buffer_bytes = 16777216
connect_timeout_s = 2
first_token_timeout_s = 3
first_token_timeout_per_1k_s = 1
answer_timeout_s = 6
idle_timeout_s = 3
hung_timeout_s = 2
eject_s = 2
park_timeout_s = 30
access_log = "errors"
[usage]
path = "{folder}/usage.db"
[audit]
path = "{folder}/trail"
strict = true
[control]
socket = "{folder}/c.sock"
[supervision]
stall_timeout_s = 5
probe_interval_s = 0.5
probe_timeout_s = 3
drain_timeout_s = 60
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
        certify(folder / "tls.pem")
        self.door = str(folder / "p.sock")
        self.ledger = folder / "usage.db"
        self.trail = folder / "trail"
        config = folder / "config.toml"
        config.write_text(
            CONFIG.format(
                max_num_seqs=MAX_NUM_SEQS,
                command=json.dumps(command),
                path=TESTS,
                port=self.port,
                folder=folder,
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
        self.actions = Actions(
            psutil.Process(self.daemon.pid), self.control, slots=INSTANCES, pause_s=args.pause_s
        )
        self.results: list[Result] = []

    def status(self) -> dict[str, Any]:
        """The daemon's status; {} while it does not answer."""
        try:
            return self.control.get("/status")
        except LauncherError:
            return {}

    def ready(self) -> bool:
        """Waits until all instances are ready."""
        if self.daemon.poll() is not None:
            raise RuntimeError(f"the daemon ended: {self.daemon_log.read_text()[-3000:]}")
        return self.status().get("ready") == INSTANCES

    async def run(self) -> dict[str, Any]:
        """Runs clients, restarts and measurements together; returns the report."""
        async with asyncio.timeout(READY_S):
            while not await asyncio.to_thread(self.ready):  # noqa: ASYNC110 - another process is polled
                await asyncio.sleep(0.1)
        begun = time.monotonic()
        until = begun + self.args.seconds
        async with asyncio.TaskGroup() as group:
            others = [
                group.create_task(work, name=name)
                for name, work in (
                    ("restarts", self.actions.restart_all_along()),
                    ("hangs", self.actions.hang_now_and_then(until)),
                    ("freezes", self.actions.freeze_host_now_and_then()),
                    ("look", self.actions.look()),
                    ("health", self.actions.ask_health(self.port)),
                    ("descriptors", self._descriptors()),
                )
            ]
            clients = [group.create_task(work) for work in (*self._usual(until), *self._hostile(until))]
            await asyncio.wait(clients)
            for other in others:
                other.cancel()
        return await self._report()

    def _usual(self, until: float) -> list[Coroutine[Any, Any, None]]:
        share = self.args.clients / sum(KINDS.values())
        kinds = [kind for kind, count in KINDS.items() for _ in range(max(round(count * share), 1))]
        return [
            Client(number, kind, self.args.seed, self.door, self.results).run(until)
            for number, kind in enumerate(kinds)
        ]

    def _hostile(self, until: float) -> list[Coroutine[Any, Any, None]]:
        self.silent = [Silent("TLS", self._over_tcp) for _ in range(SILENT)]
        self.silent += [Silent("UNIX", self._over_unix) for _ in range(SILENT)]
        uploads = [
            Upload(number, self.door, self.results, first=first, drips=drips)
            for number, (first, drips) in enumerate(UPLOADS)
        ]
        poisons = [Poison(number, self.door, self.results) for number in range(POISONS)]
        self.pipeliner = Pipeliner(self.door)
        unread = [Unread(number, self.door, self.results) for number in range(UNREAD)]
        early = self.args.seconds / 10
        return [
            *(one.run(until) for one in (*self.silent, *uploads, *poisons, self.pipeliner)),
            *(after(early, one.run(until)) for one in unread),
        ]

    async def _over_tcp(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def _over_unix(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.door)

    async def _descriptors(self) -> None:
        """Samples during the last three fifths of the run."""
        await asyncio.sleep(self.args.seconds / 5)
        await self.actions.leave_few_descriptors(self.args.seconds / 5)

    async def _report(self) -> dict[str, Any]:
        requests: dict[str, Any] = {}
        for _ in range(100):
            requests = (await asyncio.to_thread(self.status)).get("requests", requests)
            if requests and requests["in_flight"] == 0:
                break
            await asyncio.sleep(0.1)
        faults = [Fault(**json.loads(line)) for line in self.log.read_text().splitlines()]
        longest = {
            kind: round(max(one.longest_s for one in self.silent if one.kind == kind), 1)
            for kind in ("TLS", "UNIX")
        }
        wire = Wire(self.door)
        page = (await wire.get("/metrics")).decode()
        wire.close()
        accepted = int(requests.get("accepted", 0))
        found = await asyncio.to_thread(agreement.books, self.ledger, accepted)
        agreed = agreement.compare(self.results, found, page, accepted)
        agreed["wrong"] += await asyncio.to_thread(agreement.differences, self.trail, found.entries)
        report = judge(
            self.results,
            faults,
            requests,
            self.actions.notes,
            silent_s=longest,
            agreement=agreed,
            pipeliner=self.pipeliner,
        )
        return report | {"seconds": self.args.seconds, "seed": self.args.seed}

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


async def after(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` after a delay."""
    await asyncio.sleep(seconds)
    await work


def certify(file: Path) -> None:
    """A self-signed certificate and its key."""
    curve = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", *curve, "-nodes", "-days", "2", "-subj", "/CN=chaos",
         "-keyout", str(file), "-out", str(file.with_suffix(".chain"))],
        check=True, capture_output=True,
    )  # fmt: skip
    with file.open("a") as out:
        out.write(file.with_suffix(".chain").read_text())


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One run in its own folder; returns the report."""
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
    """Runs, prints the report; exits with 1 if a bound does not hold."""
    args = parse()
    report = run(args)
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    print(readable(report))
    return 1 if report["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
