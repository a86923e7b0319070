"""`numa-launcher bundle`: one archive for a bug report, without secrets."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli import options
from launcher.errors import LauncherError, reason

if TYPE_CHECKING:
    from launcher.cli.bundle_parts import Bundle
    from launcher.control.client import ControlClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_socket(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE",
        help='write the archive (tar.gz) to FILE; "-" is standard output (default: ./numa-launcher-bundle-TIME.tar.gz)',
    )  # fmt: skip
    parser.add_argument(
        "-n", "--lines", type=options.count, default=2000, metavar="N",
        help="include the last N lines of each log (default: 2000)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Write the archive and print its contents. Works without a daemon, too."""
    from launcher.cli.bundle_parts import collect  # noqa: PLC0415  heavy

    now = time.time()
    name = args.output or time.strftime("numa-launcher-bundle-%Y%m%d-%H%M%S.tar.gz", time.localtime(now))
    if name != "-":
        _check_free(Path(name))
    bundle = collect(_client(args), args.config or options.DEFAULT_CONFIG, args.lines, now)
    data = bundle.pack(now)
    if name == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        _write(Path(name), data)
    print(to_text(bundle, name, len(data)), file=sys.stderr if name == "-" else sys.stdout)
    return 0


def _client(args: argparse.Namespace) -> ControlClient:
    """An unusable configuration must not prevent a bundle."""
    try:
        return options.client_of(argparse.Namespace(**vars(args), json=True))
    except LauncherError:
        return options.client_of(argparse.Namespace(socket=options.DEFAULT_SOCKET, json=True))


def _check_free(file: Path) -> None:
    if file.exists():
        raise LauncherError(f"cannot write '{file}': the file exists", "choose another file with -o")


def _write(file: Path, data: bytes) -> None:
    try:
        # Mode 0600 and never overwriting a file: a bundle contains log lines.
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(fd, "wb") as opened:
                opened.write(data)
        except OSError:  # remove an incomplete bundle
            file.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise LauncherError(
            f"cannot write '{file}': {reason(error)}",
            "choose a file with -o in an existing, writable folder with free space",
        ) from None


def to_text(bundle: Bundle, name: str, size: int) -> str:
    from launcher.sizes import format_size  # noqa: PLC0415
    from launcher.text_table import counted, table  # noqa: PLC0415

    rows = [("FILE", "SIZE", "CONTENT")]
    rows += [(part.name, format_size(len(part.data)), part.what) for part in bundle.parts]
    lines = [*table(rows), ""]
    lines += [f"missing: {name}: {why}" for name, why in bundle.missing]
    lines.append(f"masked: {counted(bundle.masked, 'place')} that contained or looked like a secret")
    lines += [f"warning: {note}" for note in bundle.notes]
    lines += ["", f"wrote {'standard output' if name == '-' else name}: {format_size(size)}"]
    if name != "-":
        lines += [
            "Review it before you send it: names of models, users and files, and addresses are not masked.",
            f"    mkdir look && tar -xzf {name} -C look && less look/*/*.txt",
        ]
    return "\n".join(lines)
