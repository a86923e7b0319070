"""What the daemon keeps of the requests that ended: built here, started before the proxy, stopped after it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Final, Protocol

import launcher
from launcher.accounts.audit import AuditTrail
from launcher.accounts.audit_chain import ControlEntry
from launcher.accounts.budgets import Budgets, NoSums, Past, StoredSum, rules_of
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.exporter import Dropped, Exporter
from launcher.accounts.ledger import Ledger
from launcher.accounts.ledger_schema import ledger_path
from launcher.accounts.report_values import zone_of
from launcher.accounts.spent_file import SpentFile, make_caps, read_again, read_past
from launcher.base.clock import Clock, Moment, load_reading, store_reading
from launcher.base.errors import LauncherError, reason
from launcher.base.files import state_folder
from launcher.base.money_limits import DailyCap
from launcher.config.schema import Audit, Config, Usage
from launcher.control.handlers import ControlAction
from launcher.proxy.ended import Accounting
from launcher.proxy.observability.timelines import RequestTracing
from launcher.telemetry import metrics
from launcher.telemetry.machine_metrics import Values

log = logging.getLogger("launcher.daemon")


# --- The audit trail of the daemon: made from [audit], told of control actions, shown in metrics and `status`.


class AuditAccount:
    """Does nothing without [audit] path."""

    def __init__(self, settings: Audit, clock: Clock) -> None:
        path, self._strict = settings.path, settings.strict
        self._clock = clock
        self._trail = (
            None if path is None else AuditTrail(Path(path).absolute(), settings, launcher.__version__, clock)
        )

    def joined(self, accounting: Accounting) -> Accounting:
        """With the trail as one more that is told of ended requests; with `strict`, as one that is asked before."""
        trail = self._trail
        if trail is None:
            return accounting
        record = _both(accounting.record, trail.record)
        return replace(accounting, record=record, unrecorded=trail.refusal if self._strict else None)

    async def start(self) -> None:
        """Returns when the first line is on the disk, or could not be written."""
        if self._trail is not None:
            await asyncio.to_thread(self._trail.start)

    async def stop(self) -> None:
        """After the last request has ended, and the control socket is closed. Also without `start`."""
        if self._trail is not None:
            await asyncio.to_thread(self._trail.stop)

    def acted(self, action: ControlAction) -> None:
        """An operator asked for a change."""
        if self._trail is not None:
            self._trail.record(_entry_of(action, self._clock.wall()))

    def signalled(self, verb: str, name: str, reason: str) -> None:
        """A signal asked for a change, by whom the kernel does not tell a Python handler. `reason`: why it was refused,
        or empty."""
        if self._trail is not None:
            result = "refused" if reason else "done"
            self._trail.record(
                ControlEntry(at=self._clock.wall(), verb=verb, arguments=name, result=result, reason=reason)
            )

    def values(self) -> Values:
        """For the metrics page."""
        if self._trail is None:
            return {}
        state = self._trail.state
        return {
            metrics.AUDIT_ENTRIES: {(): state.lines},
            metrics.AUDIT_LOST: {(): state.lost},
            metrics.AUDIT_OK: {(): float(not state.why)},
        }

    def warnings(self) -> tuple[str, ...]:
        """For `status`."""
        if self._trail is None:
            return ()
        state, found = self._trail.state, []
        if state.why:
            found.append(f"the audit trail cannot be written: {state.why}")
        if state.lost:
            found.append(f"the audit trail lacks {state.lost} entries, which could not be written")
        return tuple(found)


def _both(
    first: Callable[[EndedRequest], None], second: Callable[[EndedRequest], None]
) -> Callable[[EndedRequest], None]:
    def record(entry: EndedRequest) -> None:
        first(entry)
        second(entry)

    return record


def _entry_of(action: ControlAction, at: float) -> ControlEntry:
    peer = action.peer
    return ControlEntry(
        at=at, verb=action.verb, arguments=action.arguments, slot=action.slot, user=peer.user, uid=peer.uid,
        gid=peer.gid, pid=peer.pid, status=action.status, result=action.result, reason=action.reason,
    )  # fmt: skip


# --- Traces of requests in the daemon: made from [telemetry], shown in metrics and `status`. ---


class TraceAccount:
    """Does nothing without [telemetry] otlp_endpoint. Raises LauncherError for unusable headers in the environment."""

    def __init__(self, config: Config) -> None:
        endpoint, self._share = config.telemetry.otlp_endpoint, config.telemetry.otlp_sampling
        self._endpoint = endpoint
        self._exporter = Exporter(endpoint, launcher.__version__) if endpoint else None

    def joined(self, accounting: Accounting) -> Accounting:
        """With tracing."""
        exporter = self._exporter
        if exporter is None:
            return accounting
        tracing = RequestTracing(self._share, random.Random().getrandbits, exporter.export)  # noqa: S311  no secrets
        return replace(accounting, tracing=tracing)

    def start(self) -> None:
        if self._exporter is not None:
            self._exporter.start()

    async def stop(self) -> None:
        """After the last request has ended. Also without `start`."""
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.stop)

    def values(self) -> Values:
        """For the metrics page."""
        if self._exporter is None:
            return {}
        dropped = self._exporter.dropped
        return {
            metrics.TRACES_EXPORTED: {(): float(self._exporter.exported)},
            metrics.TRACES_DROPPED: {(reason.value,): float(dropped[reason]) for reason in Dropped},
            metrics.TRACES_WAITING: {(): float(self._exporter.waiting)},
        }

    def warnings(self) -> tuple[str, ...]:
        """For `status`."""
        exporter = self._exporter
        if exporter is None or not exporter.problem:
            return ()
        counts = f"{exporter.waiting} wait, {exporter.dropped.total()} were dropped"
        remedy = "start the collector, or correct [telemetry] otlp_endpoint and restart the daemon"
        return (f"cannot send traces to '{self._endpoint}': {exporter.problem}; {counts}; {remedy}",)


# Between two tries to read a ledger that could not be read.
READ_AGAIN_S: Final = 10.0
# Between two looks whether the clock was set.
LOOK_S: Final = 1.0
# Between two stores of the clock's reading. After SIGKILL and a longer time small steps are hidden (launcher.base.clock).
STORE_S: Final = 600.0
# Between two additions of the slots' ready and busy seconds to the ledger; SIGKILL loses those of so long.
METER_S: Final = 5.0


class Occupied(Protocol):
    """Seconds of a slot since the daemon's start, which never fall."""

    @property
    def ready_s(self) -> float: ...

    @property
    def busy_s(self) -> float: ...


Stored = Callable[[str, str, str], StoredSum]
Occupancy = Callable[[], Mapping[int, Occupied]]


class Accounts:
    """Raises LauncherError for a time zone that this machine does not know, and for daily caps without a state folder."""

    def __init__(
        self, config: Config, environ: Mapping[str, str] = os.environ, clock: Clock | None = None
    ) -> None:
        self.ledger: Ledger | None = None
        """None where [usage] disables it, and for a user without a state folder."""
        self._no_ledger = ""
        path: Path | None = None
        try:
            path = _path(config.usage, environ)
        except LauncherError as error:
            if any(endpoint.max_per_day is not None for endpoint in config.proxy.overflow):
                raise
            if config.usage.enabled:
                self._no_ledger = f"cannot keep the usage ledger: {error.message}; set [usage] path"
        self._path = path
        self._clock_path: Path | None = None
        if config.usage.enabled and path is not None:
            self._clock_path = path.with_name(f"{path.name}.clock")
        last = None if self._clock_path is None else load_reading(self._clock_path)
        self.clock = clock = clock or Clock(last=last)
        self._zone = zone_of(config.usage.zone)
        stored = NoSums if path is None else SpentFile(path.with_name(f"{path.name}.spent")).slot
        kept = config.usage.enabled and path is not None
        self.budgets = Budgets(rules_of(config)._replace(enabled=kept), self._zone, clock, stored)
        caps = {} if path is None else self._caps(config, path, stored)
        self.accounting = Accounting(
            caps=caps, prices=self.budgets.rules.price, budgets=self.budgets, clock=clock
        )
        """What the proxy tells of, and asks."""
        if config.usage.enabled and path is not None:
            self.ledger = Ledger(config.usage, path, clock)
            self.accounting = replace(self.accounting, record=self._record)
        self.audit = AuditAccount(config.audit, clock)
        self._audit_folder = config.audit.path
        self.traces = TraceAccount(config)
        self.accounting = self.traces.joined(self.audit.joined(self.accounting))
        self._meter: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None
        # The last reading found damage, and the writer was told.
        self._suspected = False
        self._complained = False

    def _caps(self, config: Config, path: Path, stored: Stored) -> dict[str, DailyCap]:
        """Of overflow endpoints."""
        if all(endpoint.max_per_day is None for endpoint in config.proxy.overflow):
            return {}
        return make_caps(
            config.proxy.overflow, path, self._zone, self.clock.now(), stored,
            currency=config.cost.currency, allow_unknown=config.usage.when_unknown == "allow",
        )  # fmt: skip

    def _record(self, entry: EndedRequest) -> None:
        if self.ledger is not None:
            self.ledger.record(entry)
        self.budgets.spend(entry)

    async def start(self, occupancy: Occupancy) -> None:
        """Before the proxy accepts its first request. A file that cannot be written is said in the log, and is no error.

        `occupancy`: of each slot."""
        await self.audit.start()
        self.traces.start()
        if self._no_ledger:
            log.error("%s", self._no_ledger)
        past, now = Past(), self.clock.now()
        if self.ledger is not None and self._path is not None:
            past = await asyncio.to_thread(read_past, self._path, self._zone, now.wall, now.steady)
            self._suspected = past.damaged
            if past.damaged:
                self.ledger.suspect()
        self.budgets.learn(past)
        if self.ledger is not None:
            self.ledger.start()
            self._meter = asyncio.create_task(_meter(self.ledger, occupancy), name="usage meter")
        if self._path is not None:
            unread = past.unreadable
            # Daily caps are those of the day that the clock was set from.
            read_at = now._replace(steps=now.steps - 1) if now.was_set else now
            self._reading = asyncio.create_task(
                self._read_again(self._path, read_at, unread), name="usage past"
            )

    async def _read_again(self, path: Path, read_at: Moment, unread: bool) -> None:
        """Read the ledger once more where it could not be read, and each time the clock was set. `unread`: at `read_at`."""
        stored = -inf
        while True:
            await asyncio.sleep(READ_AGAIN_S if unread else LOOK_S)
            now = self.clock.now()
            if unread or now.steps != read_at.steps:
                unread = not await self._read(path, now)
                read_at, stored = now, -inf
            if now.steady - stored >= STORE_S:
                await asyncio.to_thread(self._store_clock)
                stored = now.steady

    def _store_clock(self) -> None:
        if self._clock_path is None:
            return
        try:
            store_reading(self._clock_path, self.clock.reading)
        except OSError as error:
            if not self._complained:
                log.warning(
                    "cannot store the clock's reading in '%s': %s; after a restart nobody knows whether it was set",
                    self._clock_path, reason(error),
                )  # fmt: skip
            self._complained = True

    async def _read(self, path: Path, now: Moment) -> bool:
        """What budgets and caps have spent in the periods around `now`. False: another try may say more."""
        caps = self.accounting.caps
        self.budgets.reading()
        for cap in caps.values():
            cap.reading()
        if self.ledger is not None and not await asyncio.to_thread(self.ledger.flush):
            return False
        past = Past()
        if self.ledger is not None:
            past = await asyncio.to_thread(read_past, path, self._zone, now.wall, now.steady)
        found = await asyncio.to_thread(read_again, caps, path, self._zone, now.wall)
        if self.clock.now().steps != now.steps:  # set meanwhile
            return False
        if past.damaged and not self._suspected and self.ledger is not None:
            self.ledger.suspect()
        self._suspected = past.damaged
        if not past.unreadable:
            self.budgets.learn(past)
        for name, spent in found.items():
            caps[name].learn(spent, now)
        return not past.unreadable and found.keys() == caps.keys()

    async def stop(self) -> None:
        """After the last request has ended: what waits is written. Also without `start`, and again."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
            self.clock.now()
            await asyncio.to_thread(self._store_clock)
        await self.audit.stop()
        await self.traces.stop()
        if self.ledger is None or self._meter is None:
            return
        meter, self._meter = self._meter, None
        meter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await meter
        await asyncio.to_thread(self.ledger.stop)

    def folders(self) -> dict[str, Path]:
        """Folders that are written to, by what is kept there."""
        ledger = {} if self.ledger is None else {"usage": self.ledger.path.parent}
        trail = {} if self._audit_folder is None else {"audit": Path(self._audit_folder).absolute()}
        return ledger | trail

    def values(self) -> Values:
        """For the metrics page."""
        return {**self._of_ledger(), **self.audit.values(), **self.traces.values()}

    def _of_ledger(self) -> Values:
        if self.ledger is None:
            return {}
        state = self.ledger.state
        return {
            metrics.LEDGER_OK: {(): float(state.ok)},
            metrics.LEDGER_ENTRIES: {(): float(state.recorded)},
            metrics.LEDGER_LOST: {(): float(state.lost)},
            metrics.LEDGER_WAITING: {(): float(self.ledger.waiting)},
            metrics.LEDGER_BYTES: {(): float(state.file_bytes)},
        }

    def warnings(self) -> tuple[str, ...]:
        """What `status` says of them."""
        return (
            *self._ledger_warnings(),
            *self.budgets.warnings(),
            *self.audit.warnings(),
            *self.traces.warnings(),
        )

    def _ledger_warnings(self) -> tuple[str, ...]:
        if self.ledger is None:
            return (self._no_ledger,) if self._no_ledger else ()
        state, found = self.ledger.state, []
        if not state.ok:
            found.append(
                f"{state.problem}; {self.ledger.waiting} entries wait, {state.lost} are lost; {state.remedy}"
            )
        if state.moved_to is not None:
            found.append(
                f"the usage ledger was broken: the file is now '{state.moved_to}', and a new one began; to restore a "
                "backup: stop the daemon, `numa-launcher usage restore BACKUP`, start it"
            )
        if state.lost:
            found.append(f"the usage ledger lacks {state.lost} entries, which could not be written")
        return tuple(found)


def _path(settings: Usage, environ: Mapping[str, str]) -> Path:
    state = state_folder(None, environ, os.geteuid()) if settings.path is None else None
    return ledger_path(settings, state)


async def _meter(ledger: Ledger, occupancy: Occupancy) -> None:
    """Add the slots' seconds to the ledger, also at the end."""
    before: dict[tuple[str, str], float] = {}

    def add() -> None:
        for slot, seconds in occupancy().items():
            for what, total in (("ready_s", seconds.ready_s), ("busy_s", seconds.busy_s)):
                key = (what, str(slot))
                ledger.meter([(*key, total - before.get(key, 0.0))])
                before[key] = total

    try:
        while True:
            await asyncio.sleep(METER_S)
            add()
    finally:
        add()
