"""Looks at one life of a slot: until it is ready, and then whether it goes on. Judges by progress.py; posts events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from launcher.address import Address
from launcher.background import Failures, attempt
from launcher.engines.base import Engine
from launcher.host.oom import family, node_memory
from launcher.host.pressure import cpu_pressure
from launcher.instances.causes import Cause
from launcher.instances.diagnosis import failed_start, hung, hung_or_dead
from launcher.instances.health import COMPLETION_TIMEOUT_S
from launcher.instances.instance import Instance, ProbeSettings
from launcher.instances.ports import Prober, Traffic
from launcher.instances.progress import (
    Look,
    Progress,
    canary_is_due,
    observe,
    patience,
    pressure_line,
    proved,
    stall,
    started,
)
from launcher.plan import Slot

log = logging.getLogger("launcher.instances")

UNHEALTHY_AFTER: Final = 2
# For an engine that has said that its start failed to end: its processes wait for each other for up to 5 s.
DOOMED_S: Final = 15.0
# Between two looks at its memory and processes, for the day that it dies of them.
LOOK_AROUND_S: Final = 2.0


class Watcher:
    """Looks at one instance, generation `generation` of `slot`; `lives` says whether it still is the slot's."""

    def __init__(
        self,
        slot: Slot,
        generation: int,
        instance: Instance,
        *,
        engine: Engine,
        prober: Prober,
        traffic: Traffic,
        probing: ProbeSettings,
        clock: Callable[[], float],
        lives: Callable[[], bool],
        suspected: asyncio.Event,
        last_words: Callable[[], Sequence[str]],
        pressure: Callable[[], float | None] = cpu_pressure,
        looked: Callable[[], None] = lambda: None,
    ) -> None:
        """`looked` is called after each look that succeeded. One that fails raises OSError, or whatever it met."""
        self._slot = slot
        self._generation = generation
        self._instance = instance
        self._engine = engine
        self._prober = prober
        self._traffic = traffic
        self._probing = probing
        self._clock = clock
        self._lives = lives
        self._suspected = suspected
        self._last_words = last_words
        self._pressure = pressure
        self._looked = looked
        self._around = Failures(log, f"slot {slot.id}: look at its processes and memory", slot=slot.id)
        self._refusals = 0
        self._canaries_refused = 0
        self._look_again_at = 0.0
        self._ask_again_at = 0.0

    async def ready(self, address: Address) -> bool | Cause:
        """Health path, then one real completion. False when the life ended before; a cause when it never will be."""
        while self._lives():
            await self._look_around()
            doomed_at = self._instance.doomed_at
            if doomed_at is not None and self._clock() - doomed_at > DOOMED_S:
                return failed_start(self._last_words(), self._clock() - doomed_at)
            healthy = await self._prober.healthy(address)
            self._note_look(COMPLETION_TIMEOUT_S if healthy else 0.0)
            if healthy and (
                not self._engine.wants_completion_probe
                or await self._prober.completes(address, self._slot.model.name)
            ):
                self._instance.phase = "serving"
                self._instance.served = True
                self._instance.responsive = True
                self._instance.progress = started(self._clock())
                return True
            await asyncio.sleep(self._probing.ready_poll_s)
        return False

    async def failure(self, address: Address) -> Cause | None:
        """Look until the life is over (None), or has failed though its process goes on (why).

        A definite no, twice, is a failure; silence alone is not: busy is not dead. Work without progress is.
        """
        while self._lives():
            if self._refusals:  # a whole pause, however loudly the proxy suspects it
                await asyncio.sleep(self._probing.recheck_s)
            else:
                await self._pause(self._probing.probe_interval_s)
            if not self._lives():
                return None
            if (cause := await self._probe(address)) is not None:
                return cause
        return None

    async def _probe(self, address: Address) -> Cause | None:
        """Raises OSError where the daemon itself could not look."""
        await self._look_around()
        answer = await self._prober.healthy(address)
        self._instance.responsive = answer is not None
        self._refusals = self._refusals + 1 if answer is False else 0
        if answer is False:
            self._note_look()
            refused = self._refusals >= UNHEALTHY_AFTER
            return hung_or_dead("its health path no longer answers 200") if refused else None
        counters = await self._prober.counters(address)
        self._note_look()
        now = self._clock()
        slot, generation = self._slot.id, self._generation
        look = Look(
            at=now,
            responsive=answer is not None,
            counters=counters,
            in_flight=self._traffic.in_flight(slot, generation),
            relayed=self._traffic.relayed(slot, generation),
        )
        self._instance.progress = progress = observe(self._instance.progress, look)
        if evidence := stall(progress, now, self._probing.stall_timeout_s, self._pressure()):
            return hung(evidence)
        if self._engine.wants_completion_probe and canary_is_due(
            progress, now, self._probing.canary_interval_s
        ):
            return await self._canary(address)
        if self._engine.wants_completion_probe and self._may_lie(progress, look):
            return await self._canary_beside(address, look)
        return None

    def _may_lie(self, progress: Progress, look: Look) -> bool:
        """It says that it is well, counts nothing that could be held against it, and gives no answer."""
        counts = progress.counted is not None and not progress.counted.rounded
        if counts or not look.responsive or look.at < self._ask_again_at:
            return False
        return self._traffic.silent(self._slot.id, self._generation)

    async def _canary_beside(self, address: Address, look: Look) -> Cause | None:
        """One token beside the requests that it has. Any answer, a refusal too, says that it does not hang."""
        pressure = self._pressure()
        limit_s = patience(self._probing.stall_timeout_s, pressure)
        self._note_look(limit_s)
        answer = await self._prober.canary(address, self._slot.model.name, limit_s)
        self._ask_again_at = self._clock() + self._probing.stall_timeout_s
        if answer is not None or not self._lives():
            return None
        still = f"nothing has come of its {look.in_flight} requests (proxy.hung_timeout_s)"
        said = f"no answer to a completion of one token beside them within {limit_s:.0f} s (canary)"
        return hung((still, said, pressure_line(pressure)))

    async def _canary(self, address: Address) -> Cause | None:
        """One token of an idle instance. It may take as long as a request may stand still."""
        pressure = self._pressure()
        limit_s = patience(self._probing.stall_timeout_s, pressure)
        self._note_look(limit_s)
        answer = await self._prober.canary(address, self._slot.model.name, limit_s)
        if not self._lives():
            return None
        if answer is None:
            said = f"idle, and no answer to a completion of one token within {limit_s:.0f} s (canary)"
            return hung((said, pressure_line(pressure)))
        if answer:
            self._instance.progress = proved(self._instance.progress, self._clock())
            self._canaries_refused = 0
            return None
        self._canaries_refused += 1
        if self._canaries_refused < UNHEALTHY_AFTER:
            return None
        return hung_or_dead("it refused a completion of one token (canary), twice")

    def _note_look(self, takes_s: float = 0.0) -> None:
        """A look has succeeded; what it does next may take so long."""
        self._instance.looked_at = now = self._clock()
        self._instance.watched_until = now + takes_s + self._probing.unwatched_s
        self._looked()

    async def _look_around(self) -> None:
        if self._clock() >= self._look_again_at:
            self._look_again_at = self._clock() + LOOK_AROUND_S
            await attempt(lambda: asyncio.to_thread(self._look_at_memory), self._around)

    def _look_at_memory(self) -> None:
        """For the day that it is killed for want of it."""
        self._instance.nodes = node_memory(self._slot.placement.membind)
        if self._instance.process is not None:
            self._instance.pids |= family(self._instance.process.pid)

    async def _pause(self, seconds: float) -> None:
        """Until the time is over or someone suspects the instance."""
        try:
            async with asyncio.timeout(seconds):
                await self._suspected.wait()
        except TimeoutError:
            return
        self._suspected.clear()
