"""`numa-launcher plan`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from launcher.base.errors import LauncherError, reason
from launcher.base.redaction import Redactor
from launcher.base.text import table
from launcher.cli import options
from launcher.cli.options import add_machine, machine_of

if TYPE_CHECKING:
    from launcher.config.schema import Config
    from launcher.daemon.deployment import Deployment
    from launcher.machine.topology import Topology

# Placeholder for the model of a plan of cpus only; it appears in the commands of --shell.
_NO_MODEL: Final[dict[str, Any]] = {"models": [{"name": "MODEL", "path": "MODEL"}]}
_WIDTH: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config(parser)
    add_machine(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--shell", action="store_true", help="print the shell commands that start each instance"
    )
    form.add_argument(
        "--picture", action="store_true", help="draw the machine even when the output is not a terminal"
    )
    parser.add_argument(
        "--ask-engine", action="store_true",
        help="ask the installed vLLM what each model needs, and keep its answers (the first takes some 20 seconds)",
    )  # fmt: skip
    parser.add_argument("--compare", action="store_true", help="compare all strategies side by side")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also write a drawing of the plan to FILE")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto",
        help="use colours in the drawing (default: auto)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Print the plan. Exit code 1 when it has violations and `serve` would refuse it."""
    other = machine_of(args)
    # No model is needed to try layouts on another machine.
    cpus_only = other is not None and args.config is None and args.model is None
    config = options.config_of(args, base=_NO_MODEL if cpus_only else None)
    if args.compare:
        return _compare(args, config, other, cpus_only=cpus_only)
    from launcher.daemon.deployment import ASKED, NOT_ASKING, build_deployment, was_tuned  # noqa: PLC0415  heavy

    asking = ASKED if args.ask_engine else NOT_ASKING
    deployment = build_deployment(config, machine=other, cpus_only=cpus_only, asking=asking)
    if other is None and was_tuned():
        from launcher.daemon.measured import with_measured_layout  # noqa: PLC0415  heavy

        deployment = with_measured_layout(deployment)
    if args.json:
        print(json.dumps(deployment.to_json(), indent=2))
    elif args.shell:
        _print_shell(deployment)
    else:
        _print_text(args, deployment)
    if args.svg is not None:
        from launcher.machine.svg import to_svg  # noqa: PLC0415  heavy

        write_file(args.svg, to_svg(deployment.picture(), deployment.headline).encode())
    return 1 if deployment.plan.violations else 0


def _print_text(args: argparse.Namespace, deployment: Deployment) -> None:
    from launcher.plan import plan_text  # noqa: PLC0415  heavy

    terminal = sys.stdout.isatty()
    color = args.color == "always" or (
        args.color == "auto"
        and terminal
        and "NO_COLOR" not in os.environ
        and os.environ.get("TERM") != "dumb"
    )
    if args.picture or terminal or args.color == "always":
        from launcher.machine.picture import draw  # noqa: PLC0415  heavy

        width = shutil.get_terminal_size((_WIDTH, 24)).columns
        print(draw(deployment.picture(), width=width, color=color), end="\n\n")
    redactor = Redactor()  # findings quote configured values
    print(redactor.text(plan_text.to_text(deployment.plan, deployment.topology)))
    if deployment.measured is not None:
        print(f"\n{redactor.text(deployment.measured.text)}")
    for warning in filter(None, (deployment.binding.warning, *deployment.stack.warnings)):
        print(f"warning: {redactor.text(warning)}")


def _print_shell(deployment: Deployment) -> None:
    from launcher.engines.base import shell_lines  # noqa: PLC0415  heavy
    from launcher.plan import plan_text  # noqa: PLC0415  heavy

    for slot in deployment.plan.slots:
        sockets, nodes = plan_text.sockets_text(slot, deployment.topology), plan_text.nodes_text(slot)
        print(f"# slot {slot.id}: {slot.model.name} on socket {sockets}, node {nodes}")
        launch = deployment.engine.launch(slot, generation=1)
        print(shell_lines(launch, deployment.config.engine.hf_token_file))


def _compare(args: argparse.Namespace, config: Config, other: Topology | None, *, cpus_only: bool) -> int:
    from launcher.daemon.deployment import compare_strategies  # noqa: PLC0415  heavy
    from launcher.plan import comparison  # noqa: PLC0415  heavy

    if args.shell or args.picture or args.svg is not None:
        raise LauncherError(
            "cannot use --compare with --shell, --picture or --svg: these show a single plan",
            "remove --compare and choose one strategy with --strategy NAME",
        )
    columns = compare_strategies(config, machine=other, cpus_only=cpus_only)
    if args.json:
        print(json.dumps(comparison.to_json(columns), indent=2))
    else:
        head = ["", *(column.plan.strategy.value for column in columns)]
        print("\n".join(table([head, *comparison.rows(columns)])))
        notes = comparison.notes(columns)
        print("\n".join(["", *notes]) if notes else "", end="\n" if notes else "")
    return 1 if all(column.plan.violations for column in columns) else 0


def write_file(file: Path, data: bytes) -> None:
    try:
        file.write_bytes(data)
    except OSError as error:
        raise LauncherError(
            f"cannot write '{file}': {reason(error)}", "choose a file in an existing, writable folder"
        ) from None
