"""A configuration with its plan and engine, for `plan` and `serve`. Starts nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from launcher.accounts.report_values import zone_of
from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.files import state_folder
from launcher.base.redaction import MASK, Redactor, masked_arguments
from launcher.base.text import format_size
from launcher.config.schema import Config, Runtime, SpawnerKind
from launcher.config.schema import Engine as EngineConfig
from launcher.engines.base import Asking, Engine, Launch
from launcher.engines.make import engine_type, make_engine, probe_stack
from launcher.engines.numactl import Binding, MemPolicy
from launcher.engines.software import Stack
from launcher.machine.hardware import read_settings
from launcher.machine.picture import DrawnSlot, Picture, make_picture
from launcher.machine.topology import Topology
from launcher.measure.tune.remembered import MeasuredLayout, best_file
from launcher.models.identity import ModelFiles, model_files
from launcher.models.profile import ModelProfile
from launcher.models.weight_files import Read, ReadOnce, read_model_json
from launcher.plan.plan import Facts, Plan, Slot
from launcher.plan.plan_text import plan_json
from launcher.plan.planner import make_plan

if TYPE_CHECKING:
    from launcher.plan.comparison import Column


class Deployment(Struct, frozen=True):
    """What is decided before the first process starts."""

    config: Config
    topology: Topology
    plan: Plan
    stack: Stack
    binding: Binding
    engine: Engine
    measured: MeasuredLayout | None = None
    """What `tune` measured here; None when it was not asked for, or nothing is remembered."""

    @property
    def run_dir(self) -> Path:
        return run_dir(self.config)

    @property
    def connections(self) -> int:
        """Connections that clients' requests may have at once beside the clients' own: one for each request
        that an instance runs or that is at an overflow endpoint."""
        away = sum(overflow.max_requests for overflow in self.config.proxy.overflow)
        return sum(slot.effective.max_num_seqs for slot in self.plan.slots) + away

    @property
    def warnings(self) -> tuple[str, ...]:
        found = [f"{finding.message} ({finding.remedy})" for finding in self.plan.warnings]
        found += [self.binding.warning] if self.binding.warning else []
        return (*found, *self.config.proxy.outdated, *self.stack.warnings, *self.topology.notes)

    @property
    def headline(self) -> str:
        layout, count = self.config.layout, len(self.plan.slots)
        text = f"{layout.strategy.value}: {count} instance{'' if count == 1 else 's'}"
        return f"{text}, {len(self.plan.reserved)} cpus reserved" if self.plan.reserved else text

    def picture(self) -> Picture:
        return make_picture(
            self.topology, [_drawn_slot(slot, self.config) for slot in self.plan.slots], self.plan.reserved
        )

    def to_json(self) -> dict[str, Any]:
        """`plan --json`: the plan with each slot's exact command and environment, secrets left out."""
        extra: dict[int, dict[str, Any]] = {}
        for slot in self.plan.slots:
            launch = self.engine.launch(slot, generation=1)
            extra[slot.id] = {"argv": masked_arguments(launch.argv), "env": _shown(launch)}
        plan = {**plan_json(self.plan, extra), "measured_layout": msgspec.to_builtins(self.measured)}
        shown: dict[str, Any] = Redactor().tree(plan)
        return shown


def run_dir(config: Config) -> Path:
    """The folder of the instances' sockets: beside the control socket, and named after it."""
    return Path(config.control.socket).absolute().with_suffix(".instances")


class Host(Struct, frozen=True):
    """What plans are made from, read once for many layouts."""

    topology: Topology
    stack: Stack
    profiles: Mapping[str, ModelProfile]
    here: bool
    """It is this host: it may be probed."""
    cpus_only: bool
    """Plan no memory, and read no models."""
    files: Mapping[str, ModelFiles] = field(default_factory=dict)
    """Of the models by name, as far as they are known here."""


NOT_ASKING: Final = Asking()
ASKED: Final = Asking(300.0, again=True)
"""Somebody waits for it: importing vLLM takes 5 to 40 s for each model, by the disk and the load."""
_AT_START: Final = Asking(30.0)


def asking_at_start(config: Config) -> Asking:
    """A daemon asks once for each model, before its first start. Instances of an earlier daemon are not kept waiting."""
    from launcher.instances.state_file import StateFile  # noqa: PLC0415  heavy

    adopts = StateFile(run_dir(config).with_suffix(".state") / "instances.json").records
    return NOT_ASKING if adopts else _AT_START


def asked_profiles(config: Config) -> Mapping[str, ModelProfile]:
    """The profiles of the models, by name, after their engine on this host was asked; empty where it cannot be.

    Blocking, for up to the limit of ASKED. Raises LauncherError for a model whose files cannot be read."""
    from launcher.machine import sysfs  # noqa: PLC0415  heavy

    try:
        stack = probe_stack(config.engine)
    except LauncherError:  # doctor says so in another row
        return {}
    return with_answers(config, read_profiles(config), stack, sysfs.read().cpu.flags, ASKED)


def read_host(
    config: Config, *, machine: Topology | None = None, cpus_only: bool = False, asking: Asking = NOT_ASKING
) -> Host:
    """This host, or another `machine`. Raises LauncherError.

    Of another machine nothing is probed, and its stack is not known; the engine of this host answers for its processor,
    where it is installed."""
    once = ReadOnce()
    profiles: Mapping[str, ModelProfile] = {} if cpus_only else read_profiles(config, once)
    if machine is not None:
        stack = Stack(command=config.engine.command)
        profiles = with_answers(config, profiles, _stack_here(config, asking), machine.cpu.flags, asking)
        return Host(machine, stack, profiles, here=False, cpus_only=cpus_only)
    from launcher.machine import sysfs  # noqa: PLC0415  heavy

    topology, stack = sysfs.read(slice_name=instances_slice(config)), probe_stack(config.engine)
    profiles = with_answers(config, profiles, stack, topology.cpu.flags, asking)
    files = {} if cpus_only else read_files(config, once)
    return Host(topology, stack, profiles, here=True, cpus_only=cpus_only, files=files)


def _stack_here(config: Config, asking: Asking) -> Stack:
    """The software of this host, for a plan of another machine. Raises LauncherError where it is to be asked and is not
    here."""
    unknown = Stack(command=config.engine.command)
    if config.engine.runtime is not Runtime.HOST:
        return unknown
    try:
        wanted = asking.limit_s or engine_type(config.engine.kind).has_answers()
        return probe_stack(config.engine) if wanted else unknown
    except LauncherError:
        if asking.limit_s:
            raise
        return unknown


def with_answers(
    config: Config,
    profiles: Mapping[str, ModelProfile],
    stack: Stack,
    flags: frozenset[str],
    asking: Asking,
) -> Mapping[str, ModelProfile]:
    """The profiles with the engine's own figures: answers that are kept, and new ones if `asking`.

    Blocking. Raises LauncherError for a model whose files cannot be read."""
    if asking.limit_s:
        asking = replace(asking, become=partial(_instances_user, config))
    return engine_type(config.engine.kind).answered(config, profiles, stack, flags, asking)


def _instances_user(config: Config) -> tuple[str, ...]:
    """A command that runs another as the instances' user; empty where this process is not root's, or there is none."""
    if os.geteuid() != 0:
        return ()
    from launcher.instances.choose_spawner import instances_user  # noqa: PLC0415  heavy

    return instances_user(config)


def instances_slice(config: Config) -> str | None:
    """The systemd slice whose limits hold for instances, if it exists; None where they are the daemon's children."""
    return None if config.supervision.spawner is SpawnerKind.DIRECT else config.systemd.slice


def deploy(config: Config, host: Host) -> Deployment:
    """Plan. The plan of another machine is as it would be with numactl and the engine in its PATH. Raises LauncherError."""
    topology, stack, planning = host.topology, host.stack, engine_type(config.engine.kind).planning
    zone_of(config.usage.zone)
    if host.here:
        from launcher.engines.numactl import probe_binding  # noqa: PLC0415  heavy

        plan = make_plan(
            topology,
            config,
            host.profiles,
            _facts(stack, config),
            planning=planning,
            cpus_only=host.cpus_only,
        )
        cpus = CpuSet(cpu for slot in plan.slots for cpu in slot.placement.cpus) or topology.allowed
        nodes = CpuSet(node for slot in plan.slots for node in slot.placement.membind)
        binding = probe_binding(config.engine, cpus, nodes)
    else:
        plan = make_plan(topology, config, host.profiles, planning=planning, cpus_only=host.cpus_only)
        binding = _binding_elsewhere(config.engine)
    slots = tuple(replace(slot, files=host.files.get(slot.model.name)) for slot in plan.slots)
    plan = replace(plan, slots=slots)
    engine = make_engine(config, stack, binding, run_dir(config))
    return Deployment(config, topology, plan, stack, binding, engine)


def build_deployment(
    config: Config, *, machine: Topology | None = None, cpus_only: bool = False, asking: Asking = NOT_ASKING
) -> Deployment:
    """`read_host`, then `deploy`. Raises LauncherError."""
    return deploy(config, read_host(config, machine=machine, cpus_only=cpus_only, asking=asking))


def was_tuned() -> bool:
    """`tune` has remembered something here. The module that compares it with this machine (measured.py) imports numpy."""
    try:
        return best_file(state_folder(None, os.environ, os.geteuid())).exists()
    except (LauncherError, OSError):  # a user without a home folder has no results either
        return False


def _binding_elsewhere(engine: EngineConfig) -> Binding:
    """As on a machine where everything works."""
    if engine.runtime is not Runtime.HOST:
        return Binding.of_container(binds_memory=engine.numactl != "off")
    if engine.numactl == "off":
        return Binding(MemPolicy.NONE, taskset="taskset")
    return Binding(MemPolicy.MEMBIND, numactl="numactl")


def _facts(stack: Stack, config: Config) -> Facts:
    kernel = read_settings()
    return Facts(
        transparent_hugepages=kernel.transparent_hugepages, numa_balancing=kernel.numa_balancing,
        governors=kernel.governors,
        ld_preload=config.engine.env.get("LD_PRELOAD", os.environ.get("LD_PRELOAD")),
        engine=engine_type(config.engine.kind).facts(stack, config, os.environ),
    )  # fmt: skip


def compare_strategies(
    config: Config, *, machine: Topology | None = None, cpus_only: bool = False
) -> tuple[Column, ...]:
    """All strategies side by side, on this host or another machine. Raises LauncherError."""
    from launcher.machine import sysfs  # noqa: PLC0415  heavy
    from launcher.plan.comparison import compare  # noqa: PLC0415  heavy

    topology = sysfs.read(slice_name=instances_slice(config)) if machine is None else machine
    profiles: Mapping[str, ModelProfile] = {} if cpus_only else read_profiles(config)
    profiles = with_answers(config, profiles, _stack_here(config, NOT_ASKING), topology.cpu.flags, NOT_ASKING)
    planning = engine_type(config.engine.kind).planning
    return compare(topology, config, profiles, planning=planning, cpus_only=cpus_only)


def _drawn_slot(slot: Slot, config: Config) -> DrawnSlot:
    placement, facts = slot.placement, []
    if len(config.models) > 1:
        facts.append(slot.model.name)
    facts.append("no NUMA" if placement.node is None else f"node {placement.node}")
    if placement.membind and placement.membind != CpuSet((placement.node or 0,)):
        facts[-1] += f", memory {placement.membind}"
    cores = f"{len(placement.cpus)} cpus"
    if slot.kv_cache_bytes is not None:
        facts.append(f"KV {format_size(slot.kv_cache_bytes)}")
    return DrawnSlot(f"slot {slot.id}", placement.cpus, (*facts, cores))


def _shown(launch: Launch) -> dict[str, str]:
    return {name: MASK if name in launch.secrets else value for name, value in launch.env.items()}


def require_models(config: Config) -> None:
    """Raise PassingError for a model of a custom server that is a path and not there: the server would end, and again.

    Those of an engine that reads their files are looked for by `read_profiles`, which raises it too."""
    engine_type(config.engine.kind).require_models(config)


def read_files(config: Config, read: Read = read_model_json) -> dict[str, ModelFiles]:
    """The identities of the models whose files are here, by name."""
    found = {}
    for model in config.models:
        with contextlib.suppress(LauncherError):  # reading its profile says what is wrong with a model
            if (files := model_files(model.path, read)) is not None:
                found[model.name] = files
    return found


def read_profiles(config: Config, read: Read = read_model_json) -> dict[str, ModelProfile]:
    """The models' profiles, by name; empty where the engine reads none."""
    return engine_type(config.engine.kind).profiles(config, read)
