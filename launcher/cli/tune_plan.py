"""What a tuning run needs before its first visit: configuration, candidates, settings, and what measures them."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError, RefusedError
from launcher.cli import options
from launcher.cli.bench_target import driver_for, physical
from launcher.cli.options import machine_of
from launcher.config.schema import Config, Runtime, Strategy
from launcher.daemon.deployment import Deployment, Host, deploy, read_host
from launcher.daemon.measured import fingerprint_of, hardware_of, model_fingerprint
from launcher.engines.make import as_llama_cpp, engine_type
from launcher.measure.bench import workloads
from launcher.measure.tune.command_measure import CommandVisits, parse_command
from launcher.measure.tune.engine_visits import EngineVisits, Setting
from launcher.measure.tune.identity import Fingerprint, differences, identity_of, refuse_changes
from launcher.measure.tune.journal import Journal, RunBegan
from launcher.measure.tune.layout import find_candidates, with_layout
from launcher.measure.tune.model import (
    Candidate,
    Candidates,
    Layout,
    Settings,
    Stack,
    Verdict,
    VisitResult,
    Visits,
)
from launcher.measure.tune.private_daemon import InstancesUser, instances_user
from launcher.measure.tune.remembered import BestLayout, cpus_of, remember
from launcher.measure.tune.report import Forecast, Report, forecast, span
from launcher.measure.tune.runner import Runner, Watcher, now, only_engines
from launcher.measure.tune.search import next_step, verdict_so_far
from launcher.measure.tune.service import Service, claim_cores

# Before the first call of a command its time is unknown; the forecast is corrected after it.
_COMMAND_S: Final = 1.0
_DAY_S: Final = 86_400.0
# Assumed before the first visit only: vLLM is ready 35 to 40 s after its start with a tiny model (0.32, compiled, idle
# machine); a disk reads 1 GB/s; a load generator takes 10 to 14 s to its first request.
_START_S: Final = 40.0
_READ_BYTES_PER_S: Final = 1e9
_MEASURE_S: Final = 30.0
# Options that decide the visits: the search replays the journal, and must come to the same ones.
_SEARCH: Final = ("workload", "slo", "budget", "stack", "measure", "seed", "repeats", "no_refine")
# A layout and the default once each; and four times each, the fewest that the search compares without a budget.
_LEAST_VISITS: Final = 2
_USUAL_VISITS: Final = 8
_NEW_RUN: Final = "begin a new run without --resume"
# Of plans of cpus only: with a command on another machine no model is needed.
_NO_MODEL: Final[dict[str, Any]] = {"models": [{"name": "MODEL", "path": "MODEL"}]}


class Prepared(Struct, frozen=True, kw_only=True):
    config: Config
    default: Deployment
    """As configured."""
    here: bool
    """It is this machine."""
    command: tuple[str, ...] | None
    """--measure; None: the engine is measured."""
    workload: workloads.Workload
    found: Candidates
    settings: Settings
    identity: dict[str, str]
    fingerprint: Fingerprint | None
    """As configured; None for another machine."""
    fingerprints: Mapping[Stack, Fingerprint]
    """Those of the stacks that are compared on this machine."""
    stack: Stack | None
    """What the configuration runs today, where stacks are compared."""
    config_of: Callable[[Layout], Config]
    """The configuration of a layout's stack."""
    folder: Path
    """Of all runs."""
    user: InstancesUser | None
    """Runs the engines; None: the caller."""

    @property
    def runs_as(self) -> list[str]:
        """A line for root about the user of the engines."""
        if self.command is not None or os.geteuid() != 0:
            return []
        name = self.config.systemd.user
        if self.user is not None:
            return [f"engines run as user {name}"]
        return [f"engines run as root: {'[systemd] user' if name == 'root' else f'there is no user {name}'}"]

    @property
    def candidates(self) -> Sequence[Candidate]:
        return self.found.entered

    def forecast(self, history: Sequence[VisitResult]) -> Forecast:
        return forecast(history, self.candidates, self.settings)

    def verdict(self, history: Sequence[VisitResult]) -> Verdict:
        return verdict_so_far(history, self.candidates, self.settings)

    def ended(self, history: Sequence[VisitResult]) -> bool:
        return isinstance(next_step(history, self.candidates, self.settings), Verdict)

    def refuse_other(self, journal: Journal) -> None:
        """Raises RefusedError when that run cannot be continued."""
        began = journal.began
        refuse_changes(began.id, began.identity, self.identity)
        if began.fingerprint is not None and self.fingerprint is not None:
            changed = differences(began.fingerprint, self.fingerprint)
            if changed:
                raise RefusedError(
                    f"cannot resume '{began.id}': the machine or its software has changed: {'; '.join(changed)}",
                    _NEW_RUN,
                )
        try:
            self.ended(journal.history)
        except ValueError as error:
            raise RefusedError(f"cannot resume '{began.id}': {error}", _NEW_RUN) from None

    @contextlib.contextmanager
    def claim(self, *, stop: bool) -> Iterator[None]:
        """Within the context nothing else uses the cores. Raises LauncherError."""
        if not self.here:
            yield
            return
        sockets = (self.config.control.socket, options.default_socket())
        only = only_engines() if self.command is None else contextlib.nullcontext()
        with only, claim_cores(Service(), sockets, stop=stop, lock=self.folder / "service.lock"):
            yield

    def runner(self, journal: Journal, watcher: Watcher) -> Runner:
        return Runner(journal, self.candidates, self.settings, self._visits(journal.path.parent), watcher)

    def _visits(self, folder: Path) -> Visits:
        if self.command is not None:
            return CommandVisits(self.command, limit_s=self.settings.budget_s or _DAY_S)
        return EngineVisits(
            Setting(
                config=self.config, config_of=self.config_of, workload=self.workload, driver=driver_for(self.default),
                slo=self.settings.slo, folder=folder, cache=self.folder / "cache", cores_of=self.cores_of, user=self.user,
            )
        )  # fmt: skip

    def cores_of(self, plan: dict[str, Any]) -> int:
        cpus = CpuSet(cpu for slot in plan["slots"] for cpu in CpuSet.parse(slot["cpus"]))
        return physical(self.default.topology, cpus)

    def report(self, verdict: Verdict, journal: Journal) -> Report:
        return Report(
            verdict, self.candidates, journal.history, self.settings, self.cores_of, answers=journal.answers
        )

    def remember(self, journal: Journal, verdict: Verdict) -> BestLayout | None:
        """The winner, entered in the state folder; None for another machine, or where no layout gave a figure."""
        if self.fingerprint is None or verdict.winner is None:
            return None
        its = self.candidates[verdict.winner]
        stack = None if its.layout.stack == self.stack else its.layout.stack  # None: nothing to change
        workload = self.workload.name if self.command is None else f"--measure {self.command[0]}"
        best = BestLayout(
            layout=msgspec.structs.replace(its.layout, stack=stack), label=its.label, different=verdict.different,
            ratio_to_default=verdict.ratio_to_default, interval=verdict.interval, measured_at=now(),
            workload=workload, slo=dict(self.settings.slo), run=journal.began.id, cpus=cpus_of(its.plan),
            fingerprint=self.fingerprint if stack is None else self.fingerprints[stack],
            configured=None if stack is None else self.fingerprint,
        )  # fmt: skip
        remember(self.folder.parent, best)
        return best


def prepare(args: argparse.Namespace, folder: Path) -> Prepared:
    """From complete options. Raises LauncherError."""
    other = machine_of(args)
    cpus_only = other is not None and args.config is None and args.model is None
    config = options.config_of(args, base=_NO_MODEL if cpus_only else None)
    command = None if args.measure is None else tuple(parse_command(args.measure))
    workload = workloads.named(args.workload)
    if command is None and len(config.models) > 1:
        raise LauncherError(
            f"cannot tune {len(config.models)} models at once: a workload asks for one",
            "give a configuration with one [[models]] entry, or --model DIR",
        )
    host = read_host(config, machine=other, cpus_only=cpus_only)
    stacks = _stacks(args, config, host)
    default = deploy(config, host)
    # The configuration of each stack, and what its plans are made from. vLLM's differ in the engine's environment alone.
    bases = dict.fromkeys((None, *stacks), (config, host))
    rival: dict[str, str] = {}
    if "llama.cpp" in stacks:
        its_config = as_llama_cpp(config, str(args.gguf.absolute()))
        its_host = read_host(its_config, machine=other, cpus_only=cpus_only)
        bases["llama.cpp"] = its_config, its_host
        contents = model_fingerprint(its_config.models[0].path, gguf=True)
        rival = identity_of({"llama.cpp": [its_host.stack.version, msgspec.to_builtins(contents)]})

    def plan_of(layout: Layout) -> dict[str, Any]:
        base, where = bases[layout.stack]
        laid_out = with_layout(base, layout, engine_type(base.engine.kind).overriding)
        return deploy(laid_out, where).to_json()

    def fingerprint(stack: Stack, configured: Fingerprint) -> Fingerprint:
        if stack == "llama.cpp":
            return fingerprint_of(deploy(*bases[stack]))
        if stack == "zentorch":
            return configured
        # Whatever is installed: that stack is measured without ZenTorch.
        software = msgspec.structs.replace(configured.software, zentorch=None)
        return msgspec.structs.replace(configured, software=software)

    configured = fingerprint_of(default) if other is None else None
    settings = Settings(
        seed=args.seed, budget_s=args.budget, slo=args.slo, repeats=args.repeats, refine=not args.no_refine
    )
    start_s, measure_s = (_start_s(host), _MEASURE_S) if command is None else (0.0, _COMMAND_S)
    settings = msgspec.structs.replace(settings, start_s=start_s, measure_s=measure_s)
    found = find_candidates(host.topology, config, plan_of, stacks, _wanted(args.strategies, args.instances))
    prepared = Prepared(
        config=config, default=default, here=other is None, command=command, workload=workload, found=found,
        settings=settings, identity=_identity(args, config, found, default, other is None) | rival,
        fingerprint=configured, stack=next(iter(stacks), None),
        fingerprints={} if configured is None else {name: fingerprint(name, configured) for name in stacks},
        config_of=lambda layout: bases[layout.stack][0], folder=folder,
        user=instances_user(config, os.geteuid()) if command is None else None,
    )  # fmt: skip
    _refuse_no_comparison(prepared)
    return prepared


def _refuse_no_comparison(prepared: Prepared) -> None:
    refines = prepared.settings.refine
    if not any(not each.is_default and (refines or each.refines is None) for each in prepared.candidates):
        raise LauncherError(
            f"cannot tune: there is no layout beside the default, {prepared.candidates[0].label}",
            "allow more with --strategies and --instances; see `numa-launcher plan --compare`",
        )
    whole = prepared.forecast(())
    if whole.visits < _LEAST_VISITS:
        raise LauncherError(
            f"cannot tune within {span(prepared.settings.budget_s or 0.0)}: a visit takes about {span(whole.visit_s)}",
            f"give --budget {math.ceil(_USUAL_VISITS * whole.visit_s / 60)}m or more",
        )


def begin(prepared: Prepared, saved: dict[str, Any]) -> Journal:
    """The journal of a new run. Raises LauncherError."""
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
    while (prepared.folder / name).exists():
        name += "b"
    began = RunBegan(
        id=name, at=now(), options=saved, identity=prepared.identity, fingerprint=prepared.fingerprint
    )
    return Journal.create(prepared.folder / name, began)


def _start_s(host: Host) -> float:
    return (
        _START_S + sum(profile.weights_bytes or 0 for profile in host.profiles.values()) / _READ_BYTES_PER_S
    )


def _stacks(args: argparse.Namespace, config: Config, host: Host) -> list[Stack]:
    """Those of --stack, the one that the configuration runs first. Raises LauncherError."""
    names: Sequence[Stack] = args.stack
    if ("llama.cpp" in names) != (args.gguf is not None):
        raise LauncherError(
            "cannot use one of --stack llama.cpp and --gguf: llama.cpp reads the model from a GGUF file",
            "give both: --stack vllm,llama.cpp --gguf FILE, with the same model in both formats",
        )
    if names and not engine_type(config.engine.kind).has_stacks:
        raise LauncherError(
            f'cannot use --stack with engine.kind = "{config.engine.kind.value}": it begins at a configuration of vLLM',
            "give such a configuration with -c FILE, or remove --stack",
        )
    if "llama.cpp" in names and config.engine.runtime is not Runtime.HOST:
        raise LauncherError(
            f'cannot use --stack llama.cpp with engine.runtime = "{config.engine.runtime.value}": its instances run on the '
            "host only",
            'set engine.runtime = "host", or remove llama.cpp from --stack',
        )
    installed = host.stack.zentorch is not None
    if "zentorch" in names and host.here and not installed:
        raise LauncherError(
            "cannot use --stack zentorch: ZenTorch is not installed beside the engine",
            "see docs/engines.md, or remove zentorch from --stack",
        )
    own: Stack = "zentorch" if installed else "vllm"
    if list(names) == ["llama.cpp"]:
        return [own, "llama.cpp"]
    return sorted(names, key=lambda name: (name == "llama.cpp", name != own))


def _wanted(strategies: Sequence[str] | None, instances: Sequence[int] | None) -> Any:
    chosen = None if strategies is None else {Strategy(name) for name in strategies}

    def wanted(layout: Layout) -> bool:
        return (chosen is None or layout.strategy in chosen) and (
            instances is None or layout.instances_per_socket in instances
        )

    return wanted


def _identity(
    args: argparse.Namespace, config: Config, found: Candidates, default: Deployment, here: bool
) -> dict[str, str]:
    parts = {
        "configuration": msgspec.to_builtins(config),
        **{name: getattr(args, name) for name in _SEARCH},
        "candidates": [candidate.label for candidate in found.entered],
    }
    if not here:
        parts["machine"] = msgspec.to_builtins(hardware_of(default, live=False))
    return identity_of(parts)
