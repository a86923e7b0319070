"""The units that an earlier daemon left running: each is adopted if the plan would start the same, else stopped."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from launcher.engines.base import Launch
from launcher.host.journal_reader import Line, history
from launcher.host.systemd_bus import BusError, UnitFacts, cannot_reach
from launcher.instances.ports import Adopted
from launcher.instances.state_file import Record
from launcher.instances.state_folder import StateFolder
from launcher.instances.systemd_units import Units
from launcher.instances.unit import Frame
from launcher.instances.unit_facts import exit_of, fitting

log = logging.getLogger("launcher.instances")

# Lines of an adopted instance's output that are read back.
HISTORY_LINES: Final = 2000


class UnitAdoption:
    """Adopts or stops the units of earlier daemons in this `frame`."""

    def __init__(self, units: Units, frame: Frame, state: StateFolder) -> None:
        self._units = units
        self._frame = frame
        self._state = state
        self._stopping: set[asyncio.Task[None]] = set()

    async def others_stopped(self) -> None:
        """Return when every unit that was not adopted has ended: its cpus and memory are free then."""
        if self._stopping:
            await asyncio.wait(tuple(self._stopping))

    async def adopt(self, slots: Mapping[int, Callable[[int], Launch]]) -> Mapping[int, Adopted]:
        """The adopted instances by slot; `slots` has the launch of each slot by generation. Raises LauncherError."""
        systemd = self._units.systemd
        try:
            found = await systemd.list_units(self._frame.pattern)
            judged = await asyncio.gather(*(self._judge(unit, slots) for unit in found))
        except BusError as error:
            raise cannot_reach(error) from error
        for slot in [slot for slot in self._state.records if self._frame.unit(slot) not in found]:
            self._state.forget(slot)
        return {slot: adopted for slot, adopted in judged if adopted is not None}

    async def _judge(
        self, unit: str, slots: Mapping[int, Callable[[int], Launch]]
    ) -> tuple[int, Adopted | None]:
        slot = self._frame.slot_of(unit)
        if slot is None:
            return -1, None
        await self._units.systemd.hold(unit)
        facts = await self._units.systemd.facts(unit)
        record = self._state.records.get(slot)
        fit = fitting(slot, record, facts, slots)
        if isinstance(fit, Launch) and record is not None:
            log.info(
                "slot %d: adopted running instance, generation %d, pid %d in %s",
                slot, record.generation, facts.main_pid, unit,
                extra={"slot": slot, "generation": record.generation, "unit": unit, "pid": facts.main_pid},
            )  # fmt: skip
            return slot, await self._adopt(slot, unit, record, facts, fit)
        fields = {"slot": slot, "unit": unit}
        if facts.over:
            log.warning("slot %d: %s ended while no daemon ran: %s", slot, unit, exit_of(facts), extra=fields)
            await self._units.forget(slot, unit)
            return slot, None
        log.warning("slot %d: stopping %s of an earlier daemon: %s", slot, unit, fit, extra=fields)
        stopping = self._units.background(self._units.stop(slot, unit), f"stop of {unit}")
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        return slot, None

    async def _adopt(self, slot: int, unit: str, record: Record, facts: UnitFacts, launch: Launch) -> Adopted:
        self._state.remember(record.with_unit(facts.main_pid, facts.invocation, facts.started_s))
        heard: list[Line] = []
        hearing: list[Callable[[Line], None]] = [heard.append]

        def hear(line: Line) -> None:
            hearing[0](line)

        def on_line(text: str) -> None:
            hear(Line(unit, time.time(), text))

        follower = self._units.listen(unit, hear)
        try:
            before = await asyncio.to_thread(history, unit, facts.invocation, HISTORY_LINES, follower.since)
        except OSError as error:
            log.warning("cannot read the journal of %s: %s", unit, error)
            before = []

        def follow(tell: Callable[[str, float], None]) -> None:
            for line in [*before, *heard]:
                tell(line.text, line.time)
            hearing[0] = lambda line: tell(line.text, line.time)

        return Adopted(
            generation=record.generation,
            launch=launch,
            process=self._units.process_of(slot, unit, facts, launch.address, on_line),
            age_s=max(0.0, time.time() - (facts.started_s or time.time())),
            follow=follow,
        )
