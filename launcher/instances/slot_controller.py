"""One task owns one slot: it takes events from a queue, asks `advance` for the next state, and performs the actions."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, assert_never

from msgspec.structs import replace

from launcher.base.background import Background
from launcher.base.errors import LauncherError
from launcher.base.redaction import Redactor
from launcher.engines.base import Engine, Launch
from launcher.engines.causes import Retry
from launcher.instances.diagnosis import cannot_start
from launcher.instances.instance import Instance
from launcher.instances.instance_monitor import InstanceMonitor, Misplaced, PlacementWatch, Surroundings
from launcher.instances.lifecycle import Limits, advance
from launcher.instances.model_files_reader import Identify
from launcher.instances.output import LogTail
from launcher.instances.ports import (
    Adopted,
    Caches,
    InstanceDraining,
    InstanceEvent,
    InstanceGone,
    InstanceReady,
    NoCaches,
    NoTraffic,
    Prober,
    Spawner,
    Traffic,
)
from launcher.instances.slot_state import (
    Action,
    DeadlinePassed,
    Event,
    Intent,
    ProbeFailed,
    ProbeSettings,
    ProcessAdopted,
    ProcessExited,
    SlotState,
    State,
)
from launcher.instances.state_file import HeldFile
from launcher.machine import placement
from launcher.machine.oom import OomWatch
from launcher.machine.placement import Bystander, ProcessFacts
from launcher.plan.plan import Slot

log = logging.getLogger("launcher.instances")

_RUNNING: Final = frozenset({State.STARTING, State.READY, State.DRAINING})
_WITHOUT_PROCESS: Final = frozenset({State.STOPPED, State.HELD, State.BACKOFF, State.FAILED})
_TRYING: Final = frozenset({State.STARTING, State.BACKOFF})
_TO_BE_STOPPED: Final = frozenset({Intent.STOP, Intent.HOLD})


class SlotController:
    """Owns one slot. Everything that changes it arrives in its queue."""

    def __init__(
        self,
        slot: Slot,
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
        generation: int = 0,
        clock: Callable[[], float] = time.monotonic,
        skipped: Callable[[], float] = lambda: 0.0,
        draw: Callable[[], float] = random.random,
        observe: Callable[[int], Sequence[ProcessFacts]] = placement.observe,
        bystanders: Callable[[], Sequence[Bystander]] = placement.bystanders,
        misplaced: Misplaced = placement.misplaced_threads,
        watch_memory: Callable[[int | None], OomWatch] = OomWatch,
    ) -> None:
        """`identify`: the files of a model as they are now; None: they are not looked at. `skipped`: seconds so far in which
        the event loop did not run (RunningClock): no deadline counts them."""
        self.slot = slot
        self.slot_state = SlotState(since=clock(), generation=generation)
        self.log = LogTail(probing.tail_lines)
        self.failures: Counter[str] = Counter()
        """Unrequested ends of instances, by cause."""
        self.steps = 0
        """Events dealt with."""
        self.start_s: float | None = None
        """Duration of the last start, until ready."""
        self._engine = engine
        self._spawner = spawner
        self._limits = limits
        self._probing = probing
        self._announce = announce
        self._caches = caches or NoCaches()
        self._held = held
        self._identify = identify
        self._clock = clock
        self._skipped = skipped
        self._excused = skipped()
        self._draw = draw
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks = Background(log, f"slot {slot.id}", slot=slot.id)
        self._suspected = asyncio.Event()
        self._changed = asyncio.Event()
        self._surroundings = Surroundings(
            prober=prober, traffic=traffic or NoTraffic(), caches=self._caches,
            placement=PlacementWatch(observe, bystanders, misplaced), watch_memory=watch_memory,
            log=self.log, tasks=self._tasks, clock=self.running, draw=draw, settings=lambda: self._probing, post=self.post,
        )  # fmt: skip
        self._monitor = self._monitor_of(Instance())

    @property
    def instance(self) -> Instance:
        return self._monitor.instance

    @property
    def started_from(self) -> Slot:
        """The slot, with the files of its model that the running instance was started from; unknown files stay so."""
        launch = self.instance.launch
        return self.slot if launch is None else replace(self.slot, files=launch.files)

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def stopped(self) -> bool:
        """No process, and no event is waiting that could start one."""
        return self.slot_state.state in {State.STOPPED, State.HELD} and self._events.empty()

    @property
    def unwatched(self) -> str | None:
        """Why the running instance is not being watched; None while it is, or none runs, or it is being stopped."""
        return self._monitor.unwatched(is_running=self.slot_state.state in _RUNNING)

    @property
    def backlog(self) -> int:
        return self._events.qsize()

    @property
    def in_rotation(self) -> bool:
        """Ready, and no event is waiting that could change that."""
        return self.slot_state.state is State.READY and self._events.empty()

    def running(self) -> float:
        """The clock of the instance's times: monotonic, without the time in which the event loop did not run."""
        return self._clock() - self._skipped()

    async def until(self, reached: Callable[[SlotState], bool]) -> None:
        while not reached(self.slot_state):
            self._changed.clear()
            await self._changed.wait()

    async def until_stopped(self) -> None:
        await self.until(lambda _slot: self.stopped)

    async def until_stopped_or_called_off(self) -> None:
        """Return once `stopped`, or once the intent is no longer to stop or hold."""
        await self.until(
            lambda slot: self.stopped or (not self.backlog and slot.intent not in _TO_BE_STOPPED)
        )

    def post(self, event: Event) -> None:
        if isinstance(event, ProcessExited | ProbeFailed):  # its evidence is shown to everybody who may read
            launch = self.instance.launch
            known = () if launch is None else [launch.env.get(name, "") for name in launch.secrets]
            event = replace(event, cause=event.cause.masked(Redactor(known)))
        self._events.put_nowait(event)

    def suspect(self, generation: int) -> None:
        """The proxy could not use this generation: probe it now."""
        if generation == self.slot_state.generation:
            self._suspected.set()

    def reconfigure(self, slot: Slot, engine: Engine, limits: Limits, probing: ProbeSettings) -> None:
        """`slot` and `engine` apply to the next instance; `limits` and `probing` at once."""
        self.slot, self._engine, self._limits, self._probing = slot, engine, limits, probing

    async def verify(self) -> None:
        """Compare the instance's threads and pages with the plan; the result is in `instance.verification`."""
        await self._monitor.verify()

    async def run(self, adopted: Adopted | None = None) -> None:
        """Own the slot until cancelled. The spawner decides whether its process is then killed or keeps running."""
        try:
            if adopted is not None:
                await self._adopt(adopted)
            while True:
                await self._step(await self._next_event())
        finally:
            if self.instance.process is not None:
                self.instance.process.leave()
            await self._tasks.close()

    async def _next_event(self) -> Event:
        while True:
            self._excuse_gap()
            try:
                async with asyncio.timeout_at(self._loop_deadline()):
                    return await self._events.get()
            except TimeoutError:
                if not self._excuse_gap():
                    return DeadlinePassed()

    def _excuse_gap(self) -> bool:
        """Whether the event loop did not run for a while: the instance may have been frozen, too."""
        gap, self._excused = self._skipped() - self._excused, self._skipped()
        deadline = self.slot_state.deadline
        if gap and deadline is not None:
            self.slot_state = replace(self.slot_state, deadline=deadline + gap)
        return gap > 0

    def _loop_deadline(self) -> float | None:
        if self.slot_state.deadline is None:
            return None
        return asyncio.get_running_loop().time() + max(0.0, self.slot_state.deadline - self._clock())

    async def _step(self, event: Event) -> None:
        before = self.slot_state
        self.slot_state, actions = advance(before, event, self._clock(), self._limits)
        if (self.slot_state.state, self.slot_state.generation) != (before.state, before.generation):
            self._log_transition(before)
        cause = self.slot_state.last_cause
        if cause is not None and self.slot_state.cause_generation != before.cause_generation:
            self.failures[cause.name] += 1
        for action in actions:
            await self._perform(action)
        if self._held is not None:
            await self._held.note(self.slot.id, held=self.slot_state.intent is Intent.HOLD)
        if self.slot_state.state in _WITHOUT_PROCESS:
            self._monitor = self._monitor_of(Instance())
        self.steps += 1
        self._changed.set()

    def _log_transition(self, before: SlotState) -> None:
        after = self.slot_state
        fields = {"slot": self.slot.id, "generation": after.generation, "state": after.state.value}
        cause = after.last_cause
        if cause is not before.last_cause and cause is not None:
            remedy = cause.of_slot(self.slot.id).remedy
            log.error(
                "slot %d: %s: %s; %s", self.slot.id, cause.name, cause.message, remedy,
                extra={
                    **fields, "generation": after.cause_generation, "cause": cause.name, "remedy": remedy,
                    "evidence": cause.evidence,
                },
            )  # fmt: skip
        retried = cause is not None and cause.retry is Retry.SOON and cause is before.last_cause
        if after.state is State.BACKOFF and after.deadline is not None and not retried:
            delay = max(0.0, after.deadline - self._clock())
            log.warning("slot %d: next start in %.1f s", self.slot.id, delay, extra=fields)
        level = logging.DEBUG if retried and after.state in _TRYING else logging.INFO
        log.log(level, "slot %d: %s -> %s", self.slot.id, before.state, after.state, extra=fields)

    async def _perform(self, action: Action) -> None:
        slot, generation, process = self.slot, self.slot_state.generation, self.instance.process
        match action:
            case Action.SPAWN:
                await self._spawn()
            case Action.ANNOUNCE_READY:
                address, self.start_s = self.instance.address, self.instance.start_s or self.start_s
                assert address is not None  # noqa: S101  a ready slot was spawned
                its = slot.effective
                self._announce(InstanceReady(slot.id, generation, its.name, address, its.max_num_seqs))
            case Action.ANNOUNCE_DRAINING:
                self._announce(InstanceDraining(slot.id, generation))
            case Action.ANNOUNCE_GONE:
                cut = self.slot_state.state is State.DRAINING
                reason = "its drain deadline has passed" if cut else "it is being stopped"
                self._announce(InstanceGone(slot.id, generation, reason, crashed=False))
            case Action.ANNOUNCE_FAILED:
                cause = self.slot_state.crash or self.slot_state.last_cause
                assert cause is not None  # noqa: S101  an instance that failed has one
                self._announce(InstanceGone(slot.id, generation, cause.message, crashed=True))
            case Action.TERMINATE:
                if process is not None:
                    process.terminate()
            case Action.KILL:
                if process is not None:
                    process.kill()
            case _:
                assert_never(action)

    async def _spawn(self) -> None:
        generation = self.slot_state.generation
        self._monitor = monitor = self._monitor_of(Instance(generation))
        try:
            launch = self._engine.launch(await self._with_files(), generation)
            monitor.instance.launched(launch)
            await asyncio.to_thread(self._prepare_cache, launch)
            process = await self._spawner.spawn(self.slot.id, generation, launch, monitor.on_line)
        except Exception as error:  # else the slot would wait for a process that does not exist
            # Usually a shortage (processes, files, memory) that ends soon; the crash limit handles the rest.
            self.post(ProcessExited(generation, cannot_start(self.slot.id, error), self._draw()))
            return
        monitor.follow(process, launch.address)

    async def _with_files(self) -> Slot:
        """The slot with its model's files as they are now. Raises LauncherError where those that were planned with cannot
        be read: the engine would end, and by its words for ever."""
        if self._identify is None:
            return self.slot
        try:
            return replace(self.slot, files=await self._identify(self.slot.model.path))
        except LauncherError:
            if self.slot.files is not None:
                raise
            return self.slot

    def _prepare_cache(self, launch: Launch) -> None:
        cause = self.slot_state.last_cause
        if cause is not None and cause.name == "compile-cache-corrupt":
            self._caches.purge(self.slot.id, launch)
        self._caches.prepare(self.slot.id, launch)

    async def _adopt(self, adopted: Adopted) -> None:
        """An adopted instance is probed like a new one."""
        await self._step(ProcessAdopted(adopted.generation))
        instance = Instance(adopted.generation, adopted.launch, phase="taken over", adopted=True)
        self._monitor = self._monitor_of(instance)
        adopted.follow(self._monitor.on_line)
        self._monitor.follow(adopted.process, adopted.launch.address)

    def _monitor_of(self, instance: Instance) -> InstanceMonitor:
        def is_current() -> bool:
            return instance.generation == self.slot_state.generation and self.slot_state.state in _RUNNING

        return InstanceMonitor(
            self.slot, instance, self._engine, self._surroundings, is_current=is_current,
            suspected=self._suspected,
        )  # fmt: skip
