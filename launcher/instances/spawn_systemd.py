"""Instances as service units of their own: they keep running while the daemon is restarted, upgraded or killed.

One transient unit per slot, `numa-launcher-slot0.service` in `numa-launcher.slice`. systemd reaps it, ends the rest of
its cgroup when the main process has ended, and reports how it ended. Its output is in the journal, where this daemon and
the next one read it. A state file remembers what was started, for adopt_units.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from launcher.base.address import UnixAddress
from launcher.base.errors import LauncherError, reason
from launcher.engines.base import MARK, Launch, secret_names
from launcher.instances.journal_reader import Follower, Line, history
from launcher.instances.ports import Adopted
from launcher.instances.spawn_direct import inherited, wanted
from launcher.instances.state_file import Record, StateFolder, digest
from launcher.instances.systemd_bus import BusError, Systemd, UnitFacts, cannot_reach
from launcher.instances.systemd_units import SystemdProcess, Units, exit_of, fitting
from launcher.instances.unit import UNITS_OWN, USERS_OWN, Frame, mark, properties
from launcher.plan.plan import Placement

log = logging.getLogger("launcher.instances")


# --- The units that an earlier daemon left running: each is adopted if the plan would start the same, else stopped.

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
            await self._state.forget(slot)
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
        await self._state.remember(record.with_unit(facts.main_pid, facts.invocation, facts.started_s))
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
            follow=follow,
        )


class SystemdSpawner:
    """Starts instances as units. `environ` is what they inherit; `state` a folder that only root may read.

    `placement_of` returns the placement of a slot, for `Frame.allowed_cpus`."""

    def __init__(
        self,
        environ: Mapping[str, str],
        state: Path,
        frame: Frame,
        *,
        group: int | None = None,
        placement_of: Callable[[int], Placement | None] = lambda _slot: None,
        systemd: Systemd | None = None,
        make_follower: Callable[[], Follower] = Follower,
    ) -> None:
        self._environ = inherited(environ, (*UNITS_OWN, *(() if frame.user is None else USERS_OWN)))
        self._frame = frame
        self._group = group
        self._placement_of = placement_of
        self._state = StateFolder(state)
        self._units = Units(self._state, systemd or Systemd(), make_follower)
        self._adoption = UnitAdoption(self._units, frame, self._state)

    async def spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> SystemdProcess:
        await self._adoption.others_stopped()
        try:
            return await self._spawn(slot, generation, launch, on_line)
        except BusError as error:
            raise cannot_reach(error) from error
        except OSError as error:
            raise LauncherError(
                f"cannot start slot {slot}: {reason(error)}",
                f"check owner and space of '{self._state.path}' and of the run folder",
            ) from error

    async def adopt(self, slots: Mapping[int, Callable[[int], Launch]]) -> Mapping[int, Adopted]:
        """Running units that the plan would start the same way; the others are stopped before any spawn.

        Raises LauncherError."""
        return await self._adoption.adopt(slots)

    async def keeps_instances(self) -> bool:
        """False where systemd stops the daemon for good: `systemctl stop`, or a shutdown of the host.

        A restart has a job of another type, and a signal from anybody else has none: the instances keep running. They
        also do when systemd does not answer."""
        try:
            return await self._units.systemd.job_type(self._frame.daemon_unit) != "stop"
        except BusError as error:
            log.warning("cannot ask systemd why the daemon stops: %s; instances keep running", error)
            return True

    async def close(self, *, for_good: bool) -> None:
        """Close the connections to systemd and the journal. `for_good`: also the sockets of the daemon, through which the
        next client would start it again; systemd opens them when the daemon is started."""
        for unit in self._frame.sockets if for_good else ():
            with contextlib.suppress(BusError):
                await self._units.systemd.stop(unit)
        await self._units.close()

    async def _spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> SystemdProcess:
        unit = self._frame.unit(slot)
        env = wanted(self._environ, launch.unwanted) | dict(launch.env)
        command = _find(launch.argv[0], env.get("PATH"))
        if command is None:
            on_line(f"numa-launcher: cannot execute {launch.argv[0]}: {_why_not(launch.argv[0])}")
            return self._units.not_executable(unit)
        if isinstance(launch.address, UnixAddress):
            self._prepare_socket(Path(launch.address.path))
        digested = digest(launch)
        env[MARK] = mark(slot, generation, digested)
        secret = secret_names(env) | launch.secrets
        secrets = {name: env.pop(name) for name in sorted(secret & env.keys())}
        record = Record.of(slot, generation, unit, digested, launch)
        await self._state.remember(record)
        _ = self._units.listen(unit, lambda line: on_line(line.text))
        try:
            async with self._state.secrets(slot, secrets) as secrets_file:
                facts = await self._units.start(
                    unit,
                    properties(
                        self._frame, slot, generation, command=command, argv=launch.argv, env=env,
                        secrets_file=secrets_file, scratch=launch.scratch, placement=self._placement_of(slot),
                    ),
                )  # fmt: skip
        except BaseException:
            self._units.unlisten(unit)
            await self._state.forget(slot)
            raise
        await self._state.remember(record.with_unit(facts.main_pid, facts.invocation, facts.started_s))
        return self._units.process_of(slot, unit, facts, launch.address, on_line)

    def _prepare_socket(self, path: Path) -> None:
        """Make the folder of an instance's socket, writable for its user, and remove an old socket. Nothing else in it is
        touched: that user may put a link in the place of any file. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o770)
        if self._group is not None:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchown(folder, -1, self._group)
                os.fchmod(folder, 0o770)
            except PermissionError:  # another owner has set it up
                pass
            finally:
                os.close(folder)
        path.unlink(missing_ok=True)


def _find(command: str, path: str | None) -> str | None:
    found = shutil.which(command, path=path)
    return None if found is None else str(Path(found).absolute())


def _why_not(command: str) -> str:
    return "Permission denied" if Path(command).exists() else "No such file or directory"
