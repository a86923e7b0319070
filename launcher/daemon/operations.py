"""The operator's façade of a running daemon (control.operations.Operations), and the deployment in force."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import launcher
from launcher.accounts.budgets import BudgetState
from launcher.accounts.cost import CostNow, CostReport
from launcher.accounts.report_values import UsageReport, UsageRequests, UsageToday
from launcher.accounts.timeline import Timeline
from launcher.base.build import build
from launcher.base.errors import RefusedError
from launcher.base.log_lines import EventRing
from launcher.base.redaction import Redactor
from launcher.config.loading import shown
from launcher.control.messages import DISRUPTIVE, Request, SlotCommand
from launcher.daemon.deployment import Deployment
from launcher.daemon.machine import MachineReader, MachineStatus
from launcher.daemon.measured import Measurement, Measurements
from launcher.daemon.reload import Reloader, Reread
from launcher.daemon.secrets import Secrets
from launcher.daemon.status import Status, on_clock, slot_status
from launcher.daemon.usage_reports import RequestFinder, UsageReports, question_of
from launcher.instances.output import LogLine
from launcher.instances.slot_controller import SlotController
from launcher.instances.slot_state import (
    DrainRequested,
    Event,
    HoldRequested,
    Intent,
    QuarantineRequested,
    ReleaseRequested,
    RestartRequested,
    ResumeRequested,
    StartRequested,
    State,
    StopRequested,
)
from launcher.instances.spawn_direct import not_inherited
from launcher.instances.supervisor import Availability, Supervisor, check
from launcher.instances.watch import HttpProber
from launcher.machine.topology_text import layout_json
from launcher.proxy.readings import token_sum
from launcher.proxy.server import ProxyServer

# --- An operator's command as an event for a slot, or the reason why it is refused. ---

_EVENTS: Final[dict[SlotCommand, Event]] = {
    SlotCommand.RESTART: RestartRequested(),
    SlotCommand.DRAIN: DrainRequested(),
    SlotCommand.HOLD: HoldRequested(),
    SlotCommand.QUARANTINE: QuarantineRequested(),
    SlotCommand.RELEASE: ReleaseRequested(),
    SlotCommand.RESUME: ResumeRequested(),
    SlotCommand.STOP: StopRequested(),
    SlotCommand.START: StartRequested(),
}

# Refused for a held or quarantined slot.
_NEEDS_RELEASE: Final = frozenset(
    {SlotCommand.START, SlotCommand.RESTART, SlotCommand.RESUME, SlotCommand.DRAIN}
)
_WITH_INSTANCE: Final = frozenset({State.STARTING, State.READY, State.DRAINING})


def event_of(request: Request) -> Event:
    return (
        DrainRequested(request.deadline_s)
        if request.command is SlotCommand.DRAIN
        else _EVENTS[request.command]
    )


def check_request(
    slot: int, request: Request, controllers: Mapping[int, SlotController], min_ready: int | None
) -> None:
    """Raise RefusedError where the command has no effect, or would leave too few instances."""
    _check_intent(controllers[slot], request.command)
    if request.command in DISRUPTIVE and not request.force:
        check(request.command, slot, availability(controllers), min_ready)


def availability(controllers: Mapping[int, SlotController]) -> dict[int, Availability]:
    return {
        number: Availability(controller.slot.model.name, controller.in_rotation)
        for number, controller in controllers.items()
    }


def _check_intent(controller: SlotController, command: SlotCommand) -> None:
    slot_state, slot = controller.slot_state, controller.slot.id
    kept = {Intent.HOLD: "held", Intent.QUARANTINE: "in quarantine"}.get(slot_state.intent)
    if kept is not None and command in _NEEDS_RELEASE:
        raise RefusedError(f"cannot {command} slot '{slot}': it is {kept}", f"numa-launcher release {slot}")
    if command is SlotCommand.RELEASE and kept is None and slot_state.intent is not Intent.RUN:
        remedy = f"numa-launcher {'resume' if slot_state.intent is Intent.DRAIN else 'start'} {slot}"
        raise RefusedError(f"cannot release slot '{slot}': it is neither held nor in quarantine", remedy)
    if command is SlotCommand.QUARANTINE and slot_state.state not in _WITH_INSTANCE:
        raise RefusedError(
            f"cannot quarantine slot '{slot}': it is {slot_state.state}, with no running instance",
            f"numa-launcher hold {slot} keeps it stopped; numa-launcher why {slot} shows why it ended",
        )
    if command in {SlotCommand.DRAIN, SlotCommand.RESUME} and slot_state.state in {
        State.STOPPED,
        State.FAILED,
    }:
        raise RefusedError(
            f"cannot {command} slot '{slot}': it is {slot_state.state}", f"numa-launcher start {slot}"
        )


class Operations:
    """`stopping`: the daemon exits; `drift`: how the machine differs from the plan; `warnings`: of the accounts;
    `history`: the reply of ``GET /v1/history``; `cost_now`: live costs; `unapplied`: how the configuration file differs
    from the deployment in force; `outdated`: why an instance, by slot and generation, is not what would start now;
    `no_listener`: why the daemon listens nowhere."""

    def __init__(
        self,
        deployment: Deployment,
        supervisor: Supervisor,
        prober: HttpProber,
        proxy: ProxyServer,
        ring: EventRing,
        *,
        reread: Reread | None,
        stopping: Callable[[], bool],
        drift: Callable[[], tuple[str, ...]],
        warnings: Callable[[], tuple[str, ...]],
        usage: UsageReports,
        machine: MachineReader,
        history: Callable[[str, int, str], Awaitable[bytes]],
        cost_now: Callable[[], CostNow | None],
        spent_elsewhere: Callable[[bytes], dict[str, int | list[str]]],
        unapplied: Callable[[], str],
        outdated: Callable[[int, int], str | None],
        no_listener: Callable[[], str | None],
    ) -> None:
        self.deployment = deployment
        """In force: the last that a reload has applied."""
        self._supervisor = supervisor
        self._proxy = proxy
        self._ring = ring
        self._stopping = stopping
        self._drift = drift
        self._usage = usage
        self._history = history
        self._warnings = warnings
        self._cost_now = cost_now
        self._spent_elsewhere = spent_elsewhere
        self._unapplied = unapplied
        self._outdated = outdated
        self._no_listener = no_listener
        self._from_outside = not_inherited(os.environ, deployment.engine.unwanted)
        self._machine = machine
        self._measurements = Measurements()
        self.since = time.time()
        """Start of the daemon, on the clock that there was then."""
        self._began = time.monotonic()
        self._requests = RequestFinder(proxy.requests, usage, self.since)
        self._secrets = Secrets(lambda: self.deployment.config)
        self._reloader = Reloader(supervisor, prober, reread, self._on_reloaded)

    @property
    def ready(self) -> int:
        return sum(
            controller.slot_state.state is State.READY for controller in self._supervisor.controllers.values()
        )

    def deployment_of(self, slot: int) -> Deployment:
        """The deployment of a slot: during a reload, or after one that got stuck, some slots have the next one."""
        target, controller = self._reloader.target, self._supervisor.controllers.get(slot)
        if target is not None and controller is not None and controller.engine is target.engine:
            return target
        return self.deployment

    def _on_reloaded(self, deployment: Deployment) -> None:
        self.deployment = deployment

    async def end(self) -> None:
        await self._reloader.end()

    def status(self) -> Status:
        slots = tuple(
            slot_status(
                controller,
                self._proxy.in_flight(controller.slot.id, controller.slot_state.generation),
                self.deployment.stack,
                self._proxy.readings.first_token(controller.slot.id),
                self._outdated(controller.slot.id, controller.slot_state.generation),
            )
            for controller in self._supervisor.controllers.values()
        )
        stack, tokens = self.deployment.stack, self._proxy.readings.tokens()
        unapplied = self._unapplied()
        return Status(
            slots=slots,
            ready=self.ready,
            endpoint=next(iter(self._proxy.endpoints), ""),
            endpoints=tuple(self._proxy.endpoints),
            absent_endpoints=tuple(self._proxy.absent_endpoints),
            version=launcher.__version__,
            build=build(),
            pid=os.getpid(),
            since=on_clock(self._began, time.monotonic(), time.time()),
            binding=self.deployment.binding.policy.value,
            stack={
                "vllm": stack.vllm,
                "torch": stack.torch,
                "zentorch": stack.zentorch,
                "tcmalloc": stack.tcmalloc,
            },
            requests=self._proxy.readings.stats(),
            warnings=(
                *self.deployment.warnings,
                *(f"the machine has changed: {line}" for line in self._drift()),
                *self._warnings(),
                *self._from_outside,
                *self._supervisor.warnings,
            ),
            files=self._proxy.readings.files(),
            no_listener=self._no_listener(),
            unapplied=f"{unapplied}{self._reloader.outcome}" if unapplied else None,
            measured_layout=self.deployment.measured,
            queue=self._proxy.readings.queue(),
            first_token=self._proxy.readings.first_token(),
            tokens=token_sum(tokens.values()),
            tokens_by_model=tokens,
            keys=self._proxy.readings.keys(),
            cost=self._cost_now(),
        )

    def act(self, slot: int, request: Request) -> None:
        command = request.command
        if self._stopping():
            raise RefusedError(
                f"cannot {command} slot '{slot}': the daemon is stopping", "start the daemon again"
            )
        self._supervisor.controller(slot)  # raises NotFoundError
        check_request(
            slot, request, self._supervisor.controllers, self.deployment.config.supervision.min_ready
        )
        self._supervisor.post(slot, event_of(request))

    async def reload(
        self, overrides: Sequence[str], *, dry_run: bool = False, force: bool = False
    ) -> dict[str, Any]:
        if self._stopping():
            raise RefusedError("cannot reload: the daemon is stopping", "start the daemon again")
        return await self._reloader.reload(self.deployment, overrides, dry_run=dry_run, force=force)

    async def reload_again(self, begins: Callable[[], None]) -> None:
        """`reload` after the one that runs now, if any; `begins` is called just before the configuration is read.

        Raises as `reload`, but never because another one runs."""
        await self._reloader.idle()
        begins()
        await self.reload(())

    def reloading(self) -> dict[str, Any]:
        return self._reloader.show()

    def events(self, count: int, after: int) -> list[dict[str, Any]]:
        return self._ring.last(count, after)

    def plan(self) -> dict[str, Any]:
        return self.deployment.to_json()

    def topology(self) -> dict[str, Any]:
        return layout_json(self.deployment.topology, self.deployment.plan.reserved)

    async def history(self, span: str, after: int, slots: str) -> bytes:
        return await self._history(span, after, slots)

    async def machine(self) -> MachineStatus:
        return await self._machine.status()

    async def measurements(self) -> list[Measurement]:
        return await self._measurements.newest()

    def config(self) -> dict[str, Any]:
        return shown(self.deployment.config, Redactor())

    async def metrics(self) -> str:
        return await self._proxy.metrics_page()

    async def usage_today(self) -> UsageToday | None:
        return await self._usage.today()

    def budgets(self) -> list[BudgetState]:
        return self._proxy.readings.budgets()

    def spent_elsewhere(self, body: bytes) -> dict[str, int | list[str]]:
        return self._spent_elsewhere(body)

    async def usage(self, asked: Mapping[str, str]) -> UsageReport:
        return await self._usage.report(question_of(asked))

    async def usage_requests(self, asked: Mapping[str, str], limit: int) -> UsageRequests:
        return await self._usage.requests(question_of(asked), limit)

    async def request(self, request_id: str) -> Timeline:
        return await self._requests.find(request_id)

    async def cost(self, since: str) -> CostReport:
        return await self._usage.cost(self.deployment.config.cost, since)

    async def redactor(self) -> Redactor:
        return await self._secrets.redactor()

    def log_tail(self, slot: int, lines: int) -> list[dict[str, Any]]:
        return [_shown(line) for line in self._supervisor.controller(slot).log.last(lines)]

    def log_follow(self, slot: int, lines: int) -> AsyncGenerator[dict[str, Any], None]:
        return _all_shown(self._supervisor.controller(slot).log.follow(lines))

    async def verify(self, slot: int) -> None:
        await self._supervisor.controller(slot).verify()


async def _all_shown(feed: AsyncGenerator[LogLine, None]) -> AsyncGenerator[dict[str, Any], None]:
    async with contextlib.aclosing(feed):
        async for line in feed:
            yield _shown(line)


def _shown(line: LogLine) -> dict[str, Any]:
    return {"time": line.time, "generation": line.generation, "text": line.text}
