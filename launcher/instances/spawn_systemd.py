"""Instances as service units of their own: a daemon that is restarted, upgraded or killed leaves them running.

One transient unit per slot, `numa-launcher-slot0.service` in `numa-launcher.slice`. systemd reaps it, ends what
is left of its cgroup when the main process has gone, and says how it ended. What it prints is in the journal,
where this daemon reads it and the next one finds it. What was started is written to a state file; `inherit`
goes on with each unit that runs as the plan would start it now, and stops the others: nothing is started before
their cpus and memory are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from launcher.address import Address, UnixAddress
from launcher.background import Failures, persist
from launcher.engines.base import MARK, Launch
from launcher.engines.environment import secret_names
from launcher.errors import LauncherError, reason
from launcher.host.journal_reader import Follower, Line, history
from launcher.host.systemd_bus import UNIT_EXISTS, BusError, Systemd, UnitFacts, cannot_reach
from launcher.instances.ports import Adopted, Exit
from launcher.instances.spawn_direct import OURS_ALONE, PLANNED_PREFIXES
from launcher.instances.state_file import Record, digest
from launcher.instances.state_folder import StateFolder
from launcher.instances.unit import UNITS_OWN, USERS_OWN, Frame, mark, properties
from launcher.instances.unit_facts import exit_of, fitting, last_words
from launcher.plan import Placement

log = logging.getLogger("launcher.instances")

# For a unit to have executed its command: systemd sets up a sandbox first.
START_S: Final = 60.0
# For an old unit of the same name to be forgotten by systemd.
NAME_FREE_S: Final = 10.0
# For the last lines of a dead unit to arrive from the journal.
OUTPUT_END_S: Final = 3.0
# Lines of an adopted instance that are read back.
HISTORY_LINES: Final = 2000

T = TypeVar("T")


class SystemdProcess:
    """An instance in its unit."""

    def __init__(
        self, owner: SystemdSpawner, unit: str, pid: int, ended: asyncio.Task[Exit], cgroup: str
    ) -> None:
        self._owner = owner
        self._unit = unit
        self._pid = pid
        self._ended = ended
        self.cgroup = cgroup
        """Below /sys/fs/cgroup."""

    @property
    def pid(self) -> int:
        """The engine's main process."""
        return self._pid

    async def wait(self) -> Exit:
        """Return when the unit is over: nothing is left in its cgroup."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """SIGTERM to the main process."""
        self._signal(signal.SIGTERM, whole=False)

    def kill(self) -> None:
        """SIGKILL to the whole cgroup."""
        self._signal(signal.SIGKILL, whole=True)

    def leave(self) -> None:
        """It goes on; the next daemon finds it by the state file."""

    def _signal(self, number: signal.Signals, *, whole: bool) -> None:
        if not self._ended.done():
            self._owner.send(self._unit, number, whole=whole)


class SystemdSpawner:
    """Starts instances as units. `environ` is what they inherit; `state` a folder that only root may read.

    `placement_of` says where a slot's instance belongs, for `Frame.allowed_cpus`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        state: Path,
        frame: Frame,
        *,
        group: int | None = None,
        placement_of: Callable[[int], Placement | None] = lambda _slot: None,
    ) -> None:
        dropped = {*OURS_ALONE, *UNITS_OWN, *(() if frame.user is None else USERS_OWN)}
        self._environ = {
            name: value
            for name, value in environ.items()
            if name not in dropped and not name.startswith(PLANNED_PREFIXES)
        }
        self._frame = frame
        self._group = group
        self._state = StateFolder(state)
        self._placement_of = placement_of
        self._systemd = Systemd()
        self._follower: Follower | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._clearing: set[asyncio.Task[None]] = set()
        """Units of an earlier daemon on their way out."""

    # --- Spawner ----------------------------------------------------------------------------

    async def spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> SystemdProcess:
        """Start `launch`. Raises LauncherError when systemd can't be reached or refuses."""
        if self._clearing:
            await asyncio.wait(tuple(self._clearing))
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
        """Units that run as the plan would start them; the others are being stopped, and no spawn comes before that.

        Raises LauncherError.
        """
        try:
            found = await self._systemd.list_units(self._frame.pattern)
            looked = await asyncio.gather(*(self._look(unit, slots) for unit in found))
        except BusError as error:
            raise cannot_reach(error) from error
        for slot in [slot for slot in self._state.records if self._frame.unit(slot) not in found]:
            self._state.forget(slot)
        return {slot: adopted for slot, adopted in looked if adopted is not None}

    async def keeps_instances(self) -> bool:
        """Not where systemd stops the daemon for good: `systemctl stop`, or the host goes down.

        A restart has a job of another type, and a signal from somebody else none at all: the instances
        go on then. So they do when systemd does not answer.
        """
        try:
            return await self._systemd.job_type(self._frame.daemon_unit) != "stop"
        except BusError as error:
            log.warning("cannot ask systemd why the daemon ends: %s; the instances go on", error)
            return True

    async def close(self, *, for_good: bool) -> None:
        """Let go of systemd and the journal. `for_good`: the sockets close too, or the next client would start
        the daemon again; systemd opens them when the daemon is started."""
        for unit in self._frame.sockets if for_good else ():
            with contextlib.suppress(BusError):
                await self._systemd.stop(unit)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._follower is not None:
            await self._follower.close()
        await self._systemd.close()

    def send(self, unit: str, number: signal.Signals, *, whole: bool) -> None:
        """A signal to a unit, soon."""
        _ = self._background(self._send(unit, number, whole=whole), f"{number.name} to {unit}")

    # --- starting -----------------------------------------------------------------------------

    async def _spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> SystemdProcess:
        unit = self._frame.unit(slot)
        env = self._environ | dict(launch.env)
        command = _find(launch.argv[0], env.get("PATH"))
        if command is None:
            on_line(f"numa-launcher: cannot execute {launch.argv[0]}: {_why_not(launch.argv[0])}")
            return self._stillborn(unit)
        if isinstance(launch.address, UnixAddress):
            self._make_way(Path(launch.address.path))
        digested = digest(launch)
        env[MARK] = mark(slot, generation, digested)
        secret = secret_names(env) | launch.secrets
        secrets = {name: env.pop(name) for name in sorted(secret & env.keys())}
        record = _record(slot, generation, unit, digested, launch.address)
        self._state.remember(record)
        self._listen(unit, lambda line: on_line(line.text))
        try:
            with self._state.secrets(slot, secrets) as secrets_file:
                facts = await self._start(
                    unit,
                    properties(
                        self._frame, slot, generation, command=command, argv=launch.argv, env=env,
                        secrets_file=secrets_file, scratch=launch.scratch, placement=self._placement_of(slot),
                    ),
                )  # fmt: skip
        except BaseException:
            self._unlisten(unit)
            self._state.forget(slot)
            raise
        self._state.remember(_complete(record, facts))
        return self._process(slot, unit, facts, launch.address, on_line)

    async def _start(self, unit: str, wanted: list[tuple[str, str, Any]]) -> UnitFacts:
        """Start a unit once its name is free. Raises BusError."""
        try:
            async with asyncio.timeout(NAME_FREE_S):
                while True:
                    try:
                        await self._systemd.start_transient(unit, wanted)
                        break
                    except BusError as error:
                        if error.name != UNIT_EXISTS:
                            raise
                        await self._systemd.forget(unit)
                        await asyncio.sleep(0.05)
            async with asyncio.timeout(START_S):
                return await self._systemd.until(
                    unit, lambda now: not now.has_job and bool(now.invocation) and now.active != "activating"
                )
        except TimeoutError:
            await self._send(unit, signal.SIGKILL, whole=True)
            raise BusError("timeout", f"{unit} has not started in time") from None
        except asyncio.CancelledError:
            with contextlib.suppress(BusError):
                await asyncio.shield(self._systemd.kill(unit, whole=True, signal=signal.SIGKILL))
            raise

    def _process(
        self, slot: int, unit: str, facts: UnitFacts, address: Address, on_line: Callable[[str], None]
    ) -> SystemdProcess:
        ended = self._background(self._follow(slot, unit, facts, address, on_line), f"unit {unit}")
        return SystemdProcess(self, unit, facts.main_pid, ended, facts.cgroup)

    def _stillborn(self, unit: str) -> SystemdProcess:
        async def ended() -> Exit:
            return Exit(code=127, signal=None)

        return SystemdProcess(self, unit, 0, self._background(ended(), f"unit {unit}"), "")

    async def _follow(
        self, slot: int, unit: str, first: UnitFacts, address: Address, on_line: Callable[[str], None]
    ) -> Exit:
        """Wait until the unit is over; all it has printed has been heard then."""
        facts = await persist(
            lambda: self._systemd.until(unit, lambda now: now.over or now.invocation != first.invocation),
            Failures(log, f"slot {slot}: wait for its exit", slot=slot, unit=unit),
        )
        if self._follower is not None:
            await self._follower.catch_up(OUTPUT_END_S)
        self._unlisten(unit)
        for line in last_words(facts):
            on_line(line)
        await self._systemd.forget(unit)
        self._state.forget(slot)
        if isinstance(address, UnixAddress):
            _remove(address.path)  # a killed instance leaves its socket
        return exit_of(facts)

    # --- inheriting ---------------------------------------------------------------------------

    async def _look(
        self, unit: str, slots: Mapping[int, Callable[[int], Launch]]
    ) -> tuple[int, Adopted | None]:
        """One unit that was there before us: ours to go on with, or to stop. Raises BusError."""
        slot = self._frame.slot_of(unit)
        if slot is None:
            return -1, None
        await self._systemd.hold(unit)
        facts = await self._systemd.facts(unit)
        record = self._state.records.get(slot)
        fit = fitting(slot, record, facts, slots)
        if isinstance(fit, Launch) and record is not None:
            log.info(
                "slot %d: goes on with life %d, pid %d in %s", slot, record.generation, facts.main_pid, unit,
                extra={"slot": slot, "generation": record.generation, "unit": unit, "pid": facts.main_pid},
            )  # fmt: skip
            return slot, await self._take_over(slot, unit, record, facts, fit)
        if facts.over:
            log.warning(
                "slot %d: %s ended while no daemon ran: %s", slot, unit, exit_of(facts), extra={"slot": slot}
            )
        else:
            log.warning("slot %d: %s is stopped: %s", slot, unit, fit, extra={"slot": slot, "unit": unit})
            clearing = self._background(self._clear(slot, unit), f"stop of {unit}")
            self._clearing.add(clearing)
            clearing.add_done_callback(self._clearing.discard)
            return slot, None
        await self._systemd.forget(unit)
        self._state.forget(slot)
        return slot, None

    async def _clear(self, slot: int, unit: str) -> None:
        """Stop a unit to its end. Where systemd won't, the next start in its slot says so too."""
        try:
            await self._systemd.stop(unit)
        except BusError as error:
            log.warning("slot %d: cannot stop %s: %s", slot, unit, error, extra={"slot": slot, "unit": unit})
            return
        await self._systemd.until(unit, lambda now: now.over)
        await self._systemd.forget(unit)
        self._state.forget(slot)

    async def _take_over(
        self, slot: int, unit: str, record: Record, facts: UnitFacts, launch: Launch
    ) -> Adopted:
        self._state.remember(_complete(record, facts))
        heard: list[Line] = []
        hearing: list[Callable[[Line], None]] = [heard.append]

        def hear(line: Line) -> None:
            hearing[0](line)

        def on_line(text: str) -> None:
            hear(Line(unit, time.time(), text))

        follower = self._listen(unit, hear)
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
            process=self._process(slot, unit, facts, launch.address, on_line),
            age_s=max(0.0, time.time() - (facts.started_s or time.time())),
            follow=follow,
        )

    # --- small things ---------------------------------------------------------------------------

    def _listen(self, unit: str, hear: Callable[[Line], None]) -> Follower:
        if self._follower is None:
            self._follower = Follower()
            self._follower.start()
        self._follower.listen(unit, hear)
        return self._follower

    def _unlisten(self, unit: str) -> None:
        if self._follower is not None:
            self._follower.ignore(unit)

    def _make_way(self, path: Path) -> None:
        """The folder of an instance's socket, where its user may make one, and no socket in it. Nothing else in there is
        touched by us: that user may put a link in the place of any file. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o770)
        if self._group is not None:
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchown(folder, -1, self._group)
                os.fchmod(folder, 0o770)
            except PermissionError:  # not ours: whoever made it has set it up
                pass
            finally:
                os.close(folder)
        path.unlink(missing_ok=True)

    async def _send(self, unit: str, number: signal.Signals, *, whole: bool) -> None:
        try:
            await self._systemd.kill(unit, whole=whole, signal=number)
        except BusError as error:  # mostly: it ended this moment
            log.debug("cannot send %s to %s: %s", number.name, unit, error)

    def _background(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _record(slot: int, generation: int, unit: str, digested: str, address: Address) -> Record:
    if isinstance(address, UnixAddress):
        return Record(slot=slot, generation=generation, unit=unit, digest=digested, socket=address.path)
    return Record(slot=slot, generation=generation, unit=unit, digest=digested, port=address.port)


def _complete(record: Record, facts: UnitFacts) -> Record:
    return msgspec.structs.replace(
        record, pid=facts.main_pid, invocation=facts.invocation, started=facts.started_s
    )


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        Path(path).unlink()


def _find(command: str, path: str | None) -> str | None:
    found = shutil.which(command, path=path)
    return None if found is None else str(Path(found).absolute())


def _why_not(command: str) -> str:
    return "Permission denied" if Path(command).exists() else "No such file or directory"
