"""`numa-launcher topology` and `numa-launcher topology snapshot`."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from pathlib import Path

import launcher
from launcher.base.errors import LauncherError
from launcher.cli import options
from launcher.cli.plan import write_file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "action",
        nargs="?",
        choices=("snapshot",),
        help="write the description of this machine to the file given with -o; `plan --snapshot` reads it",
    )
    options.add_machine(parser)
    add("-o", "--output", type=Path, metavar="FILE", help="write the snapshot to this file (tar.gz)")
    add("--json", action="store_true", help="print JSON")
    add("--svg", type=Path, metavar="FILE", help="also write a drawing of the machine to FILE")


def run(args: argparse.Namespace) -> int:
    """Print the machine, or save a snapshot. Exit code 1 for a snapshot of a machine that could not be read."""
    if args.action == "snapshot":
        return _snapshot(args)
    if args.output is not None:
        raise LauncherError(
            "cannot use -o: it needs the action snapshot", "numa-launcher topology snapshot -o FILE"
        )
    from launcher.machine import sysfs, topology_text  # noqa: PLC0415  heavy

    topology = options.machine_of(args) or sysfs.read()
    if args.svg is not None:
        from launcher.machine.picture import make_picture  # noqa: PLC0415  heavy
        from launcher.machine.svg import to_svg  # noqa: PLC0415  heavy

        write_file(args.svg, to_svg(make_picture(topology)).encode())
    print(
        json.dumps(topology_text.to_json(topology), indent=2)
        if args.json
        else topology_text.to_text(topology)
    )
    return 0


def _snapshot(args: argparse.Namespace) -> int:
    from launcher.machine import snapshot  # noqa: PLC0415  heavy

    if args.output is None:
        raise LauncherError(
            "cannot save a snapshot: -o is missing", "numa-launcher topology snapshot -o FILE"
        )
    if args.machine is not None or args.snapshot is not None or args.json or args.svg is not None:
        raise LauncherError(
            "cannot save a snapshot with --machine, --snapshot, --json or --svg: it contains files of /sys and /proc",
            "remove them; --root DIR selects another tree of files",
        )
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    taken = snapshot.capture(args.root or Path("/"), date=today, version=launcher.__version__)
    write_file(args.output, taken.data)
    print(f"wrote {args.output}: {len(taken.data):,} bytes; use it with --snapshot {args.output}")
    if taken.error is None:
        return 0
    print(
        f"reading the snapshot gives this error:\n{taken.error.message}\n{taken.error.remedy}",
        file=sys.stderr,
    )
    return 1
