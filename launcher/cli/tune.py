"""`numa-launcher tune`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, get_args

from launcher.base.errors import LauncherError, RefusedError, TimedOutError
from launcher.cli import options, reload
from launcher.cli.options import Output, add_machine
from launcher.control.client import ControlClient, UnreachableError
from launcher.daemon.deployment import build_deployment
from launcher.daemon.measured import fingerprint_of
from launcher.measure.bench import workloads
from launcher.measure.tune.apply import Applied, apply_layout
from launcher.measure.tune.model import Stack
from launcher.measure.tune.remembered import BestLayout, as_seen_by, choose, recall

if TYPE_CHECKING:
    from launcher.cli.tune_plan import Prepared
    from launcher.measure.tune.journal import Journal
    from launcher.measure.tune.model import Verdict, Visit, VisitResult
    from launcher.measure.tune.report import Report

# Options of a run: in its journal, and taken from there by --resume.
SAVED: Final = (
    "config", "overrides", "model", "strategy", "instances_per_socket", "reserve_cores", "kv_cache", "root", "snapshot",
    "machine", "workload", "slo", "budget", "stack", "gguf", "strategies", "instances", "measure", "stop_service", "seed",
    "repeats", "no_refine",
)  # fmt: skip
_PATHS: Final = ("config", "root", "snapshot", "gguf")
_DEFAULTS: Final = {"workload": workloads.DEFAULT, "slo": {}, "budget": 7200.0, "stack": [], "seed": 0}
_STRATEGIES: Final = ("interleaved", "contiguous", "l3-aligned", "per-node")
_STACKS: Final[tuple[str, ...]] = get_args(Stack)
INTERRUPTED: Final = 130
_AGAIN_S: Final = 0.05  # after a finalizer or a fork hook took the exception of a signal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config(parser)
    add_machine(parser)
    add = parser.add_argument
    names = tuple(workloads.all_workloads())
    add(
        "--workload", metavar="NAME", choices=names,
        help=f"measure with this workload: {', '.join(names)} (default: {workloads.DEFAULT})",
    )  # fmt: skip
    add(
        "--slo", metavar="LIMITS", type=options.Value("a list of limits such as ttft_p99=2s,itl_p99=150ms", _slo),
        help="rank by the requests per second that meet these limits, such as ttft_p99=2s,itl_p99=150ms",
    )  # fmt: skip
    add(
        "--budget", metavar="TIME", type=options.since,
        help="end the search after this time (default: 2h)",
    )  # fmt: skip
    for name, choices, read, what in (
        ("stack", _STACKS, _stack_names, f"measure each layout with these stacks: {', '.join(_STACKS)}"),
        ("strategies", _STRATEGIES, _names(_STRATEGIES), "try these strategies only, and the default"),
    ):
        wanted = f"a list of names such as {','.join(choices[:2])} (there are {', '.join(choices)})"
        add(f"--{name}", metavar="NAMES", type=options.Value(wanted, read), help=what)
    add(
        "--gguf", type=Path, metavar="FILE",
        help="the model as llama.cpp reads it, for --stack llama.cpp",
    )  # fmt: skip
    add(
        "--instances", metavar="NUMBERS",
        type=options.Value("a list of numbers such as 1,2,4", _numbers),
        help="try these instances per socket only, and the default",
    )  # fmt: skip
    add(
        "--measure", metavar="COMMAND",
        help="run COMMAND for each measurement, with the plan as JSON on standard input, and start no engine",
    )  # fmt: skip
    add(
        "--stop-service", action="store_true",
        help="stop numa-launcher.service; it is started again at the end, however tune ends",
    )  # fmt: skip
    add(
        "--resume", nargs="?", const="", metavar="RUN",
        help="continue the latest run, or RUN, with its options; nothing is measured twice",
    )  # fmt: skip
    add(
        "--apply", action="store_true",
        help="write the winner into the configuration and reload the service; without options of a run: "
        "apply the latest result",
    )  # fmt: skip
    add(
        "--repeats", metavar="N", type=options.Value("a number of 1 or more", options.whole(1)),
        help="measure N times in each visit (default: chosen from the noise that is seen)",
    )  # fmt: skip
    add(
        "--no-refine",
        action="store_true",
        help="do not vary max_num_seqs and max_num_batched_tokens of the best layout",
    )
    add(
        "--seed",
        metavar="N",
        type=options.count,
        help="set the seed of the search's order and prompts (default: 0)",
    )
    add("--state-dir", type=Path, metavar="DIR", help="keep the journal and the result in DIR")
    add("--json", action="store_true", help="print JSON; progress is printed on standard error")


def _slo(text: str) -> dict[str, float]:
    from launcher.measure.bench.offered_load import parse  # noqa: PLC0415  numpy

    return parse(text)


def _names(choices: tuple[str, ...]) -> Callable[[str], list[str]]:
    def read(text: str) -> list[str]:
        found = [word.strip() for word in text.split(",")]
        if not set(found) <= set(choices):
            raise ValueError
        return list(dict.fromkeys(found))

    return read


def _stack_names(text: str) -> list[str]:
    if "pace" in {word.strip() for word in text.split(",")}:
        # pace_vllm/__init__.py, _PACE_VLLM_SUPPORTED_VLLM_RANGE: beside another vLLM it registers nothing.
        raise LauncherError(
            "cannot use --stack 'pace': pace-vllm 1.3.0 turns itself off beside any vLLM but 0.25.0 to 0.28.0",
            f"give some of {', '.join(_STACKS)}; docs/engines.md has the needs of PACE",
        )
    return _names(_STACKS)(text)


def _numbers(text: str) -> list[int]:
    return sorted({options.whole(1)(word.strip()) for word in text.split(",")})


def run(args: argparse.Namespace) -> int:
    """Exit code 0: done. 1: no layout gave a figure, or the result could not be applied. 130: interrupted."""
    from launcher.base.files import make_folder, state_folder  # noqa: PLC0415  heavy

    state = state_folder(args.state_dir, os.environ, os.getuid())
    folder = make_folder(state / "tuning")
    _refuse_combinations(args)
    if (
        args.apply
        and args.resume is None
        and not any(_given(getattr(args, name)) for name in SAVED if name != "config")
    ):
        return apply_latest(args, state)
    from launcher.measure.tune.runner import only_run  # noqa: PLC0415  heavy

    with _signals(), only_run(folder / "lock"):
        return _tune(args, folder)


def _given(value: Any) -> bool:
    return value is not None and value is not False and value != []


def _refuse_combinations(args: argparse.Namespace) -> None:
    elsewhere = next(
        (name for name in ("root", "snapshot", "machine") if getattr(args, name) is not None), None
    )
    if elsewhere is not None and args.resume is None:
        if args.measure is None:
            raise LauncherError(
                f"cannot tune another machine: --{elsewhere} needs --measure",
                "add --measure 'COMMAND', or run tune there",
            )
        for name in ("stop_service", "apply"):
            if getattr(args, name):
                option = f"--{name.replace('_', '-')}"
                raise LauncherError(
                    f"cannot use {option} with --{elsewhere}", f"remove {option}: it is for this machine"
                )
    if args.apply and args.model is not None:
        raise LauncherError(
            "cannot use --apply with --model: there is no configuration file to write",
            "use -c FILE, or remove --apply",
        )


def _tune(args: argparse.Namespace, folder: Path) -> int:
    from launcher.cli.tune_plan import begin, prepare  # noqa: PLC0415  heavy
    from launcher.measure.tune.journal import Journal  # noqa: PLC0415  heavy
    from launcher.measure.tune.report import opening  # noqa: PLC0415  heavy

    journal = Journal.open(_run_folder(folder, args.resume)) if args.resume is not None else None
    if journal is not None:
        _restore(args, journal.began.options)
    for name, value in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    prepared = prepare(args, folder)
    if journal is not None:
        prepared.refuse_other(journal)
    out = Output(sys.stderr if args.json else sys.stdout)
    history = [] if journal is None else journal.history
    out.print(*opening(prepared.found, prepared.forecast(history), prepared.settings), *prepared.runs_as)
    if journal is not None and prepared.ended(history):  # the cores are not needed
        return _Run(args, prepared, journal, out).conclude(prepared.verdict(history), interrupted=False)
    with prepared.claim(stop=args.stop_service):
        if journal is None:
            journal = begin(prepared, _options(args))
        out.print(f"run {journal.began.id}; its journal: {journal.path}", "")
        return _Run(args, prepared, journal, out).perform()


def _run_folder(folder: Path, name: str) -> Path:
    from launcher.measure.tune.journal import FILE, newest  # noqa: PLC0415  heavy

    found = newest(folder) if not name else folder / name
    if found is None or not (found / FILE).is_file():
        runs = sorted((path.parent.name for path in folder.glob(f"*/{FILE}")), reverse=True)
        raise LauncherError(
            f"cannot resume '{name}': no such run in '{folder}'"
            if name
            else f"cannot resume: no run in '{folder}'",
            f"choose one of {', '.join(runs)}" if runs else "begin one without --resume",
        )
    return found


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """As JSON. Paths become absolute: a run may be resumed from another folder."""
    found: dict[str, Any] = {name: getattr(args, name) for name in SAVED}
    for name in _PATHS:
        found[name] = None if found[name] is None else str(found[name].absolute())
    for name in ("model", "machine"):  # either a name or a path
        if found[name] is not None and Path(found[name]).exists():
            found[name] = str(Path(found[name]).absolute())
    return found


def _restore(args: argparse.Namespace, saved: Mapping[str, Any]) -> None:
    """What is given again replaces the run's own, and must then be the same (launcher/measure/tune/identity.py)."""
    for name in SAVED:
        value = saved.get(name)
        if not _given(getattr(args, name)) and value is not None:
            setattr(args, name, Path(value) if name in _PATHS else value)


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the run in order; further ones do not disturb its clean-up."""
    from launcher.measure.tune.runner import StoppedError  # noqa: PLC0415  heavy

    asked = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os.write(2, b"stopping: engines end first\n")
            return
        asked = True
        raise StoppedError

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised in finalizers and fork hooks: the same signal a moment later ends the run."""
        nonlocal asked
        if not isinstance(found.exc_value, StoppedError):
            sys.__unraisablehook__(found)
            return
        asked = False
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    before = {number: signal.signal(number, stop) for number in numbers}
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)


class _Run:
    def __init__(self, args: argparse.Namespace, prepared: Prepared, journal: Journal, out: Output) -> None:
        self._args = args
        self._prepared = prepared
        self._journal = journal
        self._out = out

    def perform(self) -> int:
        verdict = self._prepared.runner(self._journal, self).run()
        return self.conclude(verdict, interrupted=not self._prepared.ended(self._journal.history))

    def began(self, visit: Visit) -> None:
        label = self._prepared.candidates[visit.candidate].label
        self._out.show(f"visit {visit.number} ({visit.purpose}): {label} ...")

    def ended(self, result: VisitResult) -> None:
        from launcher.measure.tune.report import visit_line  # noqa: PLC0415  heavy

        its = self._prepared
        candidate = its.candidates[result.visit.candidate]
        self._out.print(visit_line(result, candidate, its.forecast(self._journal.history)))

    def conclude(self, verdict: Verdict, *, interrupted: bool) -> int:
        from launcher.measure.tune.apply import layout_toml  # noqa: PLC0415  heavy

        its = self._prepared
        report = its.report(verdict, self._journal)
        self._out.print(*report.lines(layout_toml))
        applied: dict[str, Any] | None = None
        try:
            if interrupted:
                self._out.print(f"numa-launcher tune --resume {self._journal.began.id} continues")
                return INTERRUPTED
            best = its.remember(self._journal, verdict)
            if self._args.apply and best is not None:
                file = file_of(self._args)
                applied = apply(best, its.config.control.socket, file, self._out)
            return int(verdict.winner is None or (applied is not None and not applied["in_use"]))
        finally:  # the figures are not lost when the disk is full
            self._print_json(report, applied)

    def _print_json(self, report: Report, applied: dict[str, Any] | None) -> None:
        if self._args.json:
            found = {"run": self._journal.began.id, **report.to_json()}
            print(
                json.dumps(found if applied is None else {**found, "applied": applied}, indent=2), flush=True
            )


# --- `tune --apply`: the measured layout into the configuration file, and from there into the running service.

_POLL_S: Final = 0.5
_UNDER_WAY: Final = frozenset({"running", "rolling back"})


def file_of(args: argparse.Namespace) -> Path:
    return args.config or options.default_config()


def apply_latest(args: argparse.Namespace, state: Path) -> int:
    """Apply the remembered result for this configuration's model. Exit code 1: the service does not use it."""
    config = options.config_of(args)
    today = fingerprint_of(build_deployment(config))
    best = choose(recall(state), today)
    if best is None:
        raise LauncherError(
            f"cannot apply a layout: no finished run in '{state}'",
            "run numa-launcher tune, then tune --apply",
        )
    best, changed = as_seen_by(today, best)
    if changed:
        raise RefusedError(
            f"cannot apply the layout of run '{best.run}': changed since: {'; '.join(changed)}",
            "run numa-launcher tune again",
        )
    out = Output(sys.stderr if args.json else sys.stdout)
    applied = apply(best, config.control.socket, file_of(args), out)
    if args.json:
        print(json.dumps({"run": best.run, "applied": applied}, indent=2))
    return int(not applied["in_use"])


def apply(best: BestLayout, socket: str, file: Path, out: Output) -> dict[str, Any]:
    """What was done, as JSON. `in_use` is False when a running daemon did not take the layout. Raises LauncherError."""
    found: dict[str, Any] = {"file": str(file), "changed": [], "kept": None, "reload": None, "in_use": True}
    if not best.different:
        out.print("nothing to apply: no layout differs from the default")
        return found
    applied = apply_layout(file, best.layout, now=datetime.now(UTC))
    found |= {"changed": list(applied.changed), "kept": None if applied.kept is None else str(applied.kept)}
    if applied.kept is None:
        out.print(f"{file}: has the layout already")
    else:
        out.print(
            f"{file}: written; the old file is {applied.kept}", *(f"  {line}" for line in applied.changed)
        )
    try:
        stage, text = _reload(ControlClient(socket))
    except TimedOutError:  # the reload may have begun
        raise
    except LauncherError:
        _put_back(applied, out)
        raise
    found |= {"reload": stage, "in_use": stage in {"done", "not running"}}
    out.print(text)
    if stage == "rolled back":
        _put_back(applied, out)
    return found


def _reload(client: ControlClient) -> tuple[str, str]:
    """The stage that it ended in, and a line for people."""
    try:
        changes = client.post("/reload?dry_run=1", reload.BEGIN_S)["changes"]
    except UnreachableError:
        return "not running", "no daemon is running: the next start uses the layout"
    if changes["needs_restart"]:
        keys = ", ".join(changes["needs_restart"])
        return "restart needed", f"only a restart applies {keys}: systemctl restart numa-launcher"
    now = client.post("/reload", reload.BEGIN_S)
    while now["stage"] in _UNDER_WAY:
        time.sleep(_POLL_S)
        now = client.get("/reload")
    return str(now["stage"]), "reload: " + "\n".join(reload.outcome_lines(now))


def _put_back(applied: Applied, out: Output) -> None:
    """The service kept its old layout; so does the file."""
    if applied.kept is not None:
        applied.kept.replace(applied.file.resolve())
        out.print(f"{applied.file}: restored")
