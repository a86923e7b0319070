"""What the ingress of a fleet costs its host: CPU time and memory of the picker's process and of HAProxy.

usage: scripts/bench-ingress [--hosts N] [--instances N] [--requests N] [--rate N] [--seconds S]

The real ingress with so many hosts, which bench.fleet_hosts stands in for: one process, a port of 127.0.0.1 for each.
Phases: nobody asks; so many short requests a second; so many streams in hand; so many requests that come at once while no
instance can start one (the picker holds each for a second at most, then it waits at its host). CPU time is a share of one
core, memory is PSS: shared pages are divided among those who share them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.processes import PROC, FailedError, Process, free_port
from bench.proxies import raise_limits
from bench.rivals import SCRIPTS
from launcher.fleet.haproxy import Servers
from launcher.fleet.loads import HostLoad, Loads
from launcher.fleet.members import MEMBERS, Member, MemberList, write_members

START_S: Final = 60.0
CALLS: Final = 20
CONNECTIONS: Final = 16
SAMPLE_S: Final = 0.2
_PATHS: Final = {"PYTHONPATH": f"{SCRIPTS}:{SCRIPTS.parent}"}
_BODY: Final = b'{"model":"m","stream":true,"max_tokens":%d,"messages":[{"role":"user","content":"%d %b"}]}'


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one process in one phase."""

    core: float  # 1.0: all of one core
    mib: float  # the most


class Ingress:
    """The processes of an ingress that runs."""

    def __init__(self, folder: Path, port: int, picker: int) -> None:
        self.folder = folder
        self.port = port
        self._pids = {"picker": picker, "HAProxy": int((folder / "haproxy.pid").read_text())}

    async def measure(self, seconds: float) -> dict[str, Measured]:
        """By name of the process."""
        began, before = time.monotonic(), {name: cpu_s(pid) for name, pid in self._pids.items()}
        most = dict.fromkeys(self._pids, 0.0)
        while (left := began + seconds - time.monotonic()) > 0:
            await asyncio.sleep(min(SAMPLE_S, left))
            # The kernel walks all pages for this: seldom, and not in the CPU time of the process.
            most = {name: max(most[name], pss_mib(pid)) for name, pid in self._pids.items()}
        wall = time.monotonic() - began
        return {
            name: Measured((cpu_s(pid) - before[name]) / wall, most[name]) for name, pid in self._pids.items()
        }

    async def status(self) -> dict[str, Any]:
        """What the ingress shows."""
        reader, writer = await asyncio.open_unix_connection(self.folder / "ingress.sock")
        with contextlib.closing(writer):
            shown: dict[str, Any] = json.loads(await reader.read())
        return shown

    async def apply_s(self, members: Sequence[Member], calls: int) -> tuple[float, float]:
        """CPU seconds of one Servers.apply that changes nothing: of the one who calls, and of HAProxy."""
        servers, pid = Servers(self.folder / "admin.sock"), self._pids["HAProxy"]
        idle = cpu_s(pid)
        await asyncio.sleep(1.0)
        idle = cpu_s(pid) - idle
        began, own, theirs = time.monotonic(), time.process_time(), cpu_s(pid)
        for _ in range(calls):
            await servers.apply(members)
        own, theirs = time.process_time() - own, cpu_s(pid) - theirs
        return own / calls, (theirs - idle * (time.monotonic() - began)) / calls


class _Nobody:
    def report(self, host: str, load: HostLoad, now: float) -> None: ...
    def lost(self, host: str) -> None: ...


async def loads_core(members: Sequence[Member], seconds: float) -> float:
    """Share of a core that asking all hosts for their loads takes."""
    loads = Loads(_Nobody(), None)
    loads.watch(members)
    await asyncio.sleep(2.0)
    began, before = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    core = (time.process_time() - before) / (time.monotonic() - began)
    await loads.close()
    return core


def cpu_s(pid: int) -> float:
    """As bench.processes.Process.cpu_s, of one process."""
    return time.clock_gettime((~pid << 3) | 2)


def pss_mib(pid: int) -> float:
    """Proportional set size."""
    lines = (PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def request(number: int, max_tokens: int) -> bytes:
    """With a prompt of 4 KiB."""
    body = _BODY % (max_tokens, number, b"word " * 800)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def ask_often(port: int, rate: float, seconds: float) -> int:
    """Short requests, on as many kept connections; how many were answered."""

    async def one(number: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        count, began = 0, time.monotonic() + number / rate
        with contextlib.closing(writer):
            while (due := began + count * CONNECTIONS / rate) < began + seconds:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                writer.write(request(1000 * number + count, 1))
                await reader.readuntil(b"\r\n0\r\n\r\n")
                count += 1
        return count

    return sum(await asyncio.gather(*(one(number) for number in range(CONNECTIONS))))


async def ask(port: int, number: int, first: asyncio.Event | None = None) -> None:
    """One streamed request, until its end. Raises FailedError where it is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(request(number, 200))
        said = await reader.readuntil(b"\r\n\r\n")
        if said[9:12] != b"200":
            raise FailedError(f"a request was answered {said[:60]!r}")
        if first is not None:
            first.set()
        while await reader.read(1 << 16):
            pass


async def run_phases(
    ingress: Ingress, hosts: Process, members: Sequence[Member], args: argparse.Namespace
) -> None:
    shown: dict[str, dict[str, Measured]] = {"nobody asks": await ingress.measure(args.seconds)}
    answering = asyncio.create_task(ask_often(ingress.port, args.rate, args.seconds))
    label = f"{args.rate:g} requests a second"
    shown[label] = await ingress.measure(args.seconds)
    answered = await answering
    per_request = {
        name: (shown[label][name].core - idle.core) * args.seconds / answered
        for name, idle in shown["nobody asks"].items()
    }
    began = [asyncio.Event() for _ in range(args.requests)]
    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(ask(ingress.port, n, event)) for n, event in enumerate(began)]
        await asyncio.gather(*(event.wait() for event in began))
        shown[f"{args.requests:,} streams in hand"] = await ingress.measure(args.seconds)
        for each in asked:
            each.cancel()
    await asyncio.sleep(3.0)
    hosts.popen.send_signal(signal.SIGUSR1)  # every instance is at its limit from now on
    await asyncio.sleep(2.0)
    async with asyncio.TaskGroup() as group:
        measuring = group.create_task(ingress.measure(3.0))
        asked = [group.create_task(ask(ingress.port, n)) for n in range(args.requests)]
        held = 0
        while not measuring.done():
            await asyncio.sleep(0.4)
            with contextlib.suppress(OSError, ValueError):
                held = max(held, (await ingress.status())["held"])
        shown[f"{args.requests:,} come at once and wait ({held:,} held at most)"] = measuring.result()
        for each in asked:
            each.cancel()
    print("| | picker, % of a core | MiB | HAProxy, % of a core | MiB |\n| --- | ---: | ---: | ---: | ---: |")
    for phase, by_name in shown.items():
        picker, proxy = by_name["picker"], by_name["HAProxy"]
        print(f"| {phase} | {picker.core:.1%} | {picker.mib:.0f} | {proxy.core:.1%} | {proxy.mib:.0f} |")
    print(
        "CPU time of a request:",
        ", ".join(f"{name} {each * 1e6:.0f} µs" for name, each in per_request.items()),
    )
    own, theirs = await ingress.apply_s(members, CALLS)
    print(f"looking at HAProxy's servers once: {own * 1e3:.1f} ms here, {theirs * 1e3:.1f} ms in HAProxy")
    print(f"asking all hosts for their loads: {await loads_core(members, args.seconds):.1%} of a core")


@contextlib.asynccontextmanager
async def running(
    args: argparse.Namespace, folder: Path
) -> AsyncIterator[tuple[Ingress, Process, list[Member]]]:
    """Hosts and ingress, ready. Raises FailedError."""
    where = [str(args.hosts), str(args.instances)]
    hosts = Process(
        [sys.executable, "-m", "bench.fleet_hosts", *where], folder / "hosts.log", env=_PATHS, pipe=True
    )
    ingress: Process | None = None
    state, port, picker_port = folder / "state", free_port(), min(free_port(), 65000)
    try:
        assert hosts.popen.stdout is not None  # noqa: S101 - for the type
        ports = json.loads(await asyncio.to_thread(hosts.popen.stdout.readline) or "[]")
        members = [Member(host=f"host{n}", address=f"127.0.0.1:{each}") for n, each in enumerate(ports)]
        state.mkdir(mode=0o700)
        write_members(state / MEMBERS, MemberList(epoch=1, members=tuple(members)))
        config = folder / "fleet.toml"
        config.write_text(
            f'state = "{state}"\n[ingress]\nhosts = ["127.0.0.1"]\nlisten = "127.0.0.1:{port}"\n'
            f"picker_port = {picker_port}\n[hosts]\nmost = {max(200, args.hosts)}\n"
        )
        start = [sys.executable, "-m", "launcher", "fleet", "ingress", "-c", str(config)]
        ingress = Process(start, folder / "ingress.log", env=_PATHS)
        found = await _ready(ingress, Path(state), port, len(members))
        yield found, hosts, members
    finally:
        for process in filter(None, (ingress, hosts)):
            await asyncio.to_thread(process.end)
        with contextlib.suppress(OSError, ValueError):
            os.kill(int((state / "haproxy.pid").read_text()), signal.SIGTERM)


async def _ready(process: Process, state: Path, port: int, hosts: int) -> Ingress:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        process.check()
        with contextlib.suppress(OSError, ValueError):
            found = Ingress(state, port, process.popen.pid)
            shown = await found.status()
            up = sum(server["up"] and bool(server["key"]) for server in (shown["servers"] or {}).values())
            if up == sum(not host["lost"] for host in shown["hosts"].values()) == hosts:
                return found
        await asyncio.sleep(0.5)
    raise FailedError(f"the ingress does not know all hosts after {START_S:g} s: {process.last_words()}")


async def _measure(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-ingress-") as scratch:
        async with running(args, Path(scratch)) as (ingress, hosts, members):
            await run_phases(ingress, hosts, members, args)


def run(argv: Sequence[str]) -> int:
    """Measure and print. 1 when it could not be measured."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench-ingress",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=200, metavar="N")
    parser.add_argument(
        "--instances", type=int, default=4, metavar="N", help="of each host (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=2000, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rate", type=float, default=100.0, metavar="N", help="requests a second (default: %(default)g)"
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="of a phase (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    raise_limits()
    try:
        asyncio.run(_measure(args))
    except FailedError as failed:
        print(f"cannot measure the ingress: {failed}\n  what to do: look at its log", file=sys.stderr)
        return 1
    return 0
