"""Everything that follows one instance: its output, exit, probes, placement and compile cache; it posts events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from launcher.base.address import Address
from launcher.base.background import Background, Failures, Running, attempt
from launcher.base.cpuset import CpuSet
from launcher.engines.base import Engine, Expected
from launcher.engines.causes import Cause
from launcher.engines.log import Accelerator
from launcher.instances.diagnosis import UNHEALTHY, diagnose, part_exited, rank_died
from launcher.instances.instance import Instance
from launcher.instances.output import LogLine, LogTail
from launcher.instances.ports import Caches, Exit, Prober, Process, Traffic
from launcher.instances.slot_state import Event, ProbeFailed, ProbeSettings, ProbeSucceeded, ProcessExited
from launcher.instances.verify import NOTHING, Verification, verify
from launcher.instances.watch import Watcher
from launcher.machine.oom import NO_REPORT, OomWatch
from launcher.machine.placement import Bystander, MisplacedThread, ProcessFacts
from launcher.plan.plan import Slot

log = logging.getLogger("launcher.instances")


# --- Compares an instance's threads and pages with the plan; logs each new difference once. ---

Misplaced = Callable[[Iterable[int], CpuSet], tuple[MisplacedThread, ...]]


class PlacementWatch:
    """`observe` reads a process and its descendants, `bystanders` all other processes, `misplaced` threads outside some
    cpus."""

    def __init__(
        self,
        observe: Callable[[int], Sequence[ProcessFacts]],
        bystanders: Callable[[], Sequence[Bystander]],
        misplaced: Misplaced,
    ) -> None:
        self._observe = observe
        self._bystanders = bystanders
        self._misplaced = misplaced

    async def verify(
        self, slot: Slot, instance: Instance, output: Sequence[str], accelerator: Accelerator | None
    ) -> None:
        """Leave the result in `instance.verification`. `output`: the instance's last lines; `accelerator`: its engine's.
        Nothing where there is no process, or a container's is not found."""
        process = instance.process
        if process is None or (pid := process.pid) is None:
            return
        facts = await asyncio.to_thread(self._observe, pid)
        pids = frozenset(process_facts.pid for process_facts in facts)
        others = [other for other in await asyncio.to_thread(self._bystanders) if other.pid not in pids]
        misplaced = await asyncio.to_thread(self._misplaced, pids, slot.placement.cpus)
        if instance.process is not process:
            return  # it ended meanwhile
        instance.misplaced_now(misplaced)
        expected = _expected(instance, output, accelerator)
        found = verify(slot.placement, facts, expected=expected, others=others)
        before, active = instance.verification, None
        if accelerator is not None:
            active = accelerator.active(output, " ".join(found.libraries))
        instance.verified(found, pids, zentorch=active)
        _log_new({"slot": slot.id, "generation": instance.generation}, before, found)

    async def threads_moved(self, slot: Slot, instance: Instance) -> bool:
        """Whether other threads than before are outside the slot's cpus. Cheap: `verify` reads the node of each page."""
        process, before = instance.process, instance.misplaced
        found = await asyncio.to_thread(self._misplaced, instance.tree, slot.placement.cpus)
        if process is None or instance.process is not process:
            return False
        instance.misplaced_now(found)
        return found != before


def _expected(instance: Instance, output: Sequence[str], accelerator: Accelerator | None) -> Expected:
    expected = NOTHING if instance.launch is None else instance.launch.expected
    if not instance.served:
        return expected.while_starting
    if accelerator is None or not accelerator.active(output, ""):
        return expected
    return replace(expected, libraries=(*expected.libraries, frozenset({accelerator.library})))


def _log_new(where: Mapping[str, int], before: Verification | None, found: Verification) -> None:
    slot = where["slot"]
    for problem in found.problems:
        if before is None or problem not in before.problems:
            log.warning("slot %d: placement differs from the plan: %s", slot, problem, extra=where)
    foreign = [process for process in found.foreign if before is None or process not in before.foreign]
    if foreign:
        more = f", and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        log.warning(
            "slot %d: other processes on its cpus: %s%s; `numa-launcher verify %d` shows all",
            slot, foreign[0], more, slot, extra=where,
        )  # fmt: skip


# The instances' own output: always to the journal, to a terminal on request.
output = logging.getLogger("launcher.output")

# Lines that the diagnosis of an exit reads.
DIAGNOSIS_LINES: Final = 400


class Surroundings(Struct, frozen=True):
    """What the monitors of one slot have in common. `post` takes events; `draw` returns a number in [0, 1)."""

    prober: Prober
    traffic: Traffic
    caches: Caches
    placement: PlacementWatch
    watch_memory: Callable[[int | None], OomWatch]
    log: LogTail
    tasks: Background
    clock: Callable[[], float]
    draw: Callable[[], float]
    settings: Callable[[], ProbeSettings]
    post: Callable[[Event], None]


class InstanceMonitor:
    """Follows `instance` for as long as `is_current`: the slot has its generation, and it is not being stopped."""

    def __init__(
        self,
        slot: Slot,
        instance: Instance,
        engine: Engine,
        surroundings: Surroundings,
        *,
        is_current: Callable[[], bool],
        suspected: asyncio.Event,
    ) -> None:
        self.instance = instance
        self._slot = slot
        self._engine = engine
        self._on = surroundings
        self._is_current = is_current
        self._exit: Running | None = None
        self._probes: Running | None = None
        self._lost_rank = False
        self._watcher = Watcher(
            slot, instance, engine=engine, prober=surroundings.prober, traffic=surroundings.traffic,
            settings=surroundings.settings, clock=surroundings.clock, is_current=is_current,
            suspected=suspected, output=self._last_lines, on_probed=self._on_probed,
        )  # fmt: skip

    def on_line(self, text: str, at: float | None = None) -> None:
        """A line that the instance printed, at this time in seconds since the epoch."""
        slot, generation = self._slot.id, self.instance.generation
        self._on.log.add(LogLine(time.time() if at is None else at, generation, text))
        if (phase := self._engine.log.phase_of(text)) is not None:
            self.instance.reached(phase)
            if phase == self._engine.log.compiled:
                self._keep_cache()
        if self._engine.log.start_failed.search(text):
            self.instance.start_failed(self._on.clock())
        output.info("slot %d | %s", slot, text, extra={"slot": slot, "generation": generation})

    def _last_lines(self) -> list[str]:
        return [line.text for line in self._on.log.last(DIAGNOSIS_LINES, self.instance.generation)]

    def follow(self, process: Process, address: Address) -> None:
        """Begin to wait for the exit of `process`, and to probe it at `address`."""
        oom = self._on.watch_memory(process.pid)
        self.instance.spawned(process, oom, self._on.clock(), self._on.settings().unwatched_s)
        self._exit = self._on.tasks.start(
            lambda: self._await_exit(process), "wait for its exit", lambda: self.instance.process is not None
        )
        self._probes = self._on.tasks.start(lambda: self._probe(address), "watch", self._is_current)

    async def _await_exit(self, process: Process) -> None:
        ended = await process.wait()
        self.instance.exited()
        try:
            cause = self._cause_of(ended)
        except Exception:  # a missing diagnosis must not hide the exit
            log.exception("slot %d: cannot diagnose the exit of its instance", self._slot.id)
            cause = diagnose(ended, (), self._engine.log)
        self._on.post(ProcessExited(self.instance.generation, cause, self._on.draw()))

    def _cause_of(self, ended: Exit) -> Cause:
        instance, kernel = self.instance, NO_REPORT
        if instance.oom is not None:
            kernel = instance.oom.report(instance.pids, instance.nodes)
            instance.oom.close()
        return diagnose(
            ended, self._last_lines(), self._engine.log, served=instance.served, kernel=kernel,
            ranks=self._slot.effective.tensor_parallel_size, lost_rank=self._lost_rank,
        )  # fmt: skip

    async def _probe(self, address: Address) -> None:
        """Until the instance is ready, then for its health. A probe that raises starts this again."""
        while self._is_current():
            if self.instance.served:
                cause = await self._watcher.failure(address)
            elif isinstance(found := await self._watcher.ready(address), Cause):
                cause = found
            else:
                cause = None
                if found:
                    self._on_ready()
            if cause is not None:
                # An engine whose rank died answers 503 before it ends; the log tells more.
                if cause.name == UNHEALTHY and rank_died(self._last_lines(), self._engine.log):
                    self._lost_rank, cause = True, part_exited()
                self._on.post(ProbeFailed(self.instance.generation, cause))
                await asyncio.sleep(self._on.settings().recheck_s)  # a quarantined instance is probed further

    def _on_ready(self) -> None:
        self._on.post(ProbeSucceeded(self.instance.generation))
        # A task of its own: reading a large process's numa_maps takes a while and must not delay the probes.
        self._on.tasks.start(self._verify_periodically, "verify", self._is_current)
        self._keep_cache()

    def _on_probed(self) -> None:
        if self._probes is not None:
            self._probes.failures.end()

    def unwatched(self, *, is_running: bool) -> str | None:
        """Why the instance is not being watched; None while it is, or has no process. One that is being stopped
        (`is_running` is false) needs no probes: its stop has a deadline."""
        if self.instance.process is None:
            return None
        for task in (self._exit, self._probes if is_running else None):
            if task is not None and not task.alive:
                return f"{task.failures.what}: not running"
        now, probed_at = self._on.clock(), self.instance.probed_at
        if now <= self.instance.watched_until or not is_running:
            return None
        since = "no probe has succeeded" if probed_at is None else f"no probe for {now - probed_at:.0f} s"
        why = self._probes.failures.last if self._probes is not None else ""
        return f"{since}: {why}" if why else since

    def _keep_cache(self) -> None:
        launch = self.instance.launch

        async def keep() -> None:
            if launch is not None and not self.instance.cache_kept:
                await asyncio.to_thread(self._on.caches.keep, self._slot.id, launch)
                self.instance.kept_cache()

        if self._is_current():
            self._on.tasks.start(keep, "compile cache", self._is_current)

    async def _verify_periodically(self) -> None:
        """taskset or irqbalance may move threads at any time."""
        failures = Failures(log, f"slot {self._slot.id}: verify its placement", slot=self._slot.id)
        while self._is_current():
            process = self.instance.process
            if process is not None and process.pid is None:  # a container's, not found yet
                await asyncio.sleep(self._on.settings().threads_interval_s)
                continue
            await attempt(self.verify, failures)
            await self._until_threads_move()

    async def _until_threads_move(self) -> None:
        """Return after `verify_interval_s`, or soon after a thread has left the slot's cpus or has come back."""
        settings, waited_s, moved = self._on.settings(), 0.0, False
        while waited_s < settings.verify_interval_s:
            step_s = min(settings.threads_interval_s, settings.verify_interval_s - waited_s)
            await asyncio.sleep(step_s)
            waited_s += step_s
            if self.instance.served:
                moved |= await self._on.placement.threads_moved(self._slot, self.instance)
            # Threads that never rest must not have every page read every few seconds.
            if moved and waited_s > settings.threads_interval_s:
                return

    async def verify(self) -> None:
        lines: Sequence[LogLine] = self._on.log.last(self._on.settings().tail_lines, self.instance.generation)
        texts = [line.text for line in lines]
        await self._on.placement.verify(self._slot, self.instance, texts, self._engine.accelerator)
