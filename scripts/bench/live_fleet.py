"""Several daemons' proxies behind the ingress of a fleet, on one machine: its picker and a real HAProxy.

    python -m bench.live_fleet --listen PORT --folder DIR --hosts N ENGINE...

The engines, as bench.ours takes them, are divided among the hosts. Ends with SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Final

from bench.processes import free_port
from launcher.fleet.config import FleetConfig, Hosts
from launcher.fleet.config import Ingress as IngressConfig
from launcher.fleet.ingress import Ingress
from launcher.fleet.members import Member, MemberList, write_members

RETRY_S: Final = 0.05


async def _serve(args: argparse.Namespace) -> None:
    each = len(args.engines) // args.hosts
    ports = [free_port() for _ in range(args.hosts)]
    daemons = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.ours", "--listen", f"127.0.0.1:{port}", "--max-num-seqs", "32",
            "--access-log", "off", "--trusted-proxies", "127.0.0.1/32",
            *args.engines[number * each : (number + 1) * each],
        )
        for number, port in enumerate(ports)
    ]  # fmt: skip
    await asyncio.gather(*(_listens(port) for port in ports))
    members = tuple(Member(host=f"host{n}", address=f"127.0.0.1:{port}") for n, port in enumerate(ports))
    config = FleetConfig(
        state=str(args.folder),
        ingress=IngressConfig(hosts=("127.0.0.1",), listen=f"127.0.0.1:{args.listen}", picker_port=_ports()),
        hosts=Hosts(most=args.hosts),
    )
    args.folder.mkdir(mode=0o700)
    write_members(args.folder / "members.json", MemberList(epoch=1, members=members))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ingress = asyncio.create_task(Ingress(config).run(), name="ingress")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({ingress, stopped}, return_when=asyncio.FIRST_COMPLETED)
    ingress.cancel()
    for daemon in daemons:
        daemon.terminate()
    await asyncio.gather(ingress, return_exceptions=True)
    # The ingress leaves HAProxy running.
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((args.folder / "haproxy.pid").read_text()), signal.SIGTERM)


async def _listens(port: int) -> None:
    """Returns when it does: the ingress asks a silent host again after a second, and sends it nothing until then."""
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(RETRY_S)


def _ports() -> int:
    """The first of three ports in a row, probably free."""
    return min(free_port(), 65000)


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m bench.live_fleet", description=__doc__)
    parser.add_argument("--listen", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("engines", nargs="+")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
