"""`numa-launcher doctor`."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--config", type=Path, metavar="FILE",
        help="check the engine of this configuration file (default: vllm)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print every check and the performance tier. Exit code 1 when a check fails."""
    from launcher.base.redaction import Redactor  # noqa: PLC0415  heavy
    from launcher.config.loading import load_config  # noqa: PLC0415  heavy
    from launcher.config.schema import Engine  # noqa: PLC0415  heavy
    from launcher.doctor.checks import examine  # noqa: PLC0415  heavy
    from launcher.doctor.gather import gather, read_matrix  # noqa: PLC0415  heavy
    from launcher.doctor.rows import to_json, to_text  # noqa: PLC0415  heavy

    engine = Engine() if args.config is None else load_config(args.config, environ=os.environ).engine
    report = examine(gather(engine), read_matrix())
    redactor = Redactor()
    print(
        json.dumps(redactor.tree(to_json(report)), indent=2) if args.json else redactor.text(to_text(report))
    )
    return 1 if report.failed else 0
