"""The composition root: builds everything, wires it, and ends it in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import launcher
from launcher.assembly import Assembly
from launcher.config.schema import Config, EngineKind
from launcher.config.shown import secret_values, shown
from launcher.control.messages import Request
from launcher.control.server import ControlServer
from launcher.drift import drift, look
from launcher.engines.arguments import lora_adapters
from launcher.engines.binding import MemPolicy
from launcher.errors import LauncherError, RefusedError
from launcher.host import activation, collector, notify
from launcher.host.events import EventRing
from launcher.instances.choose_spawner import choose_spawner
from launcher.instances.compile_cache import CompileCaches
from launcher.instances.health import HttpProber
from launcher.instances.held_file import HeldFile
from launcher.instances.lifecycle import (
    State,
)
from launcher.instances.logtail import LogLine
from launcher.instances.ports import InstanceDraining, InstanceEvent, InstanceGone, InstanceReady
from launcher.instances.supervisor import Supervisor
from launcher.planning.plan import Placement
from launcher.proxy.app import FrontDoor
from launcher.redaction import Redactor
from launcher.reloader import Reloader, Reread, limits_of, pace_of, refuse_violations
from launcher.status import Status, slot_status
from launcher.verbs import check_request, event_of

log = logging.getLogger("launcher.daemon")

# Beyond drain and stop, for SIGKILL to take effect on a large tree.
STOP_SLACK_S: Final = 30.0

# Between two looks at the machine: cpus, cpuset, memory. One costs milliseconds.
MACHINE_INTERVAL_S: Final = 15.0

# For an inherited instance to answer one completion; clients wait that long at most before they are told.
TAKE_OVER_S: Final = 30.0

# How often systemd's STATUS= line is refreshed where no watchdog sets the pace.
STATUS_INTERVAL_S: Final = 5.0


class Daemon:
    """Front door, supervisor and control socket of one machine."""

    def __init__(self, assembly: Assembly, reread: Reread | None = None) -> None:
        config = assembly.config
        self._assembly = assembly
        self.prober = HttpProber(assembly.engine.health_path, config.supervision.probe_timeout_s)
        self._since = time.time()
        self._loop = asyncio.get_running_loop()
        self._signals = 0
        self._stop_asked = asyncio.Event()
        self._kill_asked = asyncio.Event()
        self._for_good = False
        """systemd is not to start the daemon again."""
        self._watchdog = notify.Watchdog("loop", "slots")
        self.door = FrontDoor(
            config.proxy, models=config.models, on_idle=self._on_idle, on_suspect=self._on_suspect
        )
        self.spawner = choose_spawner(
            config,
            os.environ,
            assembly.topology.allowed,
            assembly.run_dir.with_suffix(".state"),
            self._placement_of,
        )
        self.supervisor = Supervisor(
            assembly.plan,
            engine=assembly.engine,
            spawner=self.spawner,
            prober=self.prober,
            limits=limits_of(config),
            pace=pace_of(config),
            strict_binding=assembly.binding.policy is MemPolicy.MEMBIND,
            announce=self._apply,
            traffic=self,
            held=HeldFile(assembly.run_dir.with_suffix(".held")),
            caches=CompileCaches() if config.engine.kind is EngineKind.VLLM else None,
        )
        self._reloader = Reloader(self.supervisor, self.prober, reread, self._on_reloaded)
        self.control = ControlServer(
            config.control.socket, config.control.group, self, read_group=config.control.read_group
        )
        self.ring = EventRing()
        self._drift: tuple[str, ...] = ()

    async def run(self) -> None:
        """Serve until a signal; then drain, stop every instance and return. Raises LauncherError."""
        logging.getLogger("launcher").addHandler(self.ring)
        try:
            await self._run()
        finally:
            logging.getLogger("launcher").removeHandler(self.ring)

    async def _run(self) -> None:
        for warning in self._assembly.warnings:
            log.warning("%s", warning)
        for name in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(name, self._on_signal, name)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        # Both sockets before the first process: a taken port or a second daemon starts nothing.
        ready = activation.sockets()
        await self.control.start(ready.get(activation.CONTROL, ()))
        try:
            if activation.HTTP not in ready:
                await self._open(())
            _pin_to(self._assembly.plan.reserved)
            collector.settle()
            await self._serve(ready.get(activation.HTTP, ()))
        finally:
            await self.door.stop(0)
            await self.control.stop()
            await self.spawner.close(for_good=self._for_good)

    async def _open(self, ready: Sequence[socket.socket]) -> None:
        await self.door.start(ready)
        log.info("endpoint %s, %d instances", self.door.endpoint, len(self._assembly.plan.slots))

    async def _open_when_taken_over(self, ready: Sequence[socket.socket]) -> None:
        """Clients wait in systemd's socket until instances that an earlier daemon left can serve them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TAKE_OVER_S):
                await self.supervisor.taken_over()
        await self._open(ready)

    async def _serve(self, ready: Sequence[socket.socket]) -> None:
        """Until a signal; a supervisor or reporter that ends before has failed, and its error is raised."""
        async with asyncio.TaskGroup() as group:
            owners = [
                group.create_task(self.supervisor.run(), name="supervisor"),
                group.create_task(self._report(), name="systemd"),
                group.create_task(self._watch_machine(), name="machine"),
            ]
            if ready:
                owners.append(group.create_task(self._open_when_taken_over(ready), name="listener"))
            await self._stop_asked.wait()
            await self._reloader.end()
            await self._shut_down()
            for owner in owners:
                owner.cancel()

    async def _shut_down(self) -> None:
        """No new requests, those in flight to their end, then the instances; at once on a second signal."""
        notify.stopping()
        supervision = self._assembly.config.supervision
        grace = supervision.drain_timeout_s
        notify.extend_timeout(grace + supervision.stop_timeout_s + STOP_SLACK_S)
        log.info(
            "stopping: %d requests in flight; a second signal stops at once", self.door.stats()["in_flight"]
        )
        goes_on = await self.spawner.goes_on()
        self._for_good = not goes_on
        if goes_on:
            log.info("the daemon ends; its instances go on")
        end = self.door.stop(grace) if goes_on else self._end_in_order(grace)
        orderly = asyncio.create_task(end, name="orderly stop")
        kill = asyncio.create_task(self._kill_asked.wait(), name="kill asked")
        try:
            await asyncio.wait({orderly, kill}, return_when=asyncio.FIRST_COMPLETED)
            if kill.done() and goes_on:
                log.info("a second signal: requests in flight end now")
            elif kill.done():
                await self.supervisor.kill()
            else:
                await orderly
        finally:
            orderly.cancel()
            kill.cancel()
            await asyncio.gather(orderly, kill, return_exceptions=True)
        log.info("stopped")

    def _placement_of(self, slot: int) -> Placement | None:
        keeper = self.supervisor.keepers.get(slot)
        return None if keeper is None else keeper.slot.placement

    async def _end_in_order(self, grace_s: float) -> None:
        await self.door.stop(grace_s)
        await self.supervisor.stop()

    def _on_signal(self, name: signal.Signals) -> None:
        self._signals += 1
        log.info("got %s", name.name)
        self._stop_asked.set()
        if self._signals > 1:
            self._kill_asked.set()

    def _on_hangup(self) -> None:
        """As `numa-launcher reload`: what goes wrong is said in the log."""
        log.info("got SIGHUP: reload")
        self._hangup = asyncio.create_task(self._reload_by_signal(), name="reload by SIGHUP")

    async def _reload_by_signal(self) -> None:
        try:
            await self.reload(())
        except LauncherError as error:
            log.error("%s; %s", error.message, error.remedy)  # noqa: TRY400  no traceback for a person

    # --- the seam between supervisor and front door ---------------------------------------

    def _apply(self, event: InstanceEvent) -> None:
        match event:
            case InstanceReady():
                place = self._placement_of(event.slot)
                self.door.add_upstream(
                    event.slot,
                    event.generation,
                    event.model,
                    event.address,
                    event.max_num_seqs,
                    numa_node="" if place is None else str(place.membind),
                    adapters=lora_adapters(self._config_of(event.slot), event.model),
                )
            case InstanceDraining():
                self.door.drain_upstream(event.slot, event.generation)
            case InstanceGone():
                self.door.remove_upstream(event.slot, event.generation, event.reason)

    def _config_of(self, slot: int) -> Config:
        """What a slot was started by: during a reload some slots have the next configuration already."""
        target, keeper = self._reloader.target, self.supervisor.keepers.get(slot)
        if target is not None and keeper is not None and keeper.engine is target.engine:
            return target.config
        return self._assembly.config

    def _on_idle(self, slot: int, generation: int) -> None:
        self.supervisor.went_idle(slot, generation)

    def _on_suspect(self, slot: int, generation: int, reason: str) -> None:
        log.warning("slot %d: the front door could not use it: %s", slot, reason, extra={"slot": slot})
        self.supervisor.suspect(slot, generation)

    # --- instances.ports.Traffic -----------------------------------------------------------

    def in_flight(self, slot: int, generation: int) -> int:
        """Requests that the front door has on an instance."""
        return self.door.in_flight(slot, generation)

    def relayed(self, slot: int, generation: int) -> int:
        """Events that the front door has relayed from an instance."""
        return self.door.progress(slot, generation)

    # --- systemd ---------------------------------------------------------------------------

    async def _report(self) -> None:
        """READY at the first ready instance, then STATUS and the watchdog. It runs in the event loop
        beside the slots' owners: a loop that hangs kicks no watchdog, and a dead supervisor ends the daemon."""
        announced = False
        interval = min(notify.watchdog_interval_s() or STATUS_INTERVAL_S, STATUS_INTERVAL_S)
        while True:
            text = self._summary()
            if not announced and self._ready():
                announced = True
                notify.ready(text)
            notify.status(text)
            self._watchdog.beat("loop")
            if self.supervisor.moves(time.monotonic()):
                self._watchdog.beat("slots")
            if not self._watchdog.kick():
                log.error("no watchdog kick: %s stand still", ", ".join(sorted(self._watchdog.missing)))
            await asyncio.sleep(interval if announced else min(interval, 0.2))

    async def _watch_machine(self) -> None:
        """Say so when the machine is no longer the one that was planned for."""
        while True:
            await asyncio.sleep(MACHINE_INTERVAL_S)
            assembly = self._assembly
            try:
                now = await asyncio.to_thread(look, assembly.topology)
                found = drift(assembly.topology, now, assembly.plan)
            except LauncherError as error:
                found = (error.message,)
            for line in found:
                if line not in self._drift:
                    log.warning("the machine has changed: %s", line, extra={"drift": line})
            if self._drift and not found:
                log.info("the machine is again the one that was planned for", extra={"drift": ""})
            self._drift = found

    def _ready(self) -> int:
        return sum(keeper.seat.state is State.READY for keeper in self.supervisor.keepers.values())

    def _summary(self) -> str:
        states = [keeper.seat.state.value for keeper in self.supervisor.keepers.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in State if state.value in states)
        where = f" at {self.door.endpoints[0]}" if self.door.endpoints else ""
        return f"{counts}; {self.door.stats()['in_flight']} requests in flight{where}"

    # --- control.operations.Operations ----------------------------------------------------------

    def status(self) -> Status:
        """The whole state."""
        slots = tuple(
            slot_status(
                keeper,
                self.door.in_flight(keeper.slot.id, keeper.seat.generation),
                self._assembly.stack,
                self.door.first_token(keeper.slot.id),
            )
            for keeper in self.supervisor.keepers.values()
        )
        stack = self._assembly.stack
        return Status(
            slots=slots,
            ready=self._ready(),
            endpoint=next(iter(self.door.endpoints), ""),
            version=launcher.__version__,
            pid=os.getpid(),
            since=self._since,
            binding=self._assembly.binding.policy.value,
            stack={
                "vllm": stack.vllm,
                "torch": stack.torch,
                "zentorch": stack.zentorch,
                "tcmalloc": stack.tcmalloc,
            },
            requests=self.door.stats(),
            warnings=(
                *self._assembly.warnings,
                *(f"the machine has changed: {line}" for line in self._drift),
            ),
        )

    def act(self, slot: int, request: Request) -> None:
        """Ask a slot's owner for a change. Raises NotFoundError for an unknown slot, RefusedError."""
        verb = request.verb
        if self._stop_asked.is_set():
            raise RefusedError(
                f"cannot {verb} slot '{slot}': the daemon is stopping", "start the daemon again"
            )
        self.supervisor.keeper(slot)  # there is one
        check_request(slot, request, self.supervisor.keepers, self._assembly.config.supervision.min_ready)
        self.supervisor.post(slot, event_of(request))

    async def reload(
        self, overrides: Sequence[str], *, dry_run: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """Re-read the configuration and go there. Raises LauncherError; nothing has changed then."""
        if self._stop_asked.is_set():
            raise RefusedError("cannot reload: the daemon is stopping", "start the daemon again")
        return await self._reloader.reload(self._assembly, overrides, dry_run=dry_run, force=force)

    def reloading(self) -> dict[str, Any]:
        """How far the last reload has come."""
        return self._reloader.show()

    def _on_reloaded(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self.prober.timeout_s = assembly.config.supervision.probe_timeout_s

    def events(self, count: int, after: int) -> list[dict[str, Any]]:
        """The last events."""
        return self.ring.last(count, after)

    def plan(self) -> dict[str, Any]:
        """The running plan."""
        return self._assembly.to_json()

    def config(self) -> dict[str, Any]:
        """The configuration in force, secrets masked."""
        return shown(self._assembly.config, Redactor())

    async def metrics(self) -> str:
        """The metrics page."""
        return await self.door.metrics_page()

    async def redactor(self) -> Redactor:
        """What masks every secret that is known here."""
        values, _ = await asyncio.to_thread(secret_values, self._assembly.config, os.environ)
        return Redactor(values)

    def log_tail(self, slot: int, lines: int) -> list[dict[str, Any]]:
        """The last lines of a slot."""
        return [_shown(line) for line in self.supervisor.keeper(slot).log.last(lines)]

    def log_follow(self, slot: int, lines: int) -> AsyncIterator[dict[str, Any]]:
        """The last lines and then those that come."""
        feed = self.supervisor.keeper(slot).log.follow(lines)
        return (_shown(line) async for line in feed)

    async def verify(self, slot: int) -> None:
        """Look at a slot's placement now."""
        await self.supervisor.keeper(slot).verify()


def _shown(line: LogLine) -> dict[str, Any]:
    return {"time": line.time, "generation": line.generation, "text": line.text}


def _pin_to(reserved: Any) -> None:
    """The daemon lives on the reserved cpus, where there are any, and takes none from inference."""
    if reserved:
        with contextlib.suppress(OSError):  # a cpu went offline, or a cpuset shrank: not worth a refusal
            os.sched_setaffinity(0, set(reserved))


async def serve(assembly: Assembly, reread: Reread | None = None) -> None:
    """Run the daemon on an assembled plan. Raises LauncherError for violations, before anything starts.

    `reread` makes the plan anew, from the same configuration as it is then; given `section.key=value` on top.
    """
    refuse_violations(assembly)
    await Daemon(assembly, reread).run()
