"""Options that select another machine than this one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.topology.model import Topology


def add_machine(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--root", type=Path, metavar="DIR", help="read /sys and /proc of another machine under DIR"
    )
    which.add_argument(
        "--snapshot", type=Path, metavar="FILE",
        help="read the machine that `topology snapshot` saved in FILE",
    )  # fmt: skip
    which.add_argument(
        "--machine",
        metavar="NAME",
        help="use a built-in machine such as epyc-9755-2p, or a .toml file that describes one",
    )


def machine_of(args: argparse.Namespace) -> Topology | None:
    """The machine that the options select; None for this one. Raises LauncherError."""
    if args.machine is not None:
        from launcher.topology.machines import find_topology  # noqa: PLC0415  heavy

        return find_topology(args.machine)
    if args.snapshot is not None:
        from launcher.topology.snapshot import read_snapshot  # noqa: PLC0415  heavy

        return read_snapshot(args.snapshot)
    if args.root is None or args.root == Path("/"):
        return None
    from launcher.topology import sysfs  # noqa: PLC0415  heavy

    return sysfs.read(args.root)
