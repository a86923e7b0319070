"""Memory over many requests, and for large bodies.

usage: scripts/bench-proxy soak [--requests N] [--streams N] [--only NAME] [--json FILE]
       scripts/bench-proxy body [--mib N] [--at-once N] [--only NAME,...] [--json FILE]

`soak` sends N small requests as fast as they are answered, beside some streams, and says how the memory went from
the tenth part on, when all is warm. `body` sends large requests to a fresh proxy and says how many times their size
its memory grew at its peak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.load import Record, SmallClient, Smalls, Streams, Target, body_of, now, open_client, request_of
from bench.pages import table
from bench.processes import FailedError, Process
from bench.proxies import Cpus, engines, names_of, pinned, raise_limits, running, split_cpus
from bench.rivals import OURS, RIVALS

STEPS: Final = 20  # looks at the memory
FLAT_BYTES: Final = 4_000_000  # what a heap may wander
ROUNDS: Final = 3  # of bodies, each with a fresh proxy


async def soak(name: str, requests: int, streams: int, cpus: Cpus) -> dict[str, Any]:
    """Memory after each twentieth of the requests."""
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as scratch:
        folder = Path(scratch)
        async with (
            engines(folder, cpus) as (ports, uds),
            running(RIVALS[name], folder / name, cpus, ports, uds) as (process, target),
        ):
            load, beside = Smalls(64, 0, 1024), Streams(streams, 40, 1024)
            load.record.counting = beside.record.counting = True
            try:
                if streams:
                    await beside.start([target])
                await load.start([target])
                began = now()
                seen = [(0, process.rss_bytes())]
                for step in range(1, STEPS + 1):
                    await _until(load.record, requests * step // STEPS, process)
                    seen.append((load.record.requests, process.rss_bytes()))
                    del load.record.ttft_s[:], beside.record.ttft_s[:], beside.record.gap_s[:]
                seconds = now() - began
            finally:
                await load.stop()
                await beside.stop()
    failures = load.record.failures + beside.record.failures
    warm = [rss for count, rss in seen if count >= requests // 10]
    return {
        "proxy": name,
        "requests": load.record.requests,
        "streams": beside.record.requests,
        "seconds": seconds,
        "failures": len(failures),
        "failure": failures[0] if failures else "",
        "rss_bytes": seen,
        "growth_bytes": warm[-1] - warm[0],
        "most_bytes": max(rss for _, rss in seen),
    }


async def _until(record: Record, requests: int, process: Process) -> None:
    """Raises FailedError when it takes too long, or more and more fails."""
    last, stuck = -1, 0
    while record.requests < requests:
        await asyncio.sleep(0.05)
        process.check()
        stuck = 0 if record.requests > last else stuck + 1
        last = record.requests
        if stuck > 200:  # 10 s
            why = record.failures[0] if record.failures else "nothing comes any more"
            raise FailedError(f"after {last} requests: {why}")


async def bodies(name: str, size: int, at_once: int, cpus: Cpus) -> dict[str, Any]:
    """How the memory grew at its peak, least of all rounds and most."""
    grew = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="bench-body-") as scratch:
            folder = Path(scratch)
            async with (
                engines(folder, cpus) as (ports, uds),
                running(RIVALS[name], folder / name, cpus, ports, uds) as (process, target),
            ):
                await _answered([request_of(body_of(1024, seed=1, stream=False, max_tokens=9))] * 4, target)
                request = request_of(body_of(size, seed=2, stream=False, max_tokens=9))
                before = sum_rss(process)
                process.forget_peak()
                await _answered([request] * at_once, target)
                grew.append((process.peak_bytes() - before) / (size * at_once))
    return {"proxy": name, "bytes": size, "at_once": at_once, "times": sorted(grew)}


def sum_rss(process: Process) -> int:
    """The peak of this moment: what VmHWM begins with."""
    process.forget_peak()
    return process.peak_bytes()


async def _answered(requests: Sequence[bytes], target: Target) -> None:
    """Send all at once, each on its own connection. Raises FailedError."""
    record = Record(counting=True)
    done = asyncio.Event()

    def free(client: SmallClient) -> None:
        client.closing = True
        client.transport.close()
        if record.requests == len(requests):
            done.set()

    for request in requests:
        client = SmallClient(record, free)
        await open_client(target, client)
        client.send(request)
    try:
        async with asyncio.timeout(60):
            await done.wait()
    except TimeoutError:
        raise FailedError(record.failures[0] if record.failures else "no answer within 60 s") from None


def run(arguments: Sequence[str]) -> int:
    """1: memory grew, or a request failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-proxy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["soak", "body"])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", default=OURS, metavar="NAME,...")
    parser.add_argument("--no-pin", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(arguments)
    names = names_of(args.only)
    raise_limits()
    cpus = split_cpus(pin=not args.no_pin)
    results = []
    with pinned(cpus.rest), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for name in names:
            try:
                if args.what == "soak":
                    results.append(runner.run(soak(name, args.requests, args.streams, cpus)))
                else:
                    results.append(runner.run(bodies(name, args.mib << 20, args.at_once, cpus)))
            except FailedError as failed:
                print(f"cannot measure {name}: {failed}", file=sys.stderr)
                return 1
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    print(_soak_table(results) if args.what == "soak" else _body_table(results))
    if args.what == "body":
        return 0
    return int(any(one["failures"] or one["growth_bytes"] > FLAT_BYTES for one in results))


def _soak_table(results: Sequence[dict[str, Any]]) -> str:
    head = ["proxy", "requests", "streams", "a second", "failures", "memory MB", "growth from 10 % on, MB"]
    rows = [
        [
            one["proxy"],
            f"{one['requests']}",
            f"{one['streams']}",
            f"{one['requests'] / one['seconds']:.0f}",
            f"{one['failures']} {one['failure']}".strip(),
            f"{one['most_bytes'] / 1e6:.1f}",
            f"{one['growth_bytes'] / 1e6:+.1f}",
        ]
        for one in results
    ]
    return table(head, rows)


def _body_table(results: Sequence[dict[str, Any]]) -> str:
    head = ["proxy", "body", "at once", "memory grew by, times the bodies' size"]
    rows = [
        [
            one["proxy"],
            f"{one['bytes'] >> 20} MiB",
            f"{one['at_once']}",
            f"{one['times'][len(one['times']) // 2]:.2f} ({one['times'][0]:.2f}–{one['times'][-1]:.2f})",
        ]
        for one in results
    ]
    return table(head, rows)
