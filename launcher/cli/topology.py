"""`numa-launcher topology` and `numa-launcher topology snapshot`."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from pathlib import Path

import launcher
from launcher.cli import machine
from launcher.cli.plan import write_file
from launcher.errors import LauncherError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which machine, and the form of the answer."""
    parser.add_argument(
        "action",
        nargs="?",
        choices=("snapshot",),
        help="pack what is read into the file of -o, for --snapshot",
    )
    machine.add_machine(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where `snapshot` writes (tar.gz)")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the machine into FILE")


def run(args: argparse.Namespace) -> int:
    """Print the machine, or pack it. Exit code 1 for a snapshot of a machine that could not be read."""
    if args.action == "snapshot":
        return _snapshot(args)
    if args.output is not None:
        raise LauncherError("cannot use -o: nothing is packed", "numa-launcher topology snapshot -o FILE")
    from launcher.topology import render, sysfs  # noqa: PLC0415  heavy

    topology = machine.machine_of(args) or sysfs.read()
    if args.svg is not None:
        from launcher.topology.picture import make_picture  # noqa: PLC0415  heavy
        from launcher.topology.svg import to_svg  # noqa: PLC0415  heavy

        write_file(args.svg, to_svg(make_picture(topology)).encode())
    print(json.dumps(render.to_json(topology), indent=2) if args.json else render.to_text(topology))
    return 0


def _snapshot(args: argparse.Namespace) -> int:
    from launcher.topology import snapshot  # noqa: PLC0415  heavy

    if args.output is None:
        raise LauncherError(
            "cannot pack a snapshot: no file is named", "numa-launcher topology snapshot -o FILE"
        )
    if args.machine is not None or args.snapshot is not None or args.json or args.svg is not None:
        raise LauncherError(
            "cannot pack a snapshot with --machine, --snapshot, --json or --svg: it is made of files that are read",
            "leave them out; --root DIR names another tree",
        )
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    taken = snapshot.capture(args.root or Path("/"), date=today, version=launcher.__version__)
    write_file(args.output, taken.data)
    print(f"wrote {args.output}: {len(taken.data):,} bytes; see it with --snapshot {args.output}")
    if taken.error is None:
        return 0
    print(f"the snapshot replays this error:\n{taken.error.message}\n{taken.error.remedy}", file=sys.stderr)
    return 1
