"""The composition root: builds the daemon's parts, connects them, and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from launcher.base import log_lines, processes
from launcher.base.background import RunningClock, persist
from launcher.base.errors import LauncherError, PassingError
from launcher.base.log_lines import EventRing
from launcher.control.server import ControlServer
from launcher.daemon import process
from launcher.daemon.accounts import Accounts
from launcher.daemon.configuration_watch import ConfigurationWatch, ReadConfig
from launcher.daemon.costs import Costs
from launcher.daemon.deployment import Deployment
from launcher.daemon.drift import MachineWatch
from launcher.daemon.instance_traffic import InstanceTraffic
from launcher.daemon.load_history import LoadHistory
from launcher.daemon.machine import MachineReader, MachineSample
from launcher.daemon.operations import Operations
from launcher.daemon.outdated import OutdatedWatch
from launcher.daemon.process import SystemdStatus
from launcher.daemon.reload import Reread, refuse_violations
from launcher.daemon.status import daemon_values, failure_values, slot_values
from launcher.daemon.usage_reports import UsageReports
from launcher.instances.choose_spawner import as_instances_user, choose_spawner
from launcher.instances.compile_cache import CompileCaches
from launcher.instances.diagnosis import cause_names
from launcher.instances.lifecycle import Limits
from launcher.instances.model_files_reader import ModelFilesReader
from launcher.instances.slot_state import ProbeSettings
from launcher.instances.spawn_direct import not_inherited
from launcher.instances.state_file import HeldFile
from launcher.instances.supervisor import Supervisor
from launcher.instances.watch import HttpProber
from launcher.machine.load import CpuBusy
from launcher.plan.plan import Placement
from launcher.proxy.downstream import listener
from launcher.proxy.downstream.listener import unused
from launcher.proxy.server import ProxyServer
from launcher.telemetry import machine_metrics, metrics
from launcher.telemetry.machine_metrics import Values

log = logging.getLogger("launcher.daemon")

# Added to drain and stop, for SIGKILL to take effect on a large process tree.
STOP_SLACK_S: Final = 30.0
# Between two tries of a reload by SIGHUP that met a passing condition, such as a model whose file system is away.
RELOAD_AGAIN_S: Final = 15.0
# For an adopted instance to answer one completion. Clients wait in the socket meanwhile.
ADOPTION_S: Final = 30.0


class Daemon:
    def __init__(
        self,
        deployment: Deployment,
        reread: Reread | None = None,
        read_config: ReadConfig | None = None,
        *,
        hung_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`hung_up`: whether a SIGHUP came after the deployment's configuration was read."""
        config = deployment.config
        self.running = RunningClock()
        self.prober = HttpProber(deployment.engine.health_path, self.running)
        self._loop = asyncio.get_running_loop()
        self._signals = 0
        self._stop_asked = asyncio.Event()
        self._kill_asked = asyncio.Event()
        self._no_listener: str | None = None
        self._hangup = asyncio.Event()
        """A SIGHUP has come, and no reload has read the configuration since."""
        self._hung_up = hung_up
        self._reload_waits_for = ""
        """Why a reload by SIGHUP will be tried again."""
        self._for_good = False
        """systemd must not start the daemon again."""
        self.accounts = Accounts(config)
        self.costs = Costs(
            lambda: self.operations.deployment.config.cost, self.accounts.ledger, clock=self.accounts.clock
        )
        self.proxy = ProxyServer(
            config.proxy, models=config.models, on_idle=self._on_idle, on_suspect=self._on_suspect,
            most_clients=processes.most_clients(
                processes.limit_now(), config.proxy.max_connections, deployment.connections
            ),
            more_values=self._more_values, accounting=self.accounts.accounting,
            running=self.running,
        )  # fmt: skip
        self.traffic = InstanceTraffic(
            self.proxy,
            lambda slot: self.operations.deployment_of(slot),  # noqa: PLW0108  made later
            self._placement_of,
        )
        self.spawner = choose_spawner(
            config,
            os.environ,
            deployment.topology.allowed | deployment.topology.offline,  # a reload may use what comes online
            deployment.run_dir.with_suffix(".state"),
            self._placement_of,
        )
        identify = ModelFilesReader()
        self.supervisor = Supervisor(
            deployment.plan,
            engine=deployment.engine,
            spawner=self.spawner,
            prober=self.prober,
            limits=Limits.of(config.supervision),
            probing=ProbeSettings.of(config),
            announce=self.traffic.apply,
            traffic=self.traffic,
            held=HeldFile(deployment.run_dir.with_suffix(".held")),
            caches=CompileCaches(become=as_instances_user(self.spawner, config)),
            identify=identify,
            skipped=self.running.skipped,
        )
        self.outdated = OutdatedWatch(self.supervisor.controllers, identify)
        self.ring = EventRing(began=int(time.time() * 1000))
        self.machine = MachineWatch(
            lambda: (self.operations.deployment.topology, self.operations.deployment.plan)
        )
        self.cpu_busy = CpuBusy()
        self.history = LoadHistory(
            self.accounts.load,
            self.proxy,
            lambda: self.supervisor.controllers,
            self.cpu_busy.shares,
            self.costs.per_hour,
        )
        self.sample = MachineSample(
            lambda: [node.id for node in self.operations.deployment.topology.numa_nodes],
            self.accounts.folders(),
        )
        self.operations = Operations(
            deployment, self.supervisor, self.prober, self.proxy, self.ring, reread=reread,
            stopping=self._stop_asked.is_set, drift=lambda: self.machine.found, history=self.history.answer,
            warnings=lambda: (*self.accounts.warnings(), *self.history.warnings(), *log_lines.warnings()),
            usage=UsageReports(self.accounts.ledger, config.cost.currency), cost_now=self.costs.now,
            spent_elsewhere=self.accounts.budgets.told, unapplied=lambda: self.configuration.unapplied,
            outdated=self.outdated.why, no_listener=lambda: self._no_listener,
            machine=MachineReader(
                self.cpu_busy, deployment=lambda: self.operations.deployment,
                controllers=lambda: self.supervisor.controllers, drift=lambda: self.machine.found,
                disks=lambda: self.sample.disks,
            ),
        )  # fmt: skip
        self.configuration = ConfigurationWatch(read_config, lambda: self.operations.deployment)
        self.systemd = SystemdStatus(
            self.supervisor, self.proxy, lambda: self.operations.ready > 0, self.running
        )
        self.control = ControlServer(
            config.control.socket,
            config.control.group,
            self.operations,
            read_group=config.control.read_group,
            record=self.accounts.acted,
        )

    async def run(self) -> None:
        """Serve until a signal; then drain, stop or leave the instances, and return. Raises LauncherError."""
        logging.getLogger("launcher").addHandler(self.ring)
        try:
            await self._run()
        finally:
            logging.getLogger("launcher").removeHandler(self.ring)

    async def _run(self) -> None:
        for warning in (
            *self.operations.deployment.warnings,
            *not_inherited(os.environ, self.operations.deployment.engine.unwanted),
        ):
            log.warning("%s", warning)
        for name in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(name, self._on_signal, name)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        if self._hung_up():
            self._on_hangup()
        # Open both sockets before the first instance: on a used port, or beside another daemon, nothing starts.
        ready = listener.sockets()
        await self.control.start(ready.get(listener.CONTROL, ()))
        try:
            # Before more threads begin: each has the cpus of the one that began it.
            _pin_to(self.operations.deployment.plan.reserved)
            await self.accounts.start(self.proxy.readings.occupancy)
            if listener.CONTROL in ready and listener.HTTP not in ready:
                # Another address than the one that clients and firewalls know would be worse than none.
                self._no_listener = listener.NOT_HANDED_OVER
                log.error("%s; %s", self._no_listener, listener.NOT_HANDED_OVER_REMEDY)
                await self.proxy.start((), listens=False)
            elif listener.HTTP not in ready:
                await self._open(())
            process.settle()
            await self._serve(ready.get(listener.HTTP, ()))
        finally:
            await self.proxy.stop(0)
            await self.control.stop()
            await self.accounts.stop()
            await self.spawner.close(for_good=self._for_good)

    async def _open(self, ready: Sequence[socket.socket]) -> None:
        await self.proxy.start(ready)
        log.info("endpoint %s, %d instances", self.proxy.endpoint, len(self.operations.deployment.plan.slots))
        if absent := self.proxy.absent_endpoints:
            log.warning(
                "no interface of this host has the address of %s yet (ip addr): clients reach it as soon as one has",
                ", ".join(absent),
            )
        idle = unused(self.operations.deployment.config.proxy.listen, self.proxy.endpoints) if ready else []
        if idle:
            log.warning(
                "[proxy] listen = %s is not used: systemd listens on %s; change it with systemctl edit numa-launcher.socket",
                ", ".join(idle), ", ".join(self.proxy.endpoints),
            )  # fmt: skip

    async def _open_when_adopted(self, ready: Sequence[socket.socket]) -> None:
        """Clients wait in systemd's socket until adopted instances can serve them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ADOPTION_S):
                await self.supervisor.adopted_ready()
        await self._open(ready)

    async def _serve(self, ready: Sequence[socket.socket]) -> None:
        """Until a signal. A task that ends before has failed, and its error is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                owners = [
                    group.create_task(self.running.run(log), name="running clock"),
                    group.create_task(self.supervisor.run(), name="supervisor"),
                    group.create_task(self._reload_by_signals(), name="reload by SIGHUP"),
                    group.create_task(self.systemd.run(), name="systemd"),
                    group.create_task(self.machine.run(), name="machine"),
                    group.create_task(self.configuration.run(), name="configuration"),
                    group.create_task(self.outdated.run(), name="outdated"),
                    group.create_task(self.sample.run(), name="machine sample"),
                    group.create_task(persist(self.costs.run, self.costs.failures), name="costs"),
                    group.create_task(persist(self.history.run, self.history.failures), name="history"),
                ]
                if ready:
                    owners.append(group.create_task(self._open_when_adopted(ready), name="listener"))
                await self._stop_asked.wait()
                await self.operations.end()
                await self._shut_down()
                for owner in owners:
                    owner.cancel()
        except BaseExceptionGroup as group:
            raise _for_a_person(group) or group from None

    async def _shut_down(self) -> None:
        """Refuse new requests, finish those in flight, then stop the instances; at once on a second signal."""
        process.stopping()
        supervision = self.operations.deployment.config.supervision
        grace = supervision.drain_timeout_s
        process.extend_timeout(grace + supervision.stop_timeout_s + STOP_SLACK_S)
        log.info(
            "stopping: %d requests in flight; a second signal stops at once",
            self.proxy.readings.stats()["in_flight"],
        )
        if await self._keeps_instances():
            log.info("daemon exiting; instances keep running")
        orderly = asyncio.create_task(self._end_in_order(grace), name="orderly stop")
        kill = asyncio.create_task(self._kill_asked.wait(), name="kill asked")
        try:
            await asyncio.wait({orderly, kill}, return_when=asyncio.FIRST_COMPLETED)
            if not kill.done():
                await orderly
            elif await self._keeps_instances():
                log.info("second signal: requests in flight end now")
            else:
                await self.supervisor.kill()
        finally:
            orderly.cancel()
            kill.cancel()
            await asyncio.gather(orderly, kill, return_exceptions=True)
        log.info("stopped")

    def _placement_of(self, slot: int) -> Placement | None:
        controller = self.supervisor.controllers.get(slot)
        return None if controller is None else controller.slot.placement

    async def _keeps_instances(self) -> bool:
        """Whether the instances keep running. Asked at each step: during a restart's drain, which takes minutes, `systemctl
        stop` may be called. A stop is final."""
        if not self._for_good:
            self._for_good = not await self.spawner.keeps_instances()
        return not self._for_good

    async def _end_in_order(self, grace_s: float) -> None:
        await self.proxy.stop(grace_s)
        if not await self._keeps_instances():
            await self.supervisor.stop()

    def _on_signal(self, name: signal.Signals) -> None:
        self._signals += 1
        log.info("got %s", name.name)
        self._stop_asked.set()
        if self._signals > 1:
            self._kill_asked.set()

    def _on_hangup(self) -> None:
        log.info("got SIGHUP: reload", extra={"audit": "done", "verb": "reload"})
        self._hangup.set()

    async def _reload_by_signals(self) -> None:
        """Signals coalesce: however many come during a reload, one more follows it."""
        while True:
            await self._hangup.wait()
            await self._reload_by_signal()

    async def _reload_by_signal(self) -> None:
        why = ""
        try:
            await self.operations.reload_again(self._hangup.clear)
            self._reload_waits_for = ""
        except LauncherError as error:
            why, again = error.message, isinstance(error, PassingError)
            if again:
                self._loop.call_later(RELOAD_AGAIN_S, self._hangup.set)
                if why == self._reload_waits_for:
                    return
            self._reload_waits_for = why if again else ""
            log.error(  # noqa: TRY400  no traceback for a person
                "%s; %s", error.message, error.remedy,
                extra={"audit": "refused", "verb": "reload", "remedy": error.remedy},
            )  # fmt: skip
        except Exception:  # a later signal may be obeyed
            why = "internal error"
            log.exception("cannot reload", extra={"audit": "refused", "verb": "reload"})
        self.accounts.signalled(why)

    def _on_idle(self, slot: int, generation: int) -> None:
        self.supervisor.went_idle(slot, generation)

    def _on_suspect(self, slot: int, generation: int, reason: str) -> None:
        log.warning(
            "slot %d: the proxy could not use its instance: %s", slot, reason,
            extra={"slot": slot, "generation": generation},
        )  # fmt: skip
        self.supervisor.suspect(slot, generation)

    def _more_values(self) -> Values:
        return {
            **daemon_values(self.operations.deployment.stack, self.operations.since),
            **slot_values(self.supervisor.controllers.values()),
            **failure_values(self.supervisor.failures, cause_names(self.operations.deployment.engine.log)),
            machine_metrics.DIFFERENCES: {(): len(self.machine.found)},
            **self.sample.values(),
            **self.accounts.values(),
            **self.costs.values(),
            metrics.LOG_LINES_DROPPED: {(): log_lines.dropped()},
        }


def _for_a_person(group: BaseExceptionGroup[BaseException]) -> LauncherError | None:
    """The first LauncherError of a group; the other errors are logged."""
    for_people, others = group.split(LauncherError)
    if for_people is None:
        return None
    if others is not None:
        log.error("other tasks also failed", exc_info=others)
    error: BaseException = for_people
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, LauncherError)  # noqa: S101  split by that
    return error


def _pin_to(reserved: Any) -> None:
    """All threads that there are: the one that writes log lines has begun."""
    for thread in Path("/proc/self/task").iterdir() if reserved else ():
        with contextlib.suppress(OSError):  # a cpu is offline, the cpuset shrank, or the thread has ended
            os.sched_setaffinity(int(thread.name), set(reserved))


async def serve(
    deployment: Deployment,
    reread: Reread | None = None,
    read_config: ReadConfig | None = None,
    *,
    hung_up: Callable[[], bool] = lambda: False,
) -> None:
    """Run the daemon of a deployment. Raises LauncherError for violations, before anything starts.

    `reread` builds the deployment again from the current configuration and `section.key=value` overrides; `read_config`
    only reads the configuration. `hung_up`: whether a SIGHUP came since the deployment's was read."""
    refuse_violations(deployment)
    await Daemon(deployment, reread, read_config, hung_up=hung_up).run()
