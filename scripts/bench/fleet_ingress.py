"""The ingress of a fleet: HAProxy with its own configuration, and the picker, with engines in place of daemons."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from launcher.base.errors import LauncherError
from launcher.fleet import haproxy
from launcher.fleet.config import FleetConfig, Hosts, Ingress
from launcher.fleet.ingress import TURN_S
from launcher.fleet.loads import HostLoad, InstanceLoad
from launcher.fleet.members import Member
from launcher.fleet.spoe import Decisions, Value, serve

RETRY_S = 0.05
MODEL = "m"  # of the load generator's requests


class _Counted(Decisions):
    """The real picker, and how many requests each host has: what a daemon's `GET /load` would tell."""

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__()
        self.peers = frozenset({"127.0.0.1"})
        self._where: dict[str, str] = {}
        self._running = dict.fromkeys(hosts, 0)
        self.picker.serve(dict.fromkeys(hosts, False), asyncio.get_running_loop().time())

    async def handle(self, message: str, arguments: Mapping[str, Value]) -> Mapping[str, str]:
        answer = await super().handle(message, arguments)
        if "host" in answer:
            self._where[str(arguments["id"])] = answer["host"]
            self._running[answer["host"]] += 1
        return answer

    def datagram_received(self, data: bytes, address: tuple[Any, ...]) -> None:
        if host := self._where.pop(data.split()[1].decode(), None):
            self._running[host] -= 1
        super().datagram_received(data, address)

    def report_all(self) -> None:
        for host, running in self._running.items():
            instance = InstanceLoad(
                slot=0,
                generation=1,
                model=MODEL,
                ready=True,
                running=running,
                waiting=0,
                concurrency_limit=256,
            )
            load = HostLoad(running=running, waiting=0, instances=(instance,))
            self.report(host, load, asyncio.get_running_loop().time())


async def _pick(picker_port: int, members: list[Member], folder: Path) -> None:
    decisions = _Counted([member.host for member in members])
    servers = haproxy.Servers(folder / "admin.sock")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer, decisions.handle)

    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(lambda: decisions, ("127.0.0.1", picker_port + 1))
    async with await asyncio.start_server(connected, "127.0.0.1", picker_port):
        while True:
            decisions.report_all()
            try:
                await servers.apply(members)
                await asyncio.sleep(TURN_S)
            except LauncherError:  # HAProxy starts
                await asyncio.sleep(RETRY_S)


def main() -> None:
    """Its CPU time is that of both, or with --apart of HAProxy alone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--picker-port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--only-picker", action="store_true")
    parser.add_argument("engines", nargs="+", type=int, metavar="PORT")
    args = parser.parse_args()
    members = [Member(host=f"host{n}", address=f"127.0.0.1:{port}") for n, port in enumerate(args.engines)]
    if not args.only_picker:
        ingress = Ingress(hosts=("127.0.0.1",), listen=f"127.0.0.1:{args.port}", picker_port=args.picker_port)
        config = FleetConfig(ingress=ingress, hosts=Hosts(most=200))
        for name, text in haproxy.files(config, exporter=False).items():
            (args.folder / name).write_text(text)
        os.chdir(args.folder)
        start = [haproxy.binary(), "-db", "-f", "haproxy.cfg"]
        if args.apart:
            # No child of HAProxy, which this process becomes: the shell between them ends.
            again = [sys.executable, "-m", "bench.fleet_ingress", *sys.argv[1:], "--only-picker"]
            subprocess.run(["/bin/sh", "-c", '"$@" &', "sh", *again], check=True)
            os.execv(start[0], start)  # noqa: S606
        subprocess.Popen(start)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    uvloop.run(_pick(args.picker_port, members, args.folder))


if __name__ == "__main__":
    main()
