"""All slots of a plan: one task each, and one place for events and questions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from msgspec import Struct

from launcher.base.errors import NotFoundError, RefusedError
from launcher.engines.base import Engine
from launcher.instances.lifecycle import Limits
from launcher.instances.model_files_reader import Identify
from launcher.instances.ports import Caches, InstanceEvent, Prober, Spawner, Traffic
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import (
    Event,
    HoldRequested,
    Intent,
    KillRequested,
    ProbeSettings,
    ReleaseRequested,
    ResumeRequested,
    StartRequested,
    State,
    StopRequested,
    WentIdle,
)
from launcher.instances.state_file import HeldFile
from launcher.plan.plan import Plan, Slot

# One step may copy a compile cache, or wait for a busy systemd.
STUCK_S: Final = 600.0


class Supervisor:
    def __init__(
        self,
        plan: Plan,
        *,
        engine: Engine,
        spawner: Spawner,
        prober: Prober,
        limits: Limits,
        probing: ProbeSettings,
        announce: Callable[[InstanceEvent], None],
        traffic: Traffic | None = None,
        caches: Caches | None = None,
        held: HeldFile | None = None,
        identify: Identify | None = None,
        skipped: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`skipped`: seconds so far in which the event loop did not run."""
        self._ending = False
        self._adopted: frozenset[int] = frozenset()
        """Slots with an adopted instance."""
        self._adoption_known = asyncio.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        """By slot: steps of its controller, and when that number was seen first."""
        self._start_order = plan.start_order
        self._engine = engine
        self._held_file = held
        self._held = frozenset() if held is None else held.slots
        """Slots that were held when an earlier daemon stopped."""
        self._pending = {slot.id for slot in plan.slots} - self._held
        """Slots that wait for their first start; an operator's command removes a slot from it."""
        self._last_generation: dict[int, int] = {}
        """By removed slot: its last generation. The proxy ignores lower ones, so they are not reused."""
        self._failures_of_removed: Counter[str] = Counter()
        self._spawner = spawner
        self._make: Callable[[Slot, Engine, Limits, ProbeSettings], SlotController] = (
            lambda slot, engine, limits, probing: SlotController(
                slot, engine=engine, spawner=spawner, prober=prober, limits=limits, probing=probing,
                announce=announce, traffic=traffic, caches=caches, held=held,
                identify=identify, skipped=skipped, generation=self._last_generation.get(slot.id, 0),
            )
        )  # fmt: skip
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._controllers: dict[int, SlotController] = {
            slot.id: self._make(slot, engine, limits, probing) for slot in plan.slots
        }

    @property
    def controllers(self) -> Mapping[int, SlotController]:
        return self._controllers

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator asked of an earlier daemon and this one does not know."""
        held = self._held_file
        return (held.lost,) if held is not None and held.lost else ()

    @property
    def failures(self) -> Counter[str]:
        """Unrequested ends of instances by cause, also of removed slots: it never falls."""
        return sum((each.failures for each in self._controllers.values()), self._failures_of_removed.copy())

    def controller(self, slot: int) -> SlotController:
        try:
            return self._controllers[slot]
        except KeyError:
            known = ", ".join(str(known) for known in self._controllers)
            raise NotFoundError(f"cannot use slot '{slot}': no such slot", f"slots are {known}") from None

    async def run(self) -> None:
        """Adopt or start an instance in every slot; run the controllers until cancelled."""
        adopted = await self._spawner.adopt(
            {
                slot: partial(self._engine.launch, controller.slot)
                for slot, controller in self._controllers.items()
            }
        )
        self._adopted = frozenset(adopted)
        self._adoption_known.set()
        async with asyncio.TaskGroup() as group:
            self._group = group
            for slot, controller in self._controllers.items():
                self._tasks[slot] = group.create_task(controller.run(adopted.get(slot)), name=f"slot {slot}")
            await self._start_all()

    async def adopted(self) -> None:
        """Return when the controllers have adopted the running instances of an earlier daemon."""
        await self._adoption_known.wait()
        for slot in self._adopted & self._controllers.keys():
            await self._controllers[slot].until(lambda slot: slot.generation > 0)

    async def adopted_ready(self) -> None:
        """Return when, of each model with adopted instances, one is ready or all have failed."""
        await self._adoption_known.wait()
        models: dict[str, list[SlotController]] = {}
        for slot in self._adopted & self._controllers.keys():
            models.setdefault(self._controllers[slot].slot.model.name, []).append(self._controllers[slot])
        for controllers in models.values():
            waits = [
                asyncio.create_task(_until_probed(controller), name="adopted") for controller in controllers
            ]
            try:
                for probed in asyncio.as_completed(waits):
                    if await probed is State.READY:
                        break
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    def add(self, slot: Slot, engine: Engine, limits: Limits, probing: ProbeSettings) -> SlotController:
        assert self._group is not None  # noqa: S101  the supervisor runs
        controller = self._controllers[slot.id] = self._make(slot, engine, limits, probing)
        self._tasks[slot.id] = self._group.create_task(controller.run(), name=f"slot {slot.id}")
        return controller

    async def remove(self, slot: int) -> None:
        """Drain, stop and remove a slot, even if an operator starts it meanwhile. Raises NotFoundError."""
        controller = self.controller(slot)
        self._pending.discard(slot)
        while not controller.stopped:
            controller.post(StopRequested())
            await controller.until_stopped_or_called_off()
        self._failures_of_removed += controller.failures
        self._last_generation[slot] = controller.slot_state.generation
        task = self._tasks.pop(slot)
        del self._controllers[slot]
        task.cancel()
        await asyncio.wait({task})

    async def _start_all(self) -> None:
        """One batch of `Plan.start_order` after the other, each when the one before has loaded. A quarantined slot, having
        no deadline, is not waited for; a slot that got another command meanwhile is not started."""
        for slot in self._held & self._controllers.keys():
            self._controllers[slot].post(HoldRequested())
        for batch in self._start_order:
            if self._ending:
                return
            for slot in batch:
                if slot in self._pending:
                    self.post(slot, StartRequested())
            for slot in batch:
                if slot in self._controllers:
                    await _until_loaded(self._controllers[slot])

    def post(self, slot: int, event: Event) -> None:
        self.controller(slot).post(event)
        if not isinstance(event, ResumeRequested | ReleaseRequested):
            self._pending.discard(slot)

    def went_idle(self, slot: int, generation: int) -> None:
        """The proxy has no request on a draining instance."""
        self.post(slot, WentIdle(generation))

    def suspect(self, slot: int, generation: int) -> None:
        """The proxy could not use an instance."""
        self.controller(slot).suspect(generation)

    def makes_progress(self, now: float) -> bool:
        """False where a controller has had events for STUCK_S without handling one."""
        for slot, controller in self._controllers.items():
            steps, since = self._seen.get(slot, (-1, now))
            if controller.steps != steps or not controller.backlog:
                self._seen[slot] = (controller.steps, now)
            elif now - since > STUCK_S:
                return False
        return True

    async def stop(self) -> None:
        """Drain and stop every slot; return when none has a process."""
        await self._end_all(StopRequested())

    async def kill(self) -> None:
        """End every slot at once; return when none has a process."""
        await self._end_all(KillRequested())

    async def _end_all(self, event: StopRequested | KillRequested) -> None:
        self._ending = True
        controllers = tuple(self._controllers.values())
        for controller in controllers:
            controller.post(event)
        for controller in controllers:
            await controller.until_stopped()


async def _until_loaded(controller: SlotController) -> None:
    await controller.until(
        lambda slot: (
            not controller.backlog and (slot.state is not State.STARTING or slot.intent is Intent.QUARANTINE)
        )
    )


async def _until_probed(controller: SlotController) -> State:
    await controller.until(lambda slot: slot.generation > 0 and slot.state is not State.STARTING)
    return controller.slot_state.state


# --- Whether a command may take one more instance out of rotation (N-1). ---


class Availability(Struct, frozen=True):
    model: str
    ready: bool
    """In rotation, and no request is waiting that will change that."""


def min_ready_of(min_ready: int | None, slots: int) -> int:
    """Instances of a model that must stay ready: `supervision.min_ready`; if unset, 1 for a model with two or more."""
    return (1 if slots > 1 else 0) if min_ready is None else min_ready


def check(command: str, slot: int, slots: Mapping[int, Availability], min_ready: int | None) -> None:
    """Raise RefusedError where `command` on `slot` would leave fewer than `min_ready` of its model.

    A slot that is not in rotation may always be changed."""
    target = slots[slot]
    same = {number: other for number, other in slots.items() if other.model == target.model}
    minimum = min_ready_of(min_ready, len(same))
    left = sum(other.ready for number, other in same.items() if number != slot)
    if target.ready and left < minimum:
        raise RefusedError(
            f"cannot {command} slot '{slot}': {left} instances of '{target.model}' would be left ready, "
            f"and supervision.min_ready is {minimum}",
            "wait until the others are ready (`numa-launcher status`), or add --force",
        )
