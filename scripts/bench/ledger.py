"""Measures the usage ledger: the CPU time that it adds to a request, and the size and speed of a month.

usage: scripts/bench-ledger [requests] [--rounds N] [--seconds S] [--rate R] [--audit] [--access-log] [--no-pin]
                            [--json FILE]
       scripts/bench-ledger writes [--requests N] [--busy]
       scripts/bench-ledger month FILE [--requests N]

requests: two proxies beside each other, one that keeps the ledger and one that makes no entries at all, between the same
stub engines and clients. Each round measures both, in another order; the ratio is that of a round. The threads besides
the event loop's are the ledger's writer (--audit: the audit trail's too; --access-log: the log's): their CPU time is read
from the kernel.

writes: what the writer's thread spends on a request, in batches of 15, 150 and 1500; --busy: beside a thread that holds
the interpreter's lock whenever it can.

month: writes N entries (10 million) of 30 days that end now into FILE, of 100 keys, 3 models and 16 slots, and says how
large the file is, how long `usage --since 30d --by key` takes, and how long it takes to find a request by its id.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.load import Target
from bench.pages import machine
from bench.points import SmallPoint, measure
from bench.processes import PROC, Process, free_port
from bench.proxies import Cpus, engines, pinned, raise_limits, split_cpus
from bench.rivals import SCRIPTS
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.ledger_file import LedgerFile
from launcher.accounts.report_values import Question
from launcher.accounts.usage_report import find_request, latest_requests
from launcher.base.intervals import mean, paired_ratio

ON: Final = "on"
OFF: Final = "off"
BODY_BYTES: Final = 1024
MONTH_S: Final = 30 * 86_400
KEYS: Final = 100
MODELS: Final = ("llama-3.2-3b-instruct", "qwen3-8b", "bge-m3")
SLOTS: Final = 16
BATCHES: Final = (15, 150, 1500)
LARGE: Final = 10_000


@dataclass(frozen=True, slots=True)
class Row:
    """One window of one proxy."""

    round: int
    ledger: str
    requests: int
    cpu_us: float
    """Per request, of the whole process."""
    threads_us: float
    """Per request, of its threads besides the event loop's."""
    p50_ms: float
    """From sending a request to its response."""
    p99_ms: float
    failures: int


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="scripts/bench-ledger", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", metavar="COMMAND")
    requests = commands.add_parser("requests", help="the CPU time that it adds to a request")
    requests.add_argument("--rounds", type=int, default=20, help="of both proxies (default 20)")
    requests.add_argument("--seconds", type=float, default=5.0, help="of each window (default 5)")
    requests.add_argument(
        "--rate", type=float, default=1500.0, help="requests a second (default 1500); 0: as many as it can"
    )
    requests.add_argument("--audit", action="store_true", help="keep the audit trail as well")
    requests.add_argument("--access-log", action="store_true", help="write the access log as well")
    requests.add_argument("--no-pin", action="store_true", help="pin nothing to a cpu")
    requests.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    writes = commands.add_parser("writes", help="what the writer's thread spends on a request")
    writes.add_argument(
        "--requests", type=int, default=150_000, help="of each size of batches (default 150000)"
    )
    writes.add_argument("--busy", action="store_true", help="beside a thread that never waits")
    month = commands.add_parser("month", help="the size and speed of a month")
    month.add_argument(
        "file", type=Path, metavar="FILE", help="the ledger to write; an existing one is only asked"
    )
    month.add_argument(
        "--requests", type=int, default=10_000_000, help="entries of the month (default 10 million)"
    )
    return made


def run(arguments: Sequence[str]) -> int:
    """Measure and report. 1 when a request failed."""
    words = list(arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words.insert(0, "requests")
    args = parser().parse_args(words)
    if args.command == "month":
        return _month(args)
    if args.command == "writes":
        return _writes(args)
    raise_limits()
    cpus = split_cpus(pin=not args.no_pin)
    with pinned(cpus.rest), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(_requests(args, cpus))
    if args.json:
        args.json.write_text(json.dumps([_plain(row) for row in rows], indent=1) + "\n")
    print(_text(rows, args, pin=cpus.proxy is not None))
    return int(any(row.failures for row in rows))


async def _requests(args: argparse.Namespace, cpus: Cpus) -> list[Row]:
    rows: list[Row] = []
    point = SmallPoint(BODY_BYTES, rate=args.rate, window_s=args.seconds)
    with tempfile.TemporaryDirectory(prefix="bench-ledger-") as name:
        folder = Path(name)
        async with engines(folder, cpus) as (_, uds), contextlib.AsyncExitStack() as stack:
            proxies = {
                ledger: await stack.enter_async_context(_proxy(folder / ledger, cpus, uds, ledger, args))
                for ledger in (ON, OFF)
            }
            for number in range(1, args.rounds + 1):
                order = list(proxies)
                random.Random(number).shuffle(order)  # noqa: S311
                for ledger in order:
                    process, target = proxies[ledger]
                    before = _threads_s(process.popen.pid)
                    measured = await measure(point, [target], process, 0.0, seed=number)
                    # The load begins before the window, and ends after it; the threads' time is that of all of it.
                    share = args.seconds / (args.seconds + point.settle_s)
                    threads_us = (_threads_s(process.popen.pid) - before) * share / measured.units * 1e6
                    rows.append(Row(
                        number, ledger, measured.units, measured.cpu_us or 0.0, threads_us,
                        1e3 * measured.ttft_p50_s, 1e3 * measured.ttft_p99_s, measured.failures,
                    ))  # fmt: skip
    return rows


@contextlib.asynccontextmanager
async def _proxy(
    folder: Path, cpus: Cpus, uds: Sequence[str], ledger: str, args: argparse.Namespace
) -> AsyncIterator[tuple[Process, Target]]:
    await asyncio.to_thread(folder.mkdir)
    port = free_port()
    # Without entries there are no lines either.
    options = ["--access-log", "all" if args.access_log else "off"]
    options += ["--ledger", str(folder / "usage.db")] if ledger == ON else ["--no-entries"]
    if args.audit and ledger == ON:
        options += ["--audit", str(folder / "audit")]
    argv = [sys.executable, "-m", "bench.ours", "--listen", f"127.0.0.1:{port}", *options, *uds]
    process = Process(
        argv, folder / "log", cpus=cpus.proxy, env={"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parent}"}
    )
    try:
        await process.answers(port, "/health", 30)
        yield process, Target(("127.0.0.1", port))
    finally:
        await asyncio.to_thread(process.end)


def _threads_s(pid: int) -> float:
    """CPU seconds of a process's threads but the first, to the nanosecond."""
    total = 0
    for task in (PROC / str(pid) / "task").iterdir():
        if task.name != str(pid):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _plain(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}


def _text(rows: Sequence[Row], args: argparse.Namespace, *, pin: bool) -> str:
    on, off = ([row for row in rows if row.ledger == which] for which in (ON, OFF))
    ratio = paired_ratio([row.cpu_us for row in on], [row.cpu_us for row in off])
    threads = mean([row.threads_us for row in on])
    base = sum(row.cpu_us for row in off) / len(off)
    what = " and ".join(
        ["ledger", *(["audit trail"] if args.audit else []), *(["access log"] if args.access_log else [])]
    )
    lines = [
        f"{machine()}; {'one CPU for the proxies' if pin else 'not pinned'}",
        f"{len(on)} rounds of {args.seconds:g} s, {sum(row.requests for row in rows)} requests",
        f"failed: {sum(row.failures for row in rows)}",
        f"CPU per request without: {base:.1f} us; with {what}: {sum(row.cpu_us for row in on) / len(on):.1f} us",
    ]
    if ratio is not None:
        lines.append(
            f"ratio: {ratio.estimate:.3f} ({ratio.low:.3f} to {ratio.high:.3f}, 95 % interval, paired rounds)"
        )
    lines += [
        f"{name} of the response time, median of the rounds: {_median(off, column):.2f} ms without, "
        f"{_median(on, column):.2f} ms with {what}"
        for name, column in (("median", "p50_ms"), ("p99", "p99_ms"))
    ]
    if threads is not None:
        lines.append(
            f"threads of the {what}: {threads.estimate:.2f} us ({threads.low:.2f} to {threads.high:.2f}), "
            f"{100 * threads.estimate / base:.1f} % of a request"
        )
    return "\n".join(lines)


def _median(rows: Sequence[Row], column: str) -> float:
    return statistics.median(getattr(row, column) for row in rows)


def _month(args: argparse.Namespace) -> int:
    if not args.file.exists():
        began = time.process_time()
        _write(args.file, args.requests)
        print(f"written in {time.process_time() - began:.0f} s of CPU time")
    print(f"file: {args.file.stat().st_size / 1e9:.2f} GB, {args.requests} requests")
    command = [
        sys.executable,
        "-m",
        "launcher",
        "usage",
        "--since",
        "30d",
        "--by",
        "key",
        "--json",
        "--file",
        str(args.file),
    ]
    for _ in range(3):
        before, began = os.times(), time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPTS.parent)
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            return 1
        wall, after = time.monotonic() - began, os.times()
        cpu = after.children_user + after.children_system - before.children_user - before.children_system
        print(
            f"usage --since 30d --by key: {wall:.2f} s, {cpu:.2f} s of CPU time, the start of Python included"
        )
    for only in ({"key": "team-099"}, {"key": "team-000"}):
        question, began = Question(since="30d", **only), time.monotonic()
        latest_requests(args.file, question, 50, time.time(), "USD")
        print(f"latest 50 requests of {only['key']}: {1e3 * (time.monotonic() - began):.0f} ms")
    began = time.monotonic()
    find_request(args.file, "an id that no request has")
    print(f"a request is looked for by its id: {1e3 * (time.monotonic() - began):.0f} ms")
    return 0


def _write(path: Path, requests: int) -> None:
    chance = random.Random(1)  # noqa: S311
    with contextlib.closing(_opened(path)) as file:
        for batch in _batches(chance, time.time() - MONTH_S, requests, MONTH_S / requests, LARGE):
            file.write(batch, {})


def _writes(args: argparse.Namespace) -> int:
    if args.busy:
        threading.Thread(target=_spin, daemon=True).start()
    for size in BATCHES:
        with tempfile.TemporaryDirectory(prefix="bench-ledger-") as name:
            path, chance = Path(name) / "usage.db", random.Random(1)  # noqa: S311
            cpu_s = wall_s = written = 0.0
            with contextlib.closing(_opened(path)) as file:
                # A batch each 0.1 s.
                for batch in _batches(chance, time.time(), args.requests, 0.1 / size, size):
                    before, cpu, began = _written(), time.thread_time(), time.monotonic()
                    file.write(batch, {})
                    cpu_s += time.thread_time() - cpu
                    wall_s += time.monotonic() - began
                    written += _written() - before
            print(
                f"batches of {size}: {cpu_s / args.requests * 1e6:.1f} us of CPU time a request, "
                f"{wall_s / args.requests * 1e6:.1f} us, {written / args.requests:.0f} bytes written, "
                f"{path.stat().st_size / args.requests:.0f} bytes in the file"
            )
    return 0


def _spin() -> None:
    while True:
        sum(range(200))


def _written() -> int:
    """Bytes that this process gave to write(2)."""
    fields = dict(line.split(": ") for line in (PROC / "self" / "io").read_text().splitlines())
    return int(fields["wchar"])


def _opened(path: Path) -> LedgerFile:
    return LedgerFile(path, "UTC", lambda at: int(at // 3600 * 3600), time.time())


def _batches(
    chance: random.Random, begin: float, requests: int, apart_s: float, size: int
) -> Iterator[list[EndedRequest]]:
    weights = [1 / (rank + 1) for rank in range(KEYS)]
    for first in range(0, requests, size):
        numbers = range(first, min(first + size, requests))
        keys = chance.choices(range(KEYS), weights, k=len(numbers))
        yield [
            _entry(chance, begin + number * apart_s, key) for number, key in zip(numbers, keys, strict=True)
        ]


def _entry(chance: random.Random, at: float, key: int) -> EndedRequest:
    queued_s = chance.expovariate(50)
    first_byte_s = queued_s + chance.lognormvariate(-0.5, 0.6)
    prompt = int(chance.lognormvariate(6, 1))
    return EndedRequest(
        ended_at=at, request_id=f"{chance.getrandbits(128):032x}", key=f"team-{key:03d}", model=MODELS[key % len(MODELS)],
        path="/v1/chat/completions", status=200, outcome="completed" if chance.random() < 0.99 else "client_aborted",
        slot=chance.randrange(SLOTS), duration_s=first_byte_s + chance.lognormvariate(1.5, 0.8), queued_s=queued_s,
        first_byte_s=first_byte_s, prompt_tokens=prompt, cached_tokens=prompt // 3,
        output_tokens=int(chance.lognormvariate(5, 1)), attempts=1, predicted_s=first_byte_s, picos=prompt * 10**5,
    )  # fmt: skip
