"""Plays the failures of a fleet under load and counts what the clients see.

    scripts/fleet-drill [--rows NAME,...] [--clients N] [--seed N] [--json FILE] [--keep DIR]

Four hosts as namespaces of this machine, each with a real daemon; two of them with HAProxy, two with real vLLM. Needs
root, haproxy, iproute2 and vLLM. One line per failure; exit status 1 if a bound is broken: an answer is whole, or left by
its client, or ends in an honest error; a planned action fails no request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet_hosts import rows
from fleet_hosts.fleet import Fleet
from fleet_hosts.hosts import command
from fleet_hosts.load import End, Load
from fleet_hosts.verdict import Row, line

# Between two failures: the fleet is whole again, and every request of this time must be.
CALM_S = 2.0


class Drill:
    """One run."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.fleet = Fleet(
            folder, args.token_s, with_ray=not args.without_ray, with_vllm=not args.without_vllm
        )

    async def run(self, names: list[str]) -> list[dict[str, Any]]:
        began = time.monotonic()
        await asyncio.to_thread(self.fleet.start)
        print(
            f"fleet of {len(self.fleet.hosts)} hosts started in {time.monotonic() - began:.1f} s", flush=True
        )
        spoke = await asyncio.to_thread(self.fleet.learn)
        self.load = Load(self.fleet.addresses(), self.args.clients, self.args.seed, self.args.token_s, spoke)
        told: list[dict[str, Any]] = []
        calm = Row("nothing fails", time.monotonic())
        async with asyncio.TaskGroup() as group:
            self.load.start(group)
            await asyncio.sleep(CALM_S)
            for name in names:
                calm.ended = time.monotonic()
                told.append(await self._one(calm.judge, line_too=calm.name == "nothing fails"))
                row = Row(name, time.monotonic())
                try:
                    await rows.ROWS[name](rows.Stage(self.fleet, self.load, row))
                except Exception as error:
                    row.broken.append(f"{type(error).__name__}: {error}")
                row.ended = time.monotonic()
                told.append(await self._one(row.judge))
                calm = Row(f"after {name}", row.ended)
                await asyncio.sleep(CALM_S)
            await self.load.stop()
        calm.ended = time.monotonic()
        told.append(await self._one(calm.judge, line_too=False))
        return told

    async def _one(self, judge: Callable[..., dict[str, Any]], *, line_too: bool = True) -> dict[str, Any]:
        found = judge(self.load.outcomes)
        if line_too or found["broken"]:
            print(line(found), flush=True)
        return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/fleet-drill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", default=",".join(rows.ROWS), help="which failures, in this order")
    parser.add_argument("--clients", type=int, default=32, metavar="N")
    parser.add_argument(
        "--token-s", type=float, default=0.04, metavar="S", help="an engine's time for a token"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    parser.add_argument("--without-ray", action="store_true", help="leave out the failures of Ray")
    parser.add_argument("--without-vllm", action="store_true", help="stand-ins on all hosts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs and state in DIR")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    names = [name for name in args.rows.split(",") if name]
    if args.without_ray:
        names = [name for name in names if name not in rows.OF_RAY]
    if unknown := set(names) - rows.ROWS.keys():
        print(f"unknown rows {', '.join(sorted(unknown))}; there are {', '.join(rows.ROWS)}", file=sys.stderr)
        return 2
    # In the mounts of this process's own: nothing stays on the disk, however it ends.
    command("mount", "-t", "tmpfs", "drill", "/mnt")
    with tempfile.TemporaryDirectory(prefix="d", dir="/mnt") as folder:
        try:
            told = asyncio.run(Drill(Path(folder), args).run(names))
        finally:
            if args.keep is not None:
                shutil.copytree(folder, args.keep, dirs_exist_ok=True, ignore=_no_sockets)
    planned = [row for row in told if row["name"] in rows.PLANNED]
    failed = sum(row[end] for row in planned for end in (End.CUT, End.TOLD, End.FAILED))
    dishonest = sum(row[End.DISHONEST] for row in told)
    total = sum(row["requests"] for row in told)
    real = sum(row["real"] for row in told)
    print(f"{total} requests, {real} to vLLM; planned actions: {failed} failed; dishonest: {dishonest}")
    if args.json is not None:
        args.json.write_text(json.dumps(told, indent=1))
    return 1 if any(row["broken"] for row in told) else 0


def _no_sockets(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_socket()]


if __name__ == "__main__":
    sys.exit(main())
