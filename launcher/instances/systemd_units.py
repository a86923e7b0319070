"""Service units as processes: start, signal, wait for the exit, and read the output from the journal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec.structs import replace

from launcher.base.address import Address, UnixAddress
from launcher.base.background import Failures, persist
from launcher.engines.base import MARK, Launch
from launcher.instances.diagnosis import UNIT_OOM
from launcher.instances.journal_reader import Follower, Line
from launcher.instances.output import LineLimit, left_out_text
from launcher.instances.ports import Exit
from launcher.instances.state_file import Record, StateFolder, digest
from launcher.instances.systemd_bus import UNIT_EXISTS, BusError, Systemd, UnitFacts
from launcher.instances.unit import mark

log = logging.getLogger("launcher.instances")


# --- Reads a unit's facts: how it ended, and whether it runs what the plan would start. ---

# systemd.exec(5), "Process Exit Codes": EXIT_EXEC.
CANNOT_EXECUTE: Final = 203

# waitid(2)
_KILLED, _DUMPED = 2, 3


def exit_of(facts: UnitFacts) -> Exit:
    """How the main process ended; a command that could not be executed is 127, as in a shell."""
    if facts.code in {_KILLED, _DUMPED}:
        return Exit(code=None, signal=facts.status)
    return Exit(code=127 if facts.status == CANNOT_EXECUTE else facts.status, signal=None)


def diagnosis_lines(facts: UnitFacts) -> list[str]:
    """What systemd reports beyond the exit status, as lines that diagnosis reads."""
    if facts.result in {"success", "exit-code", "signal", "core-dump"}:
        return []
    return [f"{UNIT_OOM.partition('=')[0]}={facts.result}"]


def fitting(
    slot: int, record: Record | None, facts: UnitFacts, slots: Mapping[int, Callable[[int], Launch]]
) -> Launch | str:
    """The launch that a unit runs if it can be adopted, else why not. It can be adopted if

    1. the plan has the slot, and the state file a record of the unit,
    2. the unit is active, and the generation that the record names,
    3. the plan would start it with the same command and environment now, from the same files of its model."""
    if slot not in slots or record is None:
        return "the plan has no such slot" if slot not in slots else "the state file has no record of it"
    if facts.active != "active" or facts.has_job or not facts.main_pid:
        return f"it is {facts.active}"
    expected = mark(slot, record.generation, record.digest)
    if f"{MARK}={expected}" not in facts.environment or record.invocation not in {"", facts.invocation}:
        return "it is not the generation that the state file records"
    launch = slots[slot](record.generation)
    if digest(launch) != record.digest:
        return "the plan would start it differently now"
    # No model: a record of a release before this field, or of a model that was not here.
    known = None if record.model is None else launch.files
    if known is not None and record.model != known.to_text():
        return f"its model's files are others now: {known}"
    return replace(launch, address=record.address, files=known)


# For a unit to execute its command: systemd sets up its sandbox first.
START_S: Final = 60.0
# For systemd to forget an old unit of the same name.
NAME_FREE_S: Final = 10.0
# For the last lines of an ended unit to arrive in the journal.
OUTPUT_END_S: Final = 3.0
T = TypeVar("T")


class SystemdProcess:
    def __init__(self, units: Units, unit: str, pid: int, ended: asyncio.Task[Exit]) -> None:
        self._units = units
        self._unit = unit
        self._pid = pid
        self._ended = ended

    @property
    def pid(self) -> int:
        return self._pid

    async def wait(self) -> Exit:
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM, whole=False)

    def kill(self) -> None:
        self._signal(signal.SIGKILL, whole=True)

    def leave(self) -> None:
        """It keeps running; the next daemon finds it in the state file."""

    def _signal(self, number: signal.Signals, *, whole: bool) -> None:
        if not self._ended.done():
            self._units.send(self._unit, number, whole=whole)


class UnitLimit:
    """The lines of one unit, as journal_reader.Limit."""

    def __init__(self, unit: str, now: float) -> None:
        self._unit = unit
        self._limit = LineLimit[Line](now)

    @property
    def holding(self) -> bool:
        return self._limit.holding

    def take(self, lines: Sequence[Line], now: float) -> Sequence[Line]:
        return self._told(*self._limit.take(lines, now))

    def rest(self) -> Sequence[Line]:
        return self._told(*self._limit.rest())

    def _told(self, left_out: int, lines: Sequence[Line]) -> Sequence[Line]:
        if not left_out:
            return lines
        when = lines[0].time if lines else time.time()
        return (Line(self._unit, when, left_out_text(left_out)), *lines)


class Units:
    """The units of one daemon. `state` remembers what runs in them."""

    def __init__(
        self, state: StateFolder, systemd: Systemd, make_follower: Callable[[], Follower] = Follower
    ) -> None:
        self.systemd = systemd
        self._make_follower = make_follower
        self._state = state
        self._follower: Follower | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Close the connections to systemd and the journal. The units keep running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._follower is not None:
            await self._follower.close()
        await self.systemd.close()

    async def start(self, unit: str, wanted: list[tuple[str, str, Any]]) -> UnitFacts:
        """Start a unit with these properties once its name is free. Raises BusError."""
        try:
            async with asyncio.timeout(NAME_FREE_S):
                while True:
                    try:
                        await self.systemd.start_transient(unit, wanted)
                        break
                    except BusError as error:
                        if error.name != UNIT_EXISTS:
                            raise
                        await self.systemd.forget(unit)
                        await asyncio.sleep(0.05)
            async with asyncio.timeout(START_S):
                return await self.systemd.until(
                    unit, lambda now: not now.has_job and bool(now.invocation) and now.active != "activating"
                )
        except TimeoutError:
            await self._send(unit, signal.SIGKILL, whole=True)
            raise BusError("timeout", f"{unit} has not started in time") from None
        except asyncio.CancelledError:
            with contextlib.suppress(BusError):
                await asyncio.shield(self.systemd.kill(unit, whole=True, signal=signal.SIGKILL))
            raise

    def process_of(
        self, slot: int, unit: str, facts: UnitFacts, address: Address, on_line: Callable[[str], None]
    ) -> SystemdProcess:
        """A running unit. `on_line` gets what systemd reports at its exit."""
        ended = self.background(self._follow(slot, unit, facts, address, on_line), f"unit {unit}")
        return SystemdProcess(self, unit, facts.main_pid, ended)

    def not_executable(self, unit: str) -> SystemdProcess:
        """A process that has ended with 127, as a shell reports a command that it cannot execute."""

        async def ended() -> Exit:
            return Exit(code=127, signal=None)

        return SystemdProcess(self, unit, 0, self.background(ended(), f"unit {unit}"))

    async def _follow(
        self, slot: int, unit: str, first: UnitFacts, address: Address, on_line: Callable[[str], None]
    ) -> Exit:
        facts = await persist(
            lambda: self.systemd.until(unit, lambda now: now.over or now.invocation != first.invocation),
            Failures(log, f"slot {slot}: wait for its exit", slot=slot, unit=unit),
        )
        if self._follower is not None:
            await self._follower.catch_up(OUTPUT_END_S)
        self.unlisten(unit)
        for line in diagnosis_lines(facts):
            on_line(line)
        await self.forget(slot, unit)
        if isinstance(address, UnixAddress):
            remove_socket(address.path)
        return exit_of(facts)

    async def forget(self, slot: int, unit: str) -> None:
        await self.systemd.forget(unit)
        await self._state.forget(slot)

    async def stop(self, slot: int, unit: str) -> None:
        """Stop a unit and wait for its end. A refusal is only logged: the next start in the slot fails with it."""
        try:
            await self.systemd.stop(unit)
        except BusError as error:
            log.warning("slot %d: cannot stop %s: %s", slot, unit, error, extra={"slot": slot, "unit": unit})
            return
        await self.systemd.until(unit, lambda now: now.over)
        await self.forget(slot, unit)

    def send(self, unit: str, number: signal.Signals, *, whole: bool) -> None:
        _ = self.background(self._send(unit, number, whole=whole), f"{number.name} to {unit}")

    async def _send(self, unit: str, number: signal.Signals, *, whole: bool) -> None:
        try:
            await self.systemd.kill(unit, whole=whole, signal=number)
        except BusError as error:  # usually it has just ended
            log.debug("cannot send %s to %s: %s", number.name, unit, error)

    def listen(self, unit: str, on_line: Callable[[Line], None]) -> Follower:
        """Pass the unit's lines in the journal to `on_line` from now on."""
        if self._follower is None:
            self._follower = self._make_follower()
            self._follower.start()
        self._follower.listen(unit, on_line, UnitLimit(unit, time.monotonic()))
        return self._follower

    def unlisten(self, unit: str) -> None:
        if self._follower is not None:
            self._follower.ignore(unit)

    def background(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def remove_socket(path: str) -> None:
    """A killed instance leaves its socket."""
    with contextlib.suppress(OSError):
        Path(path).unlink()
