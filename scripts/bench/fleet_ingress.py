"""The ingress of a fleet: HAProxy with its own configuration, and a picker that answers with each host in turn."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import uvloop

from launcher.errors import LauncherError
from launcher.fleet import haproxy
from launcher.fleet.config import FleetConfig, Hosts, Ingress
from launcher.fleet.members import Member
from launcher.fleet.spop import Value, serve

START_S = 10.0  # longest wait for HAProxy's admin socket
RETRY_S = 0.05


class _Ends(asyncio.DatagramProtocol):
    """Takes the lines about ends of requests."""

    def datagram_received(self, data: bytes, _: object) -> None:
        data.split()


async def _pick(picker_port: int, members: list[Member], folder: Path) -> None:
    hosts = itertools.cycle(member.host for member in members)

    async def answer(name: str, _: Mapping[str, Value]) -> Mapping[str, str]:
        return {"host": next(hosts), "slot": "0"} if name == "pick" else {}

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(reader, writer, answer)

    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(_Ends, ("127.0.0.1", picker_port + 1))
    async with await asyncio.start_server(connected, "127.0.0.1", picker_port):
        servers = haproxy.Servers(folder / "admin.sock")
        async with asyncio.timeout(START_S):
            while True:
                try:
                    await servers.apply(members)
                    break
                except LauncherError:
                    await asyncio.sleep(RETRY_S)
        await asyncio.Event().wait()


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
