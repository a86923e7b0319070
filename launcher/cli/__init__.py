"""The command line: one module per verb. Heavy imports are inside the verbs, so that `--help` is fast."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Final

import launcher
from launcher.base.errors import LauncherError
from launcher.base.text import printable_lines
from launcher.cli import streams
from launcher.cli.options import Parser
from launcher.control.messages import SUMMARY

# Verb -> (module, help). Each module has `add_arguments(parser)` and `run(args) -> exit code`.
VERBS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("serve", "run the daemon: start the instances and serve the OpenAI endpoint"),
    "plan": ("plan", "print which instances `serve` would start, and on which cores and memory"),
    "topology": ("topology", "print the sockets, NUMA nodes, caches and cores of the machine"),
    "status": ("status", "print the state of the daemon and of each slot"),
    "top": ("top", "show the state of the slots and the load of the cores, refreshed continuously"),
    "dashboard": (
        "dashboard",
        "serve a page that shows the machine, its instances, its load and its history",
    ),
    **{str(command): ("slot_verbs", summary) for command, summary in SUMMARY.items()},
    "reload": ("reload", "reload the configuration and apply it, one slot at a time"),
    "scale": ("reload", "change the number of instances per socket, one slot at a time"),
    "why": ("why", "print why the last instance of a slot failed, or what became of a request, step by step"),
    "events": ("events", "print recent actions of the daemon and commands of operators"),
    "logs": ("logs", "print the latest log lines of a slot's instance"),
    "verify": ("verify", "compare the actual cpus and memory of running instances with the plan"),
    "usage": (
        "usage",
        "print what was served: requests, tokens, latencies, by key, model, instance, day or hour",
    ),
    "bench": ("bench", "measure an endpoint: throughput, latencies and goodput"),
    "tune": ("tune", "find the layout that makes this machine fastest, by measuring it"),
    "cost": ("cost", "print what a token costs on this machine, and compare with APIs"),
    "key": ("key", "create, list and revoke API keys"),
    "audit": ("audit", "verify the audit trail, and print its anchors"),
    "fleet": ("fleet", "run several hosts behind one endpoint"),
    "bundle": (
        "bundle",
        "collect logs, status and configuration, without secrets, in one file for a bug report",
    ),
    "doctor": ("doctor", "check whether the host and its software are ready to serve"),
    "quickstart": ("quickstart", "start a model with default settings and send it one chat request"),
}

_EXIT_CODES: Final = (
    "Exit codes: 0 done; 1 negative result; 2 the operator must change something; 3 no answer in time; 4 standard output "
    "could not be written; 130 interrupted; 141 the reader of the output has gone."
)


def build_parser(only: str | None = None) -> Parser:
    """The parser; only the verb `only` has its arguments, or all verbs when it is None."""
    parser = Parser(
        prog="numa-launcher",
        description="Serve one OpenAI endpoint from NUMA-pinned vLLM instances.",
        allow_abbrev=False,
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "--version", action="version", version=f"numa-launcher {launcher.__version__}",
        help="print the version and exit",
    )  # fmt: skip
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    for verb, (module, summary) in VERBS.items():
        text = f"{summary[:1].upper()}{summary[1:]}."
        sub = verbs.add_parser(verb, help=summary, description=text, allow_abbrev=False)
        if only in {None, verb}:
            importlib.import_module(f"launcher.cli.{module}").add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit code 0: done. 1: done, with a negative result. 2: the user must change something. 3: no answer
    in time. 4: standard output could not be written. 130: interrupted. 141: the reader of the output has gone."""
    return streams.guarded(lambda: _run(sys.argv[1:] if argv is None else list(argv)))


def _run(arguments: list[str]) -> int:
    try:
        verb = next((word for word in arguments if word in VERBS), None)
        args = build_parser(only=verb or "").parse(arguments)
        module = importlib.import_module(f"launcher.cli.{VERBS[args.verb][0]}")
        code: int = module.run(args)
    except (LauncherError, KeyboardInterrupt) as error:
        return told(error)
    return code


def told(error: BaseException) -> int:
    """Print why a verb failed; its exit code."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, LauncherError):
        _print_error(error.message)
        _print_error(error.remedy)
        return error.exit_code
    import traceback  # noqa: PLC0415  heavy

    traceback.print_exception(error)
    return 1


def _print_error(text: str) -> None:
    """Masked and printable: errors quote configuration and input, and may be written to the journal."""
    from launcher.base.redaction import Redactor  # noqa: PLC0415  only here

    print(printable_lines(Redactor().text(text)), file=sys.stderr)
