"""Applies the difference between two deployments one slot at a time, checks each new instance against its siblings, and
returns to the old deployment when one fails. It ends whatever operators do to a slot meanwhile."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launcher.base.errors import LauncherError, RefusedError
from launcher.base.redaction import masked_arguments
from launcher.config.schema import Config
from launcher.daemon.deployment import Deployment
from launcher.engines.base import Engine, Launch
from launcher.instances.lifecycle import Limits
from launcher.instances.ports import Prober
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import (
    Intent,
    ProbeSettings,
    RestartRequested,
    SlotState,
    StartRequested,
    State,
)
from launcher.instances.supervisor import Availability, Supervisor, check, min_ready_of
from launcher.models.identity import changed_files
from launcher.plan.plan import Slot

log = logging.getLogger("launcher.rollout")


# --- Compares two deployments: which slots restart and why, which keys apply at once. ---


class Step(StrEnum):
    """What happens to a slot; over all slots in this order."""

    STOP = "stop"
    """It is not in the new plan."""
    RESTART = "restart"
    START = "start"
    """It is new."""
    NOTHING = "nothing"


class SlotChange(Struct, frozen=True):
    slot: int
    step: Step
    reasons: tuple[str, ...] = ()


class Changes(Struct, frozen=True):
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
    keys, once = changed_keys(before.config, after.config), [*keys_of_a_restart(before.config, after.config)]
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
    before, after = was.effective.max_num_seqs, will.effective.max_num_seqs
    if before != after:  # the proxy's bound too, whatever the engine is
        yield f"max_num_seqs {before} becomes {after}"


def _launch(was: Launch, will: Launch) -> Iterator[str]:
    """What differs in the command and its environment; values of secrets are never shown."""
    if changed := changed_files(was.files, will.files):
        yield changed
    (old, settings), (new, wanted) = was.settled, will.settled
    gone = [shown for word, shown in _shown(old) if word not in new]
    come = [shown for word, shown in _shown(new) if word not in old]
    if gone or come or old != new:
        yield f"arguments: {' '.join(gone) or '(order)'} becomes {' '.join(come) or '(nothing)'}"
    for name in sorted(settings.keys() | wanted.keys()):
        a, b = settings.get(name), wanted.get(name)
        if a != b and name not in was.planned | will.planned:
            secret = name in was.secrets | will.secrets
            yield f"{name} changes" if secret else f"{name}: {a or '(unset)'} becomes {b or '(unset)'}"


def _shown(argv: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    return zip(argv, masked_arguments(argv), strict=True)


def _aliases(config: Config) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for model in config.models:
        found.setdefault(model.name, set()).update(model.aliases)
    return found


def changed_keys(before: Config, after: Config) -> tuple[str, ...]:
    """Keys such as `supervision.probe_interval_s` whose values differ; models as `models`."""
    return tuple(_differing(before, after))


def keys_of_a_restart(before: Config, after: Config) -> tuple[str, ...]:
    """The changed keys that only a restart of the daemon applies; `the models' names` for what has no key."""
    once = [key for key in _differing(before, after) if key.startswith(_ONCE) or key in _BUILT_IN]
    if {model.name for model in before.models} != {model.name for model in after.models}:
        once.append("the models' names")
    elif _aliases(before) != _aliases(after):
        once.append("the models' aliases")
    return tuple(once)


def _differing(before: Config, after: Config) -> Iterator[str]:
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


# Completions of one token that a new instance and a sibling answer.
CANARIES: Final = 3
CANARY_TIMEOUT_S: Final = 60.0
# A new instance may take this many times a sibling's time, which may have the prompt in its cache, plus a slack.
SLOWER: Final = 3.0
SLACK_S: Final = 1.0
# With --force, and on the way back, siblings get this time to become ready before another instance leaves rotation;
# otherwise ready_timeout_s.
SIBLINGS_S: Final = 60.0
_OUT_OF_ROTATION: Final = frozenset({Intent.DRAIN, Intent.QUARANTINE, Intent.STOP, Intent.HOLD})
_IN_TRANSITION: Final = frozenset({State.STARTING, State.DRAINING, State.STOPPING, State.BACKOFF})
_OPPOSITE: Final = {Step.START: Step.STOP, Step.STOP: Step.START, Step.RESTART: Step.RESTART}


class Stage(StrEnum):
    RUNNING = "running"
    DONE = "done"
    ROLLING_BACK = "rolling back"
    ROLLED_BACK = "rolled back"
    STUCK = "stuck"
    """The old deployment could not be restored."""


class Progress(Struct, frozen=True):
    stage: Stage
    changes: Changes
    done: tuple[str, ...] = ()
    doing: str = ""
    error: str = ""
    remedy: str = ""


class CheckError(LauncherError):
    """A new instance did not become ready, or is slower than its siblings."""


class Rollout:
    """One transition from `before` to `after`."""

    def __init__(  # noqa: PLR0917
        self,
        supervisor: Supervisor,
        prober: Prober,
        before: Deployment,
        after: Deployment,
        changes: Changes,
        settings: Callable[[Deployment], tuple[Limits, ProbeSettings]],
        clock: Callable[[], float] = time.monotonic,
        *,
        force: bool = False,
    ) -> None:
        self._supervisor = supervisor
        self._prober = prober
        self._before = before
        self.after = after
        self._settings = settings
        self._clock = clock
        self._force = force
        self._min_ready = min_ready_by_model(before)
        self.progress = Progress(Stage.RUNNING, changes)

    async def run(self) -> bool:
        """Apply. True when `after` is in force; False when `before` is restored, or neither is."""
        try:
            return await self._run()
        except Exception as error:
            self._note(
                stage=Stage.STUCK,
                error=f"cannot reload: {error!r}, which should not happen",
                remedy="see the daemon's log and `numa-launcher status`; report it with a bundle",
            )
            log.exception("reload: failed", extra={"audit": "stuck", "verb": "reload"})
            return False

    async def _run(self) -> bool:
        changes = self.progress.changes
        applied: list[SlotChange] = []
        self._reconfigure(self.after, [c for c in changes.slots if c.step is Step.NOTHING])
        try:
            for change in changes.steps:
                doing = f"{change.step} slot {change.slot}"
                self._note(doing=doing)
                limits, _ = self._settings(self._before)
                await self._wait_for_turn(change, SIBLINGS_S if self._force else limits.ready_timeout_s)
                applied.append(change)
                await self._apply(change, self.after)
                self._note(done=(*self.progress.done, doing))
        except LauncherError as error:
            self._note(error=error.message, remedy=error.remedy)
            log.error(  # noqa: TRY400  a person's error
                "reload: %s; restoring the previous configuration", error.message,
                extra={"audit": "rolled back", "verb": "reload", "remedy": error.remedy},
            )  # fmt: skip
            await self._roll_back(applied)
            return False
        self._note(stage=Stage.DONE, doing="")
        log.info(
            "reload: done, %d slots changed",
            len(self.progress.done),
            extra={"audit": "done", "verb": "reload"},
        )
        return True

    async def _roll_back(self, applied: Sequence[SlotChange]) -> None:
        self._note(stage=Stage.ROLLING_BACK)
        self._reconfigure(self._before, self.progress.changes.slots)
        failed = False
        before = {slot.id for slot in self._before.plan.slots}
        for change in reversed(applied):
            if change.step is Step.STOP and change.slot not in before:
                continue  # an earlier rollout had left it
            back = SlotChange(change.slot, _OPPOSITE[change.step])
            self._note(doing=f"back: {back.step} slot {back.slot}")
            try:
                await self._wait_for_turn(back, SIBLINGS_S)
                await self._apply(back, self._before)
            except RefusedError as error:
                failed = True
                self._reconfigure(self.after, [change])  # also after a crash, until the next reload
                kept = f"slot {change.slot} keeps the new configuration: {error.message}"
                self._note(error=f"{self.progress.error}; {kept}")
                log.error("reload: %s", kept)  # noqa: TRY400
            except LauncherError as error:
                failed = True
                log.error("reload: cannot restore slot %d: %s", change.slot, error.message)  # noqa: TRY400
        self._note(doing="", stage=Stage.STUCK if failed else Stage.ROLLED_BACK)

    def _note(self, **changes: object) -> None:
        self.progress = replace(self.progress, **changes)

    def _reconfigure(self, deployment: Deployment, changes: Sequence[SlotChange]) -> None:
        limits, probing = self._settings(deployment)
        slots = {slot.id: slot for slot in deployment.plan.slots}
        for change in changes:
            controller = self._supervisor.controllers.get(change.slot)
            if controller is not None and change.slot in slots:
                controller.reconfigure(slots[change.slot], deployment.engine, limits, probing)

    async def _apply(self, change: SlotChange, deployment: Deployment) -> None:
        match change.step:
            case Step.STOP:
                await self._supervisor.remove(change.slot)
            case Step.START if change.slot not in self._supervisor.controllers:
                limits, probing = self._settings(deployment)
                slot = next(slot for slot in deployment.plan.slots if slot.id == change.slot)
                controller = self._supervisor.add(slot, deployment.engine, limits, probing)
                controller.post(StartRequested())
                await self._becomes_ready(controller, controller.slot_state.generation + 1)
            case Step.START | Step.RESTART:  # a rollback may have kept a slot that was new
                controller = self._supervisor.controllers[change.slot]
                generation = controller.slot_state.generation + 1
                self._reconfigure(deployment, [change])
                await self._restart(controller, generation)
            case Step.NOTHING:
                pass

    async def _wait_for_turn(self, change: SlotChange, patience_s: float) -> None:
        """Until one more instance may leave rotation. Raises RefusedError where too few would be left."""
        controller = self._supervisor.controllers.get(change.slot)
        if controller is None or _is_out_of_rotation(controller.slot_state):
            return
        await self._wait_for_siblings(controller, patience_s)
        if not self._force:
            slots = {
                number: Availability(other.slot.model.name, other.in_rotation)
                for number, other in self._supervisor.controllers.items()
            }
            check("reload", change.slot, slots, self._min_ready.get(controller.slot.model.name, 0))

    async def _restart(self, controller: SlotController, generation: int) -> None:
        """Into `generation` or a later one: these have the new configuration. A slot that an operator has taken out of
        rotation gets it at its next start."""
        if _is_out_of_rotation(controller.slot_state):
            _log_deferred(controller)
            return
        controller.post(RestartRequested())
        await self._becomes_ready(controller, generation)

    async def _wait_for_siblings(self, controller: SlotController, patience_s: float) -> None:
        doing = self.progress.doing
        for other in self._siblings(controller):
            self._note(doing=f"{doing}: waits for slot {other.slot.id}")
            try:
                async with asyncio.timeout(patience_s):
                    await other.until(
                        lambda slot: slot.state not in _IN_TRANSITION or _is_out_of_rotation(slot)
                    )
            except TimeoutError:
                log.warning("reload: slot %d is still %s", other.slot.id, other.slot_state.state)
        self._note(doing=doing)

    def _siblings(self, controller: SlotController) -> list[SlotController]:
        model, others = controller.slot.model.name, self._supervisor.controllers.values()
        return [other for other in others if other is not controller and other.slot.model.name == model]

    async def _becomes_ready(self, controller: SlotController, generation: int) -> None:
        number = controller.slot.id
        await controller.until(lambda slot: not controller.backlog and _has_ended(slot, generation))
        slot_state = controller.slot_state
        if _is_out_of_rotation(slot_state):
            _log_deferred(controller)
            return
        if slot_state.state is not State.READY:
            cause = None if slot_state.last_cause is None else slot_state.last_cause.of_slot(number)
            why = f"{cause.name}: {cause.message}" if cause is not None else f"it is {slot_state.state}"
            raise CheckError(
                f"cannot reload: slot {number} did not become ready: {why}",
                cause.remedy if cause is not None else "see `numa-launcher events`",
            )
        if slot_state.generation < generation:
            raise CheckError(
                f"cannot reload: slot {number} was put back into rotation before it had restarted",
                f"see who did it with `numa-launcher events --audit --slot {number}`, then reload again",
            )
        await self._check(controller)

    async def _check(self, controller: SlotController) -> None:
        """Compare its answers with a sibling's. Raises CheckError."""
        number = controller.slot.id
        sibling = next((k for k in self._siblings(controller) if k.slot_state.state is State.READY), None)
        new = await self._canaries(controller)
        if new is None:
            raise CheckError(
                f"cannot reload: slot {number} gave no answer to a completion of one token",
                f"numa-launcher logs {number}",
            )
        old = await self._canaries(sibling) if sibling is not None else None
        if old is not None and new > old * SLOWER + SLACK_S:
            raise CheckError(
                f"cannot reload: slot {number} took {new:.2f} s for one token, its sibling {old:.2f} s",
                "compare the two configurations with `numa-launcher reload --dry-run`",
            )
        log.info("reload: slot %d answers in %.3f s", number, new, extra={"slot": number})

    async def _canaries(self, controller: SlotController) -> float | None:
        """The median duration of completions of one token, in seconds; None when one fails."""
        address, durations = controller.instance.address, []
        if address is None:
            return None
        for _ in range(CANARIES):
            began = self._clock()
            if not await self._prober.canary(address, controller.slot.model.name, CANARY_TIMEOUT_S):
                return None
            durations.append(self._clock() - began)
        return statistics.median(durations)


def min_ready_by_model(before: Deployment) -> Mapping[str, int]:
    """Instances that stay ready during a rollout, by model."""
    names = [slot.model.name for slot in before.plan.slots]
    return {name: min_ready_of(before.config.supervision.min_ready, names.count(name)) for name in names}


def _log_deferred(controller: SlotController) -> None:
    slot_state, number = controller.slot_state, controller.slot.id
    log.info(
        "reload: slot %d is %s (%s): it changes at its next start",
        number, slot_state.state, slot_state.intent, extra={"slot": number},
    )  # fmt: skip


def _is_out_of_rotation(slot: SlotState) -> bool:
    return slot.intent in _OUT_OF_ROTATION


def _has_ended(slot: SlotState, generation: int) -> bool:
    if _is_out_of_rotation(slot) or slot.state is State.FAILED:
        return True
    if slot.generation < generation:
        return slot.state is State.READY and not slot.restarting
    return slot.state in {State.READY, State.BACKOFF}
