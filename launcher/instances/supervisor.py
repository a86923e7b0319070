"""All slots: one task each, one proxy for events and questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from launcher.engines.base import Engine
from launcher.errors import NotFoundError
from launcher.instances.backoff import Limits
from launcher.instances.held_file import HeldFile
from launcher.instances.ports import Caches, InstanceEvent, Prober, Spawner, Traffic
from launcher.instances.probe_settings import ProbeSettings
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import (
    Event,
    HoldRequested,
    Intent,
    KillRequested,
    ReleaseRequested,
    ResumeRequested,
    StartRequested,
    State,
    StopRequested,
    WentIdle,
)
from launcher.plan import Plan, Slot

# A step may copy a compile cache, or wait for a busy systemd.
STUCK_S: Final = 600.0


class Supervisor:
    """Keeps every slot of a plan as its operator wants it."""

    def __init__(
        self,
        plan: Plan,
        *,
        engine: Engine,
        spawner: Spawner,
        prober: Prober,
        limits: Limits,
        probing: ProbeSettings,
        strict_binding: bool,
        announce: Callable[[InstanceEvent], None],
        traffic: Traffic | None = None,
        caches: Caches | None = None,
        held: HeldFile | None = None,
    ) -> None:
        self._ending = False
        self._left: frozenset[int] = frozenset()
        """Slots whose instances an earlier daemon left."""
        self._asked_for_left = asyncio.Event()
        self._seen: dict[int, tuple[int, float]] = {}
        """Steps that each slot's owner had made, and when that was seen first."""
        self._start_order = plan.start_order
        self._engine = engine
        self._held = frozenset() if held is None else held.slots
        """Slots that an earlier daemon was told to hold."""
        self._pending = {slot.id for slot in plan.slots} - self._held
        """Slots whose first start is still to come, and of which nobody has asked anything else."""
        self._last_generation: dict[int, int] = {}
        """Generation of the last life of slots that were removed: whoever knows it takes a lower one for overtaken."""
        self._spawner = spawner
        self._make: Callable[[Slot, Engine, Limits, ProbeSettings], SlotController] = (
            lambda slot, engine, limits, probing: SlotController(
                slot,
                engine=engine,
                spawner=spawner,
                prober=prober,
                limits=limits,
                probing=probing,
                strict_binding=strict_binding,
                announce=announce,
                traffic=traffic,
                caches=caches,
                held=held,
                generation=self._last_generation.get(slot.id, 0),
            )
        )
        self._group: asyncio.TaskGroup | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._controllers: dict[int, SlotController] = {
            slot.id: self._make(slot, engine, limits, probing) for slot in plan.slots
        }

    @property
    def controllers(self) -> Mapping[int, SlotController]:
        """The slots' owners, by slot."""
        return self._controllers

    def controller(self, slot: int) -> SlotController:
        """The owner of a slot. Raises LauncherError when there is none."""
        try:
            return self._controllers[slot]
        except KeyError:
            known = ", ".join(str(known) for known in self._controllers)
            raise NotFoundError(
                f"cannot use slot '{slot}': there is none of that number", f"slots are {known}"
            ) from None

    async def run(self) -> None:
        """Start every slot and own them until cancelled."""
        adopted = await self._spawner.adopt(
            {
                slot: partial(self._engine.launch, controller.slot)
                for slot, controller in self._controllers.items()
            }
        )
        self._left = frozenset(adopted)
        self._asked_for_left.set()
        async with asyncio.TaskGroup() as group:
            self._group = group
            for slot, controller in self._controllers.items():
                self._tasks[slot] = group.create_task(controller.run(adopted.get(slot)), name=f"slot {slot}")
            await self._start_all()

    async def begun(self) -> None:
        """Return when every slot's owner runs, and those of instances that an earlier daemon left have them."""
        await self._asked_for_left.wait()
        for slot in self._left & self._controllers.keys():
            await self._controllers[slot].until(lambda slot: slot.generation > 0)

    async def taken_over(self) -> None:
        """Return when each model with an instance that an earlier daemon left has one that is ready, or none left."""
        await self._asked_for_left.wait()
        models: dict[str, list[SlotController]] = {}
        for slot in self._left & self._controllers.keys():
            models.setdefault(self._controllers[slot].slot.model.name, []).append(self._controllers[slot])
        for controllers in models.values():
            waits = [
                asyncio.create_task(_until_settled(controller), name="taken over")
                for controller in controllers
            ]
            try:
                for settled in asyncio.as_completed(waits):
                    if await settled is State.READY:
                        break
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    def add(self, slot: Slot, engine: Engine, limits: Limits, probing: ProbeSettings) -> SlotController:
        """One more slot, stopped; its owner lives as long as the others."""
        assert self._group is not None  # noqa: S101  the supervisor runs
        controller = self._controllers[slot.id] = self._make(slot, engine, limits, probing)
        self._tasks[slot.id] = self._group.create_task(controller.run(), name=f"slot {slot.id}")
        return controller

    async def remove(self, slot: int) -> None:
        """Drain and stop a slot, whoever starts it meanwhile, and forget it. Raises NotFoundError."""
        controller = self.controller(slot)
        self._pending.discard(slot)
        while not controller.stopped:
            controller.post(StopRequested())
            await controller.until_stopped_or_called_off()
        self._last_generation[slot] = controller.slot_state.generation
        task = self._tasks.pop(slot)
        del self._controllers[slot]
        task.cancel()
        await asyncio.wait({task})

    async def _start_all(self) -> None:
        """Wave by wave (`Plan.start_order`): the next one when no slot of this one is still loading, less those in
        quarantine, which have no deadline. A slot of which somebody has asked something meanwhile is left to him."""
        for slot in self._held & self._controllers.keys():
            self._controllers[slot].post(HoldRequested())
        for wave in self._start_order:
            if self._ending:
                return
            for slot in wave:
                if slot in self._pending:
                    self.post(slot, StartRequested())
            for slot in wave:
                if slot in self._controllers:
                    await _until_loaded(self._controllers[slot])

    def post(self, slot: int, event: Event) -> None:
        """Hand an event to a slot's owner. Raises LauncherError for an unknown slot."""
        self.controller(slot).post(event)
        if not isinstance(event, ResumeRequested | ReleaseRequested):
            self._pending.discard(slot)

    def went_idle(self, slot: int, generation: int) -> None:
        """The proxy has nothing in flight on a draining instance."""
        self.post(slot, WentIdle(generation))

    def suspect(self, slot: int, generation: int) -> None:
        """The proxy could not use an instance."""
        self.controller(slot).suspect(generation)

    def moves(self, now: float) -> bool:
        """Whether every slot's owner works: none has had something to do for STUCK_S without doing anything."""
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


async def _until_settled(controller: SlotController) -> State:
    await controller.until(lambda slot: slot.generation > 0 and slot.state is not State.STARTING)
    return controller.slot_state.state
