"""One task owns one slot: events in, `advance`, actions out."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, assert_never

from launcher.address import Address
from launcher.background import Background, Failures, Running, attempt
from launcher.engines.base import Engine, Launch
from launcher.engines.phases import phase_of
from launcher.host import placement
from launcher.host.oom import SILENCE, OomWatch
from launcher.host.placement import Bystander, ProcessFacts
from launcher.instances.backoff import Limits
from launcher.instances.causes import START_FAILED, Cause, Retry
from launcher.instances.diagnosis import cannot_start, diagnose
from launcher.instances.held_file import HeldFile
from launcher.instances.instance import Instance, ProbeSettings
from launcher.instances.lifecycle import (
    Action,
    DeadlinePassed,
    Event,
    Intent,
    ProbeFailed,
    ProbeSucceeded,
    ProcessAdopted,
    ProcessExited,
    SlotState,
    State,
    advance,
)
from launcher.instances.logtail import LogLine, LogTail
from launcher.instances.null_objects import NoCaches, NoTraffic
from launcher.instances.placement_watch import PlacementWatch
from launcher.instances.ports import (
    Adopted,
    Caches,
    Exit,
    InstanceDraining,
    InstanceEvent,
    InstanceGone,
    InstanceReady,
    Prober,
    Process,
    Spawner,
    Traffic,
)
from launcher.instances.verify import Verification
from launcher.instances.watch import Watcher
from launcher.plan import Slot
from launcher.redaction import Redactor

log = logging.getLogger("launcher.instances")
# What instances print, so that it can be routed on its own: to the journal always, to a terminal when asked.
output = logging.getLogger("launcher.output")

# The phase in which vLLM has compiled everything (engines/phases.py).
COMPILED: Final = "opening the API"
# Lines that diagnosis reads.
DIAGNOSIS_LINES: Final = 400


_RUNNING: Final = frozenset({State.STARTING, State.READY, State.DRAINING})
_EMPTY: Final = frozenset({State.STOPPED, State.HELD, State.BACKOFF, State.FAILED})
_TRYING: Final = frozenset({State.STARTING, State.BACKOFF})
_RESTING: Final = frozenset({Intent.STOP, Intent.HOLD})


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
        strict_binding: bool,
        announce: Callable[[InstanceEvent], None],
        traffic: Traffic | None = None,
        caches: Caches | None = None,
        held: HeldFile | None = None,
        generation: int = 0,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        observe: Callable[[int], Sequence[ProcessFacts]] = placement.observe,
        look_around: Callable[[], Sequence[Bystander]] = placement.bystanders,
        watch_memory: Callable[[int], OomWatch] = OomWatch,
    ) -> None:
        self.slot = slot
        self.slot_state = SlotState(since=clock(), generation=generation)
        self.instance = Instance()
        self.log = LogTail(probing.tail_lines)
        self.steps = 0
        """Events dealt with."""
        self._engine = engine
        self._spawner = spawner
        self._prober = prober
        self._limits = limits
        self._probing = probing
        self._announce = announce
        self._traffic = traffic or NoTraffic()
        self._caches = caches or NoCaches()
        self._held = held
        self.start_s: float | None = None
        """How long the last start took until it was ready."""
        self._clock = clock
        self._draw = draw
        self._placement = PlacementWatch(observe, look_around, bound=strict_binding)
        self._watch_memory = watch_memory
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks = Background(log, f"slot {slot.id}", slot=slot.id)
        self._exit: Running | None = None
        self._watch: Running | None = None
        self._probe_now = asyncio.Event()
        self._changed = asyncio.Event()

    def post(self, event: Event) -> None:
        """Hand an event to the slot's owner."""
        if isinstance(event, ProcessExited | ProbeFailed):  # what it quotes is shown to all who may read
            launch = self.instance.launch
            known = () if launch is None else [launch.env.get(name, "") for name in launch.secrets]
            event = replace(event, cause=event.cause.masked(Redactor(known)))
        self._events.put_nowait(event)

    @property
    def engine(self) -> Engine:
        """What the next life is started by."""
        return self._engine

    @property
    def stopped(self) -> bool:
        """No process, and no event that could start one is waiting."""
        return self.slot_state.state in {State.STOPPED, State.HELD} and self._events.empty()

    @property
    def unwatched(self) -> str | None:
        """Why the running instance is not being watched; None while it is, or none runs, or it is being stopped: that has
        a deadline of its own."""
        if self.instance.process is None:
            return None
        for task in (self._exit, self._watch if self.slot_state.state in _RUNNING else None):
            if task is not None and not task.alive:
                return f"{task.failures.what}: not running"
        if self._clock() <= self.instance.watched_until or self.slot_state.state not in _RUNNING:
            return None
        looked_at = self.instance.looked_at
        since = (
            "no look has succeeded" if looked_at is None else f"no look for {self._clock() - looked_at:.0f} s"
        )
        why = self._watch.failures.last if self._watch is not None else ""
        return f"{since}: {why}" if why else since

    @property
    def backlog(self) -> int:
        """Events that wait for its owner."""
        return self._events.qsize()

    @property
    def in_rotation(self) -> bool:
        """It is in rotation, and nothing that is waiting could change that."""
        return self.slot_state.state is State.READY and self._events.empty()

    async def until(self, reached: Callable[[SlotState], bool]) -> None:
        """Return once `reached` holds of the slot_state."""
        while not reached(self.slot_state):
            self._changed.clear()
            await self._changed.wait()

    async def until_stopped(self) -> None:
        """Return once it has stopped for good."""
        await self.until(lambda _slot: self.stopped)

    async def until_stopped_or_called_off(self) -> None:
        """Return once it has stopped, or somebody wants something else of it than that."""
        await self.until(lambda slot: self.stopped or (not self.backlog and slot.intent not in _RESTING))

    def suspect(self, generation: int) -> None:
        """The proxy saw this life fail: probe it at once."""
        if generation == self.slot_state.generation:
            self._probe_now.set()

    def use(self, slot: Slot, engine: Engine, limits: Limits, probing: ProbeSettings) -> None:
        """What the next life is started as; the one that runs goes on as it is, under the new limits."""
        self.slot, self._engine, self._limits, self._probing = slot, engine, limits, probing

    async def run(self, adopted: Adopted | None = None) -> None:
        """Own the slot until cancelled. What runs then is left as the spawner does it: killed, or to go on."""
        try:
            if adopted is not None:
                await self._take_over(adopted)
            while True:
                await self._step(await self._next_event())
        finally:
            if self.instance.process is not None:
                self.instance.process.leave()
            await self._tasks.close()

    async def _next_event(self) -> Event:
        try:
            async with asyncio.timeout_at(self._loop_deadline()):
                return await self._events.get()
        except TimeoutError:
            return DeadlinePassed()

    def _loop_deadline(self) -> float | None:
        if self.slot_state.deadline is None:
            return None
        return asyncio.get_running_loop().time() + max(0.0, self.slot_state.deadline - self._clock())

    async def _step(self, event: Event) -> None:
        before = self.slot_state
        self.slot_state, actions = advance(before, event, self._clock(), self._limits)
        if self.slot_state.state is not before.state or self.slot_state.generation != before.generation:
            self._tell(before)
        if self._held is not None:
            self._held.note(self.slot.id, held=self.slot_state.intent is Intent.HOLD)
        for action in actions:
            await self._perform(action)
        if self.slot_state.state in _EMPTY:
            self.instance = Instance()  # nothing runs: no address, no verification to show
        self.steps += 1
        self._changed.set()

    def _tell(self, before: SlotState) -> None:
        slot_state = self.slot_state
        fields = {"slot": self.slot.id, "generation": slot_state.generation, "state": slot_state.state.value}
        cause = slot_state.last_cause
        if slot_state.last_cause is not before.last_cause and cause is not None:
            log.error(
                "slot %d: %s: %s; %s", self.slot.id, cause.name, cause.message, cause.of_slot(self.slot.id).remedy,
                extra={**fields, "cause": cause.name},
            )  # fmt: skip
        tries = cause is not None and cause.retry is Retry.SOON and cause is before.last_cause
        if slot_state.state is State.BACKOFF and slot_state.deadline is not None and not tries:
            log.warning(
                "slot %d: next start in %.1f s",
                self.slot.id,
                slot_state.deadline - self._clock(),
                extra=fields,
            )
        level = logging.DEBUG if tries and slot_state.state in _TRYING else logging.INFO
        log.log(level, "slot %d: %s -> %s", self.slot.id, before.state, slot_state.state, extra=fields)

    async def _perform(self, action: Action) -> None:
        match action:
            case Action.SPAWN:
                await self._spawn()
            case Action.ANNOUNCE_READY:
                self._announce_ready()
            case Action.ANNOUNCE_DRAINING:
                self._announce(InstanceDraining(self.slot.id, self.slot_state.generation))
            case Action.ANNOUNCE_GONE:
                cause = self.slot_state.crash or self.slot_state.last_cause
                reason = (
                    cause.message
                    if cause and self.slot_state.state is not State.STOPPING
                    else "it is being stopped"
                )
                self._announce(InstanceGone(self.slot.id, self.slot_state.generation, reason))
            case Action.TERMINATE:
                if self.instance.process is not None:
                    self.instance.process.terminate()
            case Action.KILL:
                if self.instance.process is not None:
                    self.instance.process.kill()
            case _:
                assert_never(action)

    async def _spawn(self) -> None:
        generation = self.slot_state.generation
        self.instance = instance = Instance()
        try:
            launch = self._engine.launch(self.slot, generation)
            instance.launch, instance.address = launch, launch.address
            await asyncio.to_thread(self._prepare, launch)
            process = await self._spawner.spawn(
                self.slot.id, generation, launch, lambda line: self._heard(generation, line)
            )
        except Exception as error:  # else the slot would wait for a process that never was
            # Mostly a shortage (processes, files, memory) that may be over soon; the crash limit ends the rest.
            self.post(ProcessExited(generation, cannot_start(self.slot.id, error), self._draw()))
            return
        self._follow(generation, process, launch.address)

    def _prepare(self, launch: Launch) -> None:
        """In a thread: the compile cache as this start should find it."""
        if (
            self.slot_state.last_cause is not None
            and self.slot_state.last_cause.name == "compile-cache-corrupt"
        ):
            self._caches.purge(self.slot.id, launch)
        self._caches.prepare(self.slot.id, launch)

    async def _take_over(self, adopted: Adopted) -> None:
        """An earlier daemon's instance: it is probed as one that has just started."""
        generation, launch = adopted.generation, adopted.launch
        await self._step(ProcessAdopted(generation))
        self.instance = Instance(launch=launch, address=launch.address, phase="taken over", taken_over=True)
        adopted.follow(lambda line, at: self._heard(generation, line, at))
        self._follow(generation, adopted.process, launch.address)

    def _follow(self, generation: int, process: Process, address: Address) -> None:
        self.instance.process = process
        self.instance.pids = frozenset({process.pid})
        self.instance.oom = self._watch_memory(process.pid)
        instance = self.instance
        instance.began = self._clock()
        instance.watched_until = instance.began + self._probing.unwatched_s
        self._exit = self._tasks.start(
            lambda: self._await_exit(generation, instance, process),
            "wait for its exit",
            lambda: instance.process is not None,
        )
        watcher = self._watcher(generation, instance)
        self._watch = self._tasks.start(
            lambda: self._look(generation, instance, watcher, address),
            "watch",
            lambda: self._lives(generation),
        )

    def _heard(self, generation: int, text: str, at: float | None = None) -> None:
        self.log.add(LogLine(time.time() if at is None else at, generation, text))
        phase = phase_of(text)
        if phase is not None and generation == self.slot_state.generation:
            self.instance.phase = phase
            if phase == COMPILED:
                self._keep_cache(generation)
        if self.instance.doomed_at is None and not self.instance.served and START_FAILED.search(text):
            self.instance.doomed_at = self._clock()
        output.info(
            "slot %d | %s", self.slot.id, text, extra={"slot": self.slot.id, "generation": generation}
        )

    def _announce_ready(self) -> None:
        assert self.instance.address is not None  # noqa: S101  a ready slot was spawned
        self._announce(
            InstanceReady(
                self.slot.id,
                self.slot_state.generation,
                self.slot.model.name,
                self.instance.address,
                self.slot.model.max_num_seqs,
            )
        )

    async def _await_exit(self, generation: int, instance: Instance, process: Process) -> None:
        ended = await process.wait()
        instance.process = None
        try:
            cause = self._cause_of(ended, generation, instance)
        except Exception:  # that it has ended matters more than why
            log.exception("slot %d: cannot say why its instance ended", self.slot.id)
            cause = diagnose(ended, ())
        self.post(ProcessExited(generation, cause, self._draw()))

    def _cause_of(self, ended: Exit, generation: int, instance: Instance) -> Cause:
        kernel = SILENCE
        if instance.oom is not None:
            kernel = instance.oom.word(instance.pids, instance.nodes)
            instance.oom.close()
        return diagnose(ended, self._last_words(generation), served=instance.served, kernel=kernel)

    def _keep_cache(self, generation: int) -> None:
        """Once what it compiles lies there."""
        instance, launch = self.instance, self.instance.launch

        async def keep() -> None:
            if launch is not None and not instance.compiled:
                await asyncio.to_thread(self._caches.keep, self.slot.id, launch)
                instance.compiled = True
                self._changed.set()

        self._tasks.start(keep, "compile cache", lambda: self._lives(generation))

    def _last_words(self, generation: int) -> list[str]:
        return [line.text for line in self.log.last(DIAGNOSIS_LINES, generation)]

    def _lives(self, generation: int) -> bool:
        return self.slot_state.generation == generation and self.slot_state.state in _RUNNING

    def _watcher(self, generation: int, instance: Instance) -> Watcher:
        return Watcher(
            self.slot,
            generation,
            instance,
            engine=self._engine,
            prober=self._prober,
            traffic=self._traffic,
            probing=self._probing,
            clock=self._clock,
            lives=lambda: self._lives(generation),
            suspected=self._probe_now,
            last_words=lambda: self._last_words(generation),
            looked=self._looked,
        )

    def _looked(self) -> None:
        if self._watch is not None:
            self._watch.failures.end()

    async def _look(self, generation: int, instance: Instance, watcher: Watcher, address: Address) -> None:
        """Until it is ready, then whether it goes on. Begun again where a look fails."""
        while self._lives(generation):
            if instance.served:
                cause = await watcher.failure(address)
            elif isinstance(found := await watcher.ready(address), Cause):
                cause = found
            else:
                cause = None
                if found:
                    self._is_ready(generation, instance)
            if cause is not None:
                self.post(ProbeFailed(generation, cause))
                await asyncio.sleep(self._probing.recheck_s)  # one in quarantine goes on, and so do the looks

    def _is_ready(self, generation: int, instance: Instance) -> None:
        if not instance.taken_over:
            self.start_s = self._clock() - instance.began
        self.post(ProbeSucceeded(generation))
        # On its own: reading a large worker's numa_maps takes a while, and must not keep us from watching.
        self._tasks.start(
            lambda: self._verify_now_and_then(generation), "verify", lambda: self._lives(generation)
        )
        self._keep_cache(generation)

    async def _verify_now_and_then(self, generation: int) -> None:
        """Threads move when somebody uses taskset, or irqbalance thinks it should."""
        failures = Failures(log, f"slot {self.slot.id}: look at its placement", slot=self.slot.id)
        while self._lives(generation):
            await attempt(self.verify, failures)
            await asyncio.sleep(self._probing.verify_interval_s)

    async def verify(self) -> Verification | None:
        """Look where the instance's threads and pages are; the result stays in `life`."""
        texts = [line.text for line in self.log.last(self._probing.tail_lines, self.slot_state.generation)]
        return await self._placement.look(self.slot, self.instance, texts)
