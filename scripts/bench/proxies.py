"""Measures proxies side by side in one run: the CPU time and the delay that each adds, and its memory.

usage: scripts/bench-proxy [--only NAME,...] [--rounds N] [--quick] [--json FILE [--append]] [--write]
       scripts/bench-proxy --before CHECKOUT ...            another version of this project beside it, as "before"
       scripts/bench-proxy --install [--only NAME,...]      what is missing (apt-get for nginx and HAProxy)
       scripts/bench-proxy --report FILE [--write]          the tables of an earlier run
       scripts/bench-proxy soak --requests N [--only NAME]  memory over many requests
       scripts/bench-proxy body [--only NAME,...]           memory for one body of 16 MiB

Two stub engines, the clients and the proxies run on this machine; by default the proxy has one cpu for itself
and everything else another (--no-pin: none has). Each round starts every proxy afresh, in another order.
Names: direct, nginx, nginx-unix, haproxy, fleet (HAProxy as the ingress of a fleet, with a picker), fleet-haproxy (the CPU
time of HAProxy alone), vllm-router, vllm-router-rr, sglang-router, smg, aiohttp, bare, ours, ours-tcp,
ours-no-ids, ours-early (without late binding), ours-traced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from bench import pages, rivals
from bench.load import Target, now
from bench.points import BurstPoint, Measured, Point, SmallPoint, StreamPoint, measure
from bench.processes import FailedError, Process, free_port
from bench.rivals import DIRECT, OURS, RIVALS, SCRIPTS, Rival, Setting, another_version

IDLE_S: Final = 1.0  # how long a proxy is watched with nothing to do
ENGINES: Final = 2

FULL: Final[tuple[Point, ...]] = (
    StreamPoint(64),
    StreamPoint(256),
    StreamPoint(1000),
    BurstPoint(),
    SmallPoint(1024),
    SmallPoint(16384),
    SmallPoint(65536),
    SmallPoint(1024, rate=0),
)
# A burst on a proxy that has not seen a first token yet, then bursts of a proxy that knows the engines' speed.
BURSTS: Final[tuple[Point, ...]] = (BurstPoint(window_s=0.9, settle_s=0.0), BurstPoint())
QUICK: Final[tuple[Point, ...]] = (
    StreamPoint(32, tokens=20, window_s=0.6, settle_s=0.2),
    BurstPoint(32, tokens=5, window_s=1.2, settle_s=0.2),
    SmallPoint(1024, rate=500, connections=8, window_s=0.4, settle_s=0.1),
)


@dataclass(frozen=True, slots=True)
class Cpus:
    """Who runs where; None: anywhere."""

    proxy: set[int] | None
    rest: set[int] | None


def split_cpus(*, pin: bool) -> Cpus:
    """The first cpu that is allowed for the proxy, the others for the rest; nobody is pinned where there is one."""
    allowed = sorted(os.sched_getaffinity(0))
    if not pin or len(allowed) < 2:
        return Cpus(None, None)
    return Cpus({allowed[0]}, set(allowed[1:2]))


@contextlib.asynccontextmanager
async def engines(
    folder: Path, cpus: Cpus, count: int = ENGINES
) -> AsyncIterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Stub engines in one process; their ports and sockets."""
    ask = [word for n in range(count) for word in ("--port", "0", "--uds", str(folder / f"engine{n}.sock"))]
    argv = [sys.executable, "-m", "bench.stub_engine", *ask]
    process = Process(
        argv, folder / "engines.log", cpus=cpus.rest, env={"PYTHONPATH": str(SCRIPTS)}, pipe=True
    )
    try:
        assert process.popen.stdout is not None  # noqa: S101 - for the type
        line = await asyncio.to_thread(process.popen.stdout.readline)
        if not line:
            raise FailedError(f"the stub engines did not start: {process.last_words()}")
        told = json.loads(line)
        yield tuple(told["ports"]), tuple(told["uds"])
    finally:
        process.end()


@contextlib.asynccontextmanager
async def running(
    rival: Rival, folder: Path, cpus: Cpus, ports: tuple[int, ...], uds: tuple[str, ...]
) -> AsyncIterator[tuple[Process, Target]]:
    """The proxy, ready. Raises FailedError."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    setting = Setting(folder, free_port(), free_port(), ports, uds)
    process = Process(rival.argv(setting), folder / "log", cpus=cpus.proxy, env=rival.env)
    try:
        await process.answers(setting.port, rival.ready, 30)
        yield process, Target(("127.0.0.1", setting.port))
    finally:
        await asyncio.to_thread(process.end)


class Run:
    """All rounds of all proxies."""

    def __init__(
        self, proxies: Sequence[Rival | None], points: Sequence[Point], rounds: int, cpus: Cpus
    ) -> None:
        """`proxies`: None stands for the engines asked directly."""
        self._proxies = list(proxies)
        self._points = points
        self._rounds = rounds
        self._cpus = cpus
        self.rows: list[dict[str, Any]] = []

    async def run(self, first_round: int) -> None:
        """Measure; rows are added as they come."""
        with tempfile.TemporaryDirectory(prefix="bench-proxy-") as name:
            folder = Path(name)
            async with engines(folder, self._cpus) as (ports, uds):
                for number in range(first_round, first_round + self._rounds):
                    order = list(self._proxies)
                    random.Random(number).shuffle(order)  # noqa: S311
                    for proxy in order:
                        await self._one(proxy, number, folder, ports, uds)

    async def _one(
        self, rival: Rival | None, number: int, folder: Path, ports: tuple[int, ...], uds: tuple[str, ...]
    ) -> None:
        name = DIRECT if rival is None else rival.name
        try:
            if rival is None:
                targets = [Target(("127.0.0.1", port)) for port in ports]
                await self._points_of(name, number, targets, None, 0.0)
                return
            own = folder / f"{number}-{name}"
            async with running(rival, own, self._cpus, ports, uds) as (process, target):
                before, began = process.cpu_s(), now()
                await asyncio.sleep(min(IDLE_S, self._points[0].window_s / 2))
                idle = (process.cpu_s() - before) / (now() - began)
                await self._points_of(name, number, [target], process, idle)
        except FailedError as failed:
            self._add(name, number, "", None, str(failed))

    async def _points_of(
        self, name: str, number: int, targets: Sequence[Target], process: Process | None, idle: float
    ) -> None:
        for point in self._points:
            try:
                measured = await measure(point, targets, process, idle, seed=number)
            except FailedError as failed:
                self._add(name, number, point.label, None, str(failed))
                if process:
                    process.check()
                continue
            self._add(name, number, point.label, measured, measured.failure)

    def _add(self, name: str, number: int, label: str, measured: Measured | None, failure: str) -> None:
        values = asdict(measured) | {"cpu_us": measured.cpu_us} if measured else {}
        self.rows.append({"proxy": name, "round": number, "point": label, **values, "failure": failure})
        if measured is None or failure:
            print(f"{name} {label}: {failure}", file=sys.stderr)
        elif sys.stderr.isatty() or os.environ.get("BENCH_TRACE"):
            cpu = "" if measured.cpu_us is None else f"{measured.cpu_us:7.2f} us"
            print(f"round {number} {name:<14} {label:<28} {cpu:>10} {measured.units:>7}", file=sys.stderr)


@contextlib.contextmanager
def pinned(cpus: set[int] | None) -> Iterator[None]:
    """This process on these cpus."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def names_of(only: str | None) -> list[str]:
    """Those asked for, or all that are installed. Raises SystemExit for one that is not there."""
    if only is None:
        names = [DIRECT]
        for rival in RIVALS.values():
            if how := rival.missing():
                print(f"{rival.name} is not installed and left out\n  what to do: {how}", file=sys.stderr)
            else:
                names.append(rival.name)
        return names
    names = [name.strip() for name in only.split(",") if name.strip()]
    for name in names:
        if name != DIRECT and name not in RIVALS:
            raise SystemExit(
                f"cannot measure '{name}': there is none of that name\n"
                f"  what to do: choose from {', '.join([DIRECT, *RIVALS])}"
            )
        if name != DIRECT and (how := RIVALS[name].missing()):
            raise SystemExit(f"cannot measure '{name}': it is not installed\n  what to do: {how}")
    return names


def _install(only: str | None) -> int:
    chosen = [name.strip() for name in only.split(",")] if only else list(RIVALS)
    for name in chosen:
        rival = RIVALS.get(name)
        if rival is None or rival.missing() is None:
            continue
        print(f"installing {name}", flush=True)
        try:
            rivals.install(rival)
        except FailedError as failed:
            print(f"cannot install {name}: {failed}", file=sys.stderr)
            return 1
    return 0


def raise_limits() -> None:
    """As many files as allowed: 1,000 streams are 2,000 sockets."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536) if hard > 0 else 65536, hard))


def parser() -> argparse.ArgumentParser:
    """The command line of a run."""
    made = argparse.ArgumentParser(
        prog="scripts/bench-proxy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", metavar="NAME,...", help="these proxies; direct is always good to have")
    made.add_argument(
        "--before", type=Path, metavar="CHECKOUT", help="measure this checkout's version as well"
    )
    made.add_argument("--rounds", type=int, default=5, help="of all proxies (default 5)")
    made.add_argument("--points", choices=["all", "streams", "bursts", "requests"], default="all")
    made.add_argument("--streams", type=int, action="append", help="only this many streams (repeatable)")
    made.add_argument("--quick", action="store_true", help="one short round: shows that it works, no figures")
    made.add_argument("--no-pin", action="store_true", help="pin nothing to a cpu")
    made.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    made.add_argument("--append", action="store_true", help="add to FILE: one long run in several short ones")
    made.add_argument("--report", type=Path, metavar="FILE", help="measure nothing, show FILE")
    made.add_argument("--write", action="store_true", help="put tables and picture into docs/")
    made.add_argument("--install", action="store_true", help="install the proxies that are missing")
    return made


def _before(checkout: Path) -> Rival:
    """Raises SystemExit where there is no checkout of this project."""
    if not (checkout / "scripts" / "bench" / "ours.py").is_file():
        raise SystemExit(
            f"cannot measure '{checkout}': it is no checkout of this project\n"
            "  what to do: make one, for example `git worktree add FOLDER COMMIT`"
        )
    return another_version(checkout.resolve())


def _points(args: argparse.Namespace) -> tuple[Point, ...]:
    if args.streams:
        return tuple(StreamPoint(count) for count in args.streams)
    if args.points == "bursts" and not args.quick:
        return BURSTS
    points = QUICK if args.quick else FULL
    kinds = {
        "all": (StreamPoint, BurstPoint, SmallPoint),
        "streams": (StreamPoint, BurstPoint),
        "bursts": (BurstPoint,),
        "requests": (SmallPoint,),
    }
    return tuple(point for point in points if isinstance(point, kinds[args.points]))


def run(arguments: Sequence[str]) -> int:
    """Measure and report. 1 when a measurement failed."""
    args = parser().parse_args(arguments)
    if args.install:
        return _install(args.only)
    if args.report:
        return _show(json.loads(args.report.read_text()), write=args.write)
    names = names_of(args.only)
    proxies = [RIVALS.get(name) for name in names]
    if args.before:
        proxies.append(_before(args.before))
    raise_limits()
    cpus = split_cpus(pin=not args.no_pin)
    kept = json.loads(args.json.read_text()) if args.append and args.json.exists() else {"rows": []}
    first = 1 + max((row["round"] for row in kept["rows"]), default=0)
    bench = Run(proxies, _points(args), 1 if args.quick else args.rounds, cpus)
    with pinned(cpus.rest), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(bench.run(first))
    result = {
        "machine": pages.machine(),
        "pinned": cpus.proxy is not None,
        "versions": {name: RIVALS[name].version() for name in names if name in RIVALS},
        "rows": kept["rows"] + bench.rows,
    }
    result["versions"] = kept.get("versions", {}) | result["versions"]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return _show(result, write=args.write)


def _show(result: dict[str, Any], *, write: bool) -> int:
    print(pages.text(result))
    if write:
        pages.write(result, SCRIPTS.parent / "docs")
    return int(any(row["failure"] for row in result["rows"] if row["proxy"] in (DIRECT, OURS)))
