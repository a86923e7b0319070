"""The command line: one module per verb, heavy imports inside the verb."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

import launcher
from launcher.cli.parser import Parser
from launcher.errors import LauncherError
from launcher.printable import printable_lines

# Verb -> (module, one line of help). Each module has `add_arguments(parser)` and `run(args) -> exit code`.
VERBS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("serve", "run the daemon: plan, start the instances, serve the endpoint"),
    "plan": ("plan", "print what `serve` would do on this machine"),
    "topology": ("topology", "print what the machine is"),
    "status": ("status", "print what the daemon and its slots are doing"),
    "top": ("top", "watch all that on the whole terminal, with a picture of the machine"),
    "restart": ("slot_verbs", "take a slot out of rotation, wait for its requests, stop and start it again"),
    "drain": ("slot_verbs", "take a slot out of rotation and keep its instance alive"),
    "resume": ("slot_verbs", "put a drained slot back into rotation"),
    "stop": ("slot_verbs", "drain a slot, stop its instance and leave it stopped"),
    "start": ("slot_verbs", "start a stopped or failed slot"),
    "hold": ("slot_verbs", "drain a slot, stop its instance and keep it stopped until `release`"),
    "quarantine": (
        "slot_verbs",
        "take a slot out of rotation and keep its instance alive for a look, until `release`",
    ),
    "release": ("slot_verbs", "end a hold or a quarantine"),
    "reload": ("reload", "read the configuration again and go there, one slot at a time"),
    "scale": ("reload", "run N instances per socket, one slot changing at a time"),
    "why": ("why", "say why a slot's instance ended: cause, evidence, remedy, and its last lines"),
    "events": ("events", "print what the daemon did and what was asked of it"),
    "logs": ("logs", "print the last lines of a slot's instance"),
    "verify": ("verify", "look where a slot's threads and pages really are"),
    "key": ("key", "make, list and revoke the API keys of applications"),
    "bundle": ("bundle", "pack what a bug report needs into one file, without secrets"),
    "doctor": ("doctor", "look at the host and the software before anything starts"),
    "quickstart": ("quickstart", "plan, start, show progress, answer one chat, show the result"),
}


def build_parser(only: str | None = None) -> Parser:
    """The whole parser; arguments are filled in for the verb `only`, or for all when it is None."""
    parser = Parser(
        prog="numa-launcher",
        description="One OpenAI endpoint over NUMA-pinned vLLM instances.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"numa-launcher {launcher.__version__}")
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for verb, (module, summary) in VERBS.items():
        text = f"{summary[:1].upper()}{summary[1:]}."
        sub = verbs.add_parser(verb, help=summary, description=text, allow_abbrev=False)
        if only in {None, verb}:
            importlib.import_module(f"launcher.cli.{module}").add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. 0: done. 1: done, and the answer is no. 2: a person has to change something. 3: no answer in time."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    verb = next((word for word in arguments if word in VERBS), None)
    args = build_parser(only=verb or "").parse(arguments)
    module = importlib.import_module(f"launcher.cli.{VERBS[args.verb][0]}")
    try:
        code: int = module.run(args)
        sys.stdout.flush()
    except LauncherError as error:
        _print_error(error.message)
        _print_error(error.remedy)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        with contextlib.suppress(OSError):  # `numa-launcher logs 0 | head`: no traceback at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _print_error(text: str) -> None:
    """Errors quote what was configured and what others wrote; a daemon's go to the journal."""
    from launcher.redaction import Redactor  # noqa: PLC0415  only here

    print(printable_lines(Redactor().text(text)), file=sys.stderr)
