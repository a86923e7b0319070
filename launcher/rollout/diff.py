"""Compares two deployments: which slots restart and why, which keys apply at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from launcher.config.schema import Config
from launcher.daemon.deployment import Deployment
from launcher.engines.base import Engine, Launch
from launcher.plan import Slot
from launcher.redaction import masked_arguments


class Step(StrEnum):
    """What happens to a slot; over all slots in this order."""

    STOP = "stop"
    """It is not in the new plan."""
    RESTART = "restart"
    START = "start"
    """It is new."""
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class SlotChange:
    slot: int
    step: Step
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Changes:
    slots: tuple[SlotChange, ...]
    live: tuple[str, ...]
    """Keys that apply at once, without a restart."""
    needs_restart: tuple[str, ...]
    """Keys that only a restart of the daemon applies; with any of them a reload is refused."""

    @property
    def steps(self) -> tuple[SlotChange, ...]:
        """In order: slots that stop, restarts, new slots."""
        order = list(Step)
        doing = [change for change in self.slots if change.step is not Step.NOTHING]
        return tuple(sorted(doing, key=lambda change: (order.index(change.step), change.slot)))


# Sections that apply to running instances.
_LIVE: Final = ("supervision", "cost")
# Sections that are read once, at the start of the daemon.
_ONCE: Final = ("proxy", "control", "systemd", "logging", "usage", "audit", "telemetry")
# Kinds of engine and of spawner decide how the daemon itself is built; budgets are counted in one currency, at one price.
_BUILT_IN: Final = (
    "engine.kind", "engine.runtime", "engine.health_path", "supervision.spawner", "cost.currency", "cost.price",
)  # fmt: skip


Running = Mapping[int, tuple[Slot, Engine]]
"""What each slot starts."""


def compare(before: Deployment, after: Deployment, running: Running | None = None) -> Changes:
    """`running` differs from `before` after a rollout that got stuck."""
    keys = tuple(_differing(before.config, after.config))
    once = [key for key in keys if key.startswith(_ONCE) or key in _BUILT_IN]
    if {model.name for model in before.config.models} != {model.name for model in after.config.models}:
        once.append("the models' names")
    elif _aliases(before.config) != _aliases(after.config):
        once.append("the models' aliases")
    if before.plan.reserved != after.plan.reserved:
        once.append("the reserved cpus")
    old, new = _slots(before) if running is None else running, _slots(after)
    slots = [_change(number, old.get(number), new.get(number)) for number in sorted(old.keys() | new.keys())]
    live = tuple(key for key in keys if key.startswith(_LIVE) and key not in once)
    return Changes(tuple(slots), live, tuple(once))


def _slots(deployment: Deployment) -> Running:
    return {slot.id: (slot, deployment.engine) for slot in deployment.plan.slots}


def _change(number: int, old: tuple[Slot, Engine] | None, new: tuple[Slot, Engine] | None) -> SlotChange:
    if new is None:
        return SlotChange(number, Step.STOP, ("it is not in the new plan",))
    if old is None:
        return SlotChange(number, Step.START, ("it is new",))
    (was_slot, was_engine), (slot, engine) = old, new
    was, will = was_engine.launch(was_slot, 1), engine.launch(slot, 1)
    reasons = (*_placement(was_slot, slot), *_launch(was, will))
    return SlotChange(number, Step.RESTART if reasons else Step.NOTHING, reasons)


def _placement(was: Slot, will: Slot) -> Iterator[str]:
    if was.model.name != will.model.name:
        yield f"model '{was.model.name}' becomes '{will.model.name}'"
    if was.placement.cpus != will.placement.cpus:
        yield f"cpus {was.placement.cpus} become {will.placement.cpus}"
    if was.placement.membind != will.placement.membind:
        yield f"memory nodes {was.placement.membind} become {will.placement.membind}"
    if was.model.max_num_seqs != will.model.max_num_seqs:  # the proxy's bound too, whatever the engine is
        yield f"max_num_seqs {was.model.max_num_seqs} becomes {will.model.max_num_seqs}"


def _launch(was: Launch, will: Launch) -> Iterator[str]:
    """What differs in the command and its environment; values of secrets are never shown."""
    gone = [shown for word, shown in _shown(was) if word not in will.argv]
    come = [shown for word, shown in _shown(will) if word not in was.argv]
    if gone or come or was.argv != will.argv:
        yield f"arguments: {' '.join(gone) or '(order)'} becomes {' '.join(come) or '(nothing)'}"
    for name in sorted(was.env.keys() | will.env.keys()):
        a, b = was.env.get(name), will.env.get(name)
        if a != b and not name.startswith("VLLM_CPU_OMP_THREADS_BIND"):
            secret = name in was.secrets | will.secrets
            yield f"{name} changes" if secret else f"{name}: {a or '(unset)'} becomes {b or '(unset)'}"


def _shown(launch: Launch) -> Iterator[tuple[str, str]]:
    return zip(launch.argv, masked_arguments(launch.argv), strict=True)


def _aliases(config: Config) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for model in config.models:
        found.setdefault(model.name, set()).update(model.aliases)
    return found


def _differing(before: Config, after: Config) -> Iterator[str]:
    """Keys such as `supervision.probe_interval_s` whose values differ; models as `models`."""
    a, b = msgspec.to_builtins(before), msgspec.to_builtins(after)
    for section in a:
        if a[section] == b[section]:
            continue
        if not isinstance(a[section], dict):
            yield section
            continue
        yield from (f"{section}.{key}" for key in _keys(a[section], b[section]))


def _keys(a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    yield from (key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key))
