"""Applies the difference between two configurations one slot at a time, checks each new instance against its siblings,
and goes back to the old configuration when one fails. Whatever operators do to a slot meanwhile, it comes to an end."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from launcher.daemon.deployment import Deployment
from launcher.errors import LauncherError, RefusedError
from launcher.instances.backoff import Limits
from launcher.instances.disruption import Standing, check, least_ready
from launcher.instances.ports import Prober
from launcher.instances.probe_settings import ProbeSettings
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import (
    Intent,
    RestartRequested,
    SlotState,
    StartRequested,
    State,
    StopRequested,
)
from launcher.instances.supervisor import Supervisor
from launcher.rollout.diff import Changes, SlotChange, Step

log = logging.getLogger("launcher.rollout")

# Completions of one token asked of a new instance and of a sibling.
CANARIES: Final = 3
CANARY_TIMEOUT_S: Final = 60.0
# A new instance may take so much longer than a sibling, which may have the prompt in its cache.
SLOWER: Final = 3.0
SLACK_S: Final = 1.0
# Where the operator insists, or on the way back: siblings that are on their way get so long to come before one more is
# taken out of rotation. Else as long as a start may take.
SIBLINGS_S: Final = 60.0

_ASIDE: Final = frozenset({Intent.DRAIN, Intent.QUARANTINE, Intent.STOP, Intent.HOLD})
_MOVING: Final = frozenset({State.STARTING, State.DRAINING, State.STOPPING, State.BACKOFF})


class Stage(StrEnum):
    """How far a rollout has come."""

    RUNNING = "running"
    DONE = "done"
    ROLLING_BACK = "rolling back"
    ROLLED_BACK = "rolled back"
    STUCK = "stuck"
    """The old configuration did not come back either."""


@dataclass(slots=True)
class Progress:
    """What `reload` shows."""

    stage: Stage
    changes: Changes
    done: list[str] = field(default_factory=list)
    doing: str = ""
    error: str = ""
    remedy: str = ""


class CheckError(LauncherError):
    """A new instance is worse than its siblings, or did not come up."""


class Rollout:
    """One way from `before` to `after`."""

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
        self._least = least_of(before)
        self.progress = Progress(Stage.RUNNING, changes)

    async def run(self) -> bool:
        """Apply. True when everything is as `after` says; False when it is as `before` said, or stuck."""
        progress = self.progress
        applied: list[SlotChange] = []
        self._take_over(self.after, [c for c in progress.changes.slots if c.step is Step.NOTHING])
        try:
            for change in progress.changes.steps:
                doing = progress.doing = f"{change.step} slot {change.slot}"
                limits, _ = self._settings(self._before)
                await self._make_room(change, SIBLINGS_S if self._force else limits.ready_timeout_s)
                applied.append(change)
                await self._apply(change, self.after)
                progress.done.append(doing)
        except LauncherError as error:
            progress.error, progress.remedy = error.message, error.remedy
            log.error(  # noqa: TRY400  a person's error
                "reload: %s; back to the configuration before", error.message, extra={"audit": "rolled back"}
            )
            await self._roll_back(applied)
            return False
        progress.stage, progress.doing = Stage.DONE, ""
        log.info("reload: done, %d slots changed", len(progress.done), extra={"audit": "done"})
        return True

    async def _roll_back(self, applied: Sequence[SlotChange]) -> None:
        progress = self.progress
        progress.stage = Stage.ROLLING_BACK
        opposite = {Step.START: Step.STOP, Step.STOP: Step.START, Step.RESTART: Step.RESTART}
        self._take_over(self._before, progress.changes.slots)
        failed = False
        for change in reversed(applied):
            back = SlotChange(change.slot, opposite[change.step])
            progress.doing = f"back: {back.step} slot {back.slot}"
            try:
                await self._make_room(back, SIBLINGS_S)
                await self._apply(back, self._before)
            except RefusedError as error:
                failed = True
                progress.error += f"; slot {change.slot} is left with the new configuration: {error.message}"
                log.error(  # noqa: TRY400
                    "reload: slot %d is left with the new configuration: %s", change.slot, error.message
                )
            except LauncherError as error:
                failed = True
                log.error(  # noqa: TRY400
                    "reload: slot %d did not come back: %s", change.slot, error.message
                )
        progress.doing = ""
        progress.stage = Stage.STUCK if failed else Stage.ROLLED_BACK

    def _take_over(self, deployment: Deployment, changes: Sequence[SlotChange]) -> None:
        """Limits and probing, and what the next life is started as, of slots that go on."""
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
                await self._come_up(controller, controller.slot_state.generation + 1)
            case Step.START | Step.RESTART:  # a way back may have left one that was new
                controller = self._supervisor.controllers[change.slot]
                least = controller.slot_state.generation + 1
                self._take_over(deployment, [change])
                await self._restart(controller, least)
            case Step.NOTHING:
                pass

    async def _make_room(self, change: SlotChange, patience_s: float) -> None:
        """Wait until one more may be taken out of rotation. Raises RefusedError where too few would be left."""
        controller = self._supervisor.controllers.get(change.slot)
        if controller is None or _is_aside(controller.slot_state):
            return
        await self._siblings_are_back(controller, patience_s)
        if not self._force:
            standing = {
                number: Standing(other.slot.model.name, other.in_rotation)
                for number, other in self._supervisor.controllers.items()
            }
            check("reload", change.slot, standing, self._least.get(controller.slot.model.name, 0))

    async def _restart(self, controller: SlotController, least: int) -> None:
        """Into life `least` or a later one: those have the new configuration. One that somebody has taken out of
        rotation takes it when it starts again."""
        if _is_aside(controller.slot_state):
            self._say_aside(controller)
            return
        if controller.slot_state.state is State.STARTING and controller.slot_state.generation < least:
            controller.post(
                StopRequested()
            )  # `restart` leaves a start alone, and this one is of the old configuration
            await controller.until_stopped_or_called_off()
        match controller.slot_state.state:
            case State.STOPPED | State.FAILED:
                controller.post(StartRequested())
            case _ if controller.slot_state.generation < least and not _is_aside(controller.slot_state):
                controller.post(RestartRequested())
        await self._come_up(controller, least)

    async def _siblings_are_back(self, controller: SlotController, patience_s: float) -> None:
        """Wait until no other instance of the model is on its way."""
        doing = self.progress.doing
        for other in self._siblings(controller):
            self.progress.doing = f"{doing}: waits for slot {other.slot.id}"
            try:
                async with asyncio.timeout(patience_s):
                    await other.until(lambda slot: slot.state not in _MOVING or _is_aside(slot))
            except TimeoutError:
                log.warning("reload: slot %d is still %s", other.slot.id, other.slot_state.state)
        self.progress.doing = doing

    def _siblings(self, controller: SlotController) -> list[SlotController]:
        name = controller.slot.model.name
        return [
            k
            for k in self._supervisor.controllers.values()
            if k is not controller and k.slot.model.name == name
        ]

    async def _come_up(self, controller: SlotController, least: int) -> None:
        """Until its new life is ready and as good as its siblings. Raises CheckError."""
        slot = controller.slot.id
        await controller.until(lambda slot: not controller.backlog and _is_over(slot, least))
        slot_state = controller.slot_state
        if _is_aside(slot_state):
            self._say_aside(controller)
            return
        if slot_state.state is not State.READY:
            cause = None if slot_state.last_cause is None else slot_state.last_cause.of_slot(slot)
            why = f"{cause.name}: {cause.message}" if cause is not None else f"it is {slot_state.state}"
            raise CheckError(
                f"cannot reload: slot {slot} did not come up: {why}",
                cause.remedy if cause is not None else "look at `numa-launcher events`",
            )
        if slot_state.generation < least:
            raise CheckError(
                f"cannot reload: somebody has put slot {slot} back into rotation before it had restarted",
                f"`numa-launcher events --audit --slot {slot}` says who; then reload again",
            )
        await self._check(controller)

    def _say_aside(self, controller: SlotController) -> None:
        slot_state, slot = controller.slot_state, controller.slot.id
        log.info(
            "reload: slot %d is %s (%s): it changes when it starts again", slot, slot_state.state, slot_state.intent,
            extra={"slot": slot},
        )  # fmt: skip

    async def _check(self, controller: SlotController) -> None:
        """Answers as quickly as a sibling, and without an error. Raises CheckError."""
        sibling = next((k for k in self._siblings(controller) if k.slot_state.state is State.READY), None)
        new = await self._ask(controller)
        if new is None:
            raise CheckError(
                f"cannot reload: slot {controller.slot.id} gave no answer to a completion of one token",
                f"numa-launcher logs {controller.slot.id}",
            )
        old = await self._ask(sibling) if sibling is not None else None
        if old is not None and new > old * SLOWER + SLACK_S:
            raise CheckError(
                f"cannot reload: slot {controller.slot.id} took {new:.2f} s for one token, its sibling {old:.2f} s",
                "compare the two configurations with `numa-launcher reload --dry-run`",
            )
        log.info(
            "reload: slot %d answers in %.3f s", controller.slot.id, new, extra={"slot": controller.slot.id}
        )

    async def _ask(self, controller: SlotController) -> float | None:
        """The median of a few completions of one token, in seconds; None when one fails."""
        address, took = controller.instance.address, []
        if address is None:
            return None
        for _ in range(CANARIES):
            began = self._clock()
            if not await self._prober.canary(address, controller.slot.model.name, CANARY_TIMEOUT_S):
                return None
            took.append(self._clock() - began)
        return statistics.median(took)


def least_of(before: Deployment) -> Mapping[str, int]:
    """Instances that stay ready, by model, on the way to another configuration."""
    names = [slot.model.name for slot in before.plan.slots]
    return {name: least_ready(before.config.supervision.min_ready, names.count(name)) for name in names}


def _is_aside(slot_state: SlotState) -> bool:
    """An operator wants it out of rotation, or stopped."""
    return slot_state.intent in _ASIDE


def _is_over(slot_state: SlotState, least: int) -> bool:
    """A restart into life `least` has come to an end, a good one or another."""
    if _is_aside(slot_state) or slot_state.state is State.FAILED:
        return True
    if slot_state.generation < least:
        return slot_state.state is State.READY and not slot_state.restarting
    return slot_state.state in {State.READY, State.BACKOFF}


__all__ = ["CheckError", "Progress", "Rollout", "Stage", "least_of"]
