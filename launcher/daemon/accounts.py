"""What the daemon keeps of ended requests, and of the load: built here, started before the proxy, stopped after it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from msgspec.structs import replace

import launcher
from launcher.accounts.audit import AuditTrail
from launcher.accounts.audit_chain import ControlEntry
from launcher.accounts.budgets import Budgets, Past, rules_of
from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.exporter import FLUSH_S, Exporter
from launcher.accounts.ledger import Ledger, clock_path
from launcher.accounts.ledger_file import ledger_path
from launcher.accounts.report_values import zone_of
from launcher.accounts.spent_before import Before, Lookup, Slots, begin_caps, day_in, make_caps, spent_on
from launcher.accounts.spent_sums import SpentSums
from launcher.base.clock import Clock, Moment, Reading, load_reading
from launcher.base.disk import DISK_S, within
from launcher.base.errors import LauncherError
from launcher.base.files import state_folder
from launcher.base.money_limits import DailyCap
from launcher.base.writer import Sink, Writer
from launcher.config.schema import Config, Usage
from launcher.control.handlers import ControlAction
from launcher.proxy.ended import Accounting
from launcher.proxy.observability.timelines import RequestTracing
from launcher.telemetry import metrics
from launcher.telemetry.load_table import LoadTable
from launcher.telemetry.machine_metrics import Values

log = logging.getLogger("launcher.daemon")


# For all that waits at the end.
STOP_S: Final = 10.0
# Between two tries to read a ledger that could not be read.
READ_AGAIN_S: Final = 10.0
# Between two looks whether the clock was set, and whether a sink hangs.
LOOK_S: Final = 1.0
# Between two additions of the slots' ready and busy seconds to the ledger; SIGKILL loses those of so long.
METER_S: Final = 5.0


class Occupied(Protocol):
    """Seconds of a slot since the daemon's start, which never fall."""

    @property
    def ready_s(self) -> float: ...

    @property
    def busy_s(self) -> float: ...


Occupancy = Callable[[], Mapping[int, Occupied]]


class Accounts:
    """Raises LauncherError for a time zone that this machine does not know, for daily caps without a state folder, and for
    unusable headers of traces in the environment."""

    def __init__(
        self, config: Config, environ: Mapping[str, str] = os.environ, clock: Clock | None = None
    ) -> None:
        self.ledger: Ledger | None = None
        """None where [usage] disables it, and for a user without a state folder."""
        self.load = LoadTable(lambda: int(self.clock.wall() * 1000)) if config.telemetry.history else None
        """The history of the load, None where [telemetry] disables it."""
        self._file: Ledger | None = None
        """The writer of the file that the ledger and the history have together."""
        self._no_file = ""
        path: Path | None = None
        if config.usage.enabled or self.load is not None:
            try:
                path = _path(config.usage, environ)
            except LauncherError as error:
                if any(endpoint.max_per_day is not None for endpoint in config.proxy.overflow):
                    raise
                kept = ["the usage ledger"] if config.usage.enabled else []
                if self.load is not None:
                    kept.append("the history of the load beyond the daemon's end")
                self._no_file = f"cannot keep {' and '.join(kept)}: {error.message}; set [usage] path"
        if clock is None:
            clock = Clock(last=None if path is None else _last_reading(clock_path(path)))
        self.clock = clock
        self._allow_unknown = config.usage.when_unknown == "allow"
        self._stored: Slots = SpentSums().slot  # of no file, while no ledger is kept
        if path is not None:
            self._file = Ledger(config.usage, path, clock, [] if self.load is None else [self.load])
        if config.usage.enabled and self._file is not None:
            self.ledger = self._file
            self._stored = self.ledger.spent.slot
        self._zone = zone = zone_of(config.usage.zone)
        self.budgets = Budgets(
            rules_of(config)._replace(enabled=self.ledger is not None), zone, clock, self._stored
        )
        self._caps: dict[str, DailyCap] = {}
        if self.ledger is not None:
            now, currency = clock.now(), config.cost.currency
            self._caps = make_caps(config.proxy.overflow, zone, now, self._stored, currency)
        self.accounting = Accounting(
            caps=self._caps, prices=self.budgets.rules.price, budgets=self.budgets, clock=clock
        )
        """What the proxy tells of, and asks."""
        folder = None if config.audit.path is None else Path(config.audit.path).absolute()
        self._audit = (
            None if folder is None else AuditTrail(folder, config.audit, launcher.__version__, clock)
        )
        self._audit_folder = folder
        endpoint = config.telemetry.otlp_endpoint
        self._traces = Exporter(endpoint, launcher.__version__) if endpoint else None
        sinks = (self._file, self._audit, self._traces)
        self._sinks: tuple[Sink[Any], ...] = tuple(sink for sink in sinks if sink is not None)
        # A thread for each: where one hangs, or checks a large file, the others go on. By their times for the last turn.
        self._writers = [
            (Writer(name, sink), within_s)
            for name, sink, within_s in (
                ("audit", self._audit, STOP_S),
                ("usage ledger", self._file, STOP_S),
                ("traces", self._traces, FLUSH_S),
            )
            if sink is not None
        ]
        self.accounting = self._told(self.accounting, config)
        self._looking: asyncio.Task[None] | None = None
        self._meter: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    def _told(self, accounting: Accounting, config: Config) -> Accounting:
        """With all that are told of ended requests."""
        if self.ledger is not None:
            accounting = replace(accounting, record=_both(self.ledger.put, self.budgets.spend))
        if self._audit is not None:
            asked = self._audit.refusal if config.audit.strict else None
            record = _both(accounting.record, self._audit.put)
            accounting = replace(accounting, record=record, unrecorded=asked)
        if self._traces is not None:
            draw = random.Random().getrandbits  # noqa: S311  no secrets
            tracing = RequestTracing(config.telemetry.otlp_sampling, draw, self._traces.put)
            accounting = replace(accounting, tracing=tracing)
        return accounting

    async def start(self, occupancy: Occupancy) -> None:
        """Before the proxy accepts its first request. A file that cannot be written is said in the log, and is no error.

        `occupancy`: of each slot."""
        if self._no_file:
            log.error("%s", self._no_file)
        for writer, _ in self._writers:
            writer.start()
        self._looking = asyncio.create_task(self._look(), name="sinks")
        if self._audit is not None:  # the first line is on the disk, or could not be written
            await asyncio.to_thread(self._audit.flush, DISK_S)
        before, now = Before(Past(), {}), self.clock.now()
        if self.ledger is not None:
            # Daily caps are those of the day that the clock was set from.
            before = await self._before(self.ledger, now, now.steady)
            begin_caps(self._caps, before, self._stored, allow_unknown=self._allow_unknown)
        self.budgets.learn(before.keys)
        if self.ledger is not None:
            self._meter = asyncio.create_task(_meter(self.ledger, occupancy), name="usage meter")
            read_at = now._replace(steps=now.steps - 1) if now.was_set else now
            again = self._read_again(self.ledger, read_at, before.keys.unreadable)
            self._reading = asyncio.create_task(again, name="usage past")

    async def _look(self) -> None:
        """Say of a sink whose turn takes long that it does."""
        while True:
            await asyncio.sleep(LOOK_S)
            for sink in self._sinks:
                sink.look()

    async def _before(self, ledger: Ledger, now: Moment, day_at: float) -> Before:
        return await asyncio.to_thread(ledger.read, Lookup(now, day_at, tuple(self._caps)), DISK_S)

    async def _read_again(self, ledger: Ledger, read_at: Moment, unread: bool) -> None:
        """Read the ledger once more where it could not be read, and each time the clock was set. `unread`: at `read_at`."""
        while True:
            await asyncio.sleep(READ_AGAIN_S if unread else LOOK_S)
            now = self.clock.now()
            if unread or now.steps != read_at.steps:
                unread = not await self._read(ledger, now)
                read_at = now

    async def _read(self, ledger: Ledger, now: Moment) -> bool:
        """What budgets and caps have spent in the periods around `now`. False: another try may say more."""
        self.budgets.reading()
        for cap in self._caps.values():
            cap.reading()
        if not await asyncio.to_thread(ledger.flush):
            return False
        before = await self._before(ledger, now, now.wall)
        if self.clock.now().steps != now.steps:  # set meanwhile
            return False
        if not before.keys.unreadable:
            self.budgets.learn(before.keys)
        day, whole = day_in(self._zone)(now.wall), not before.keys.unreadable
        for name, cost in before.endpoints.items():
            spent = spent_on(name, cost, self._stored, day.begins)
            if spent is None:
                whole = False
            else:
                self._caps[name].learn(spent, now)
        return whole

    async def stop(self) -> None:
        """After the last request has ended: what waits is written. Also without `start`, and again."""
        for task in (self._reading, self._looking):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._meter is not None:
            meter, self._meter = self._meter, None
            meter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await meter
        # A thread of its own: all those of the loop may hang.
        own = ThreadPoolExecutor(1)
        for writer, within_s in self._writers:
            await asyncio.get_running_loop().run_in_executor(own, writer.stop, within_s)
        own.shutdown(wait=False)

    # --- control actions, for the audit trail --------------------------------------------------------

    def acted(self, action: ControlAction) -> None:
        """An operator asked for a change."""
        peer = action.peer
        self._enter(ControlEntry(
            at=self.clock.wall(), verb=action.verb, arguments=action.arguments, slot=action.slot, user=peer.user,
            uid=peer.uid, gid=peer.gid, pid=peer.pid, status=action.status, result=action.result, reason=action.reason,
        ))  # fmt: skip

    def signalled(self, reason: str) -> None:
        """SIGHUP asked for a reload, by whom the kernel does not tell a Python handler. `reason`: why it was refused, or
        empty."""
        result = "refused" if reason else "done"
        self._enter(
            ControlEntry(
                at=self.clock.wall(), verb="reload", arguments="SIGHUP", result=result, reason=reason
            )
        )

    def _enter(self, entry: ControlEntry) -> None:
        if self._audit is not None:
            self._audit.put(entry)

    # --- how they are --------------------------------------------------------------------------------

    def folders(self) -> dict[str, Path]:
        """Folders that are written to, by what is kept there."""
        ledger = {} if self._file is None else {"usage": self._file.path.parent}
        trail = {} if self._audit_folder is None else {"audit": self._audit_folder}
        return ledger | trail

    def values(self) -> Values:
        """For the metrics page."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        if (ledger := self.ledger) is not None:
            found |= {
                metrics.LEDGER_OK: {(): float(ledger.problem is None)},
                metrics.LEDGER_ENTRIES: {(): float(ledger.recorded)},
                metrics.LEDGER_LOST: {(): float(ledger.lost)},
                metrics.LEDGER_WAITING: {(): float(ledger.waiting)},
                metrics.LEDGER_BYTES: {(): float(ledger.file_bytes)},
            }
        if (audit := self._audit) is not None:
            found |= {
                metrics.AUDIT_ENTRIES: {(): float(audit.lines)},
                metrics.AUDIT_LOST: {(): float(audit.lost)},
                metrics.AUDIT_OK: {(): float(audit.problem is None)},
            }
        if (traces := self._traces) is not None:
            found |= {
                metrics.TRACES_EXPORTED: {(): float(traces.exported)},
                metrics.TRACES_DROPPED: {(why.value,): float(count) for why, count in traces.dropped.items()},
                metrics.TRACES_WAITING: {(): float(traces.waiting)},
            }
        return found

    def warnings(self) -> tuple[str, ...]:
        """What `status` says of them."""
        found = [self._no_file] if self._no_file else []
        for sink in self._sinks:
            if (problem := sink.problem) is not None:
                counts = (
                    f"{sink.waiting} entries wait, {sink.lost} are lost" if sink.waiting or sink.lost else ""
                )
                found.append("; ".join(filter(None, (problem.text, counts, problem.remedy))))
        if self._file is not None and self._file.moved_to is not None:
            what, then = "the history", ""
            if self.ledger is not None:
                what = "the usage ledger"
                then = (
                    "; to restore a backup: stop the daemon, `numa-launcher usage restore BACKUP`, start it"
                )
            found.append(
                f"{what} was broken: the file is now '{self._file.moved_to}', and a new one began{then}"
            )
        lacks = [sink for sink in (self.ledger, self._audit) if sink is not None and sink.lost]
        found += [f"{sink.title} lacks {sink.lost} entries, which could not be written" for sink in lacks]
        return (*found, *self.budgets.warnings())


def _both(
    first: Callable[[EndedRequest], None], second: Callable[[EndedRequest], None]
) -> Callable[[EndedRequest], None]:
    def record(entry: EndedRequest) -> None:
        first(entry)
        second(entry)

    return record


def _last_reading(path: Path) -> Reading | None:
    return within(DISK_S, f"read the clock's reading '{path}'", partial(load_reading, path))


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
