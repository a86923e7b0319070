"""What the daemon keeps of the requests that ended: built here, started before the proxy, stopped after it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from launcher.config.schema import Config, Usage
from launcher.daemon.audit import AuditAccount
from launcher.daemon.traces import TraceAccount
from launcher.errors import LauncherError
from launcher.host.state_folder import state_folder
from launcher.proxy.accounting import Accounting
from launcher.telemetry import metrics
from launcher.telemetry.spec import Values
from launcher.usage.budget_rules import rules_of
from launcher.usage.budgets import Budgets, NoSums, Past, StoredSum
from launcher.usage.caps import make_caps, read_again
from launcher.usage.daily_cap import DailyCap
from launcher.usage.entry import Entry
from launcher.usage.ledger import Ledger
from launcher.usage.past import read_past
from launcher.usage.schema import ledger_path
from launcher.usage.spans import zone_of
from launcher.usage.spent_file import SpentFile

log = logging.getLogger("launcher.daemon")

# Between two tries to read a ledger that could not be read.
READ_AGAIN_S: Final = 10.0
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

    def __init__(self, config: Config, environ: Mapping[str, str] = os.environ) -> None:
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
        self._zone = zone_of(config.usage.zone)
        stored = NoSums if path is None else SpentFile(path.with_name(f"{path.name}.spent")).slot
        kept = config.usage.enabled and path is not None
        self.budgets = Budgets(rules_of(config)._replace(enabled=kept), self._zone, time.time, stored)
        caps = {} if path is None else self._caps(config, path, stored)
        self.accounting = Accounting(caps=caps, prices=self.budgets.rules.price, budgets=self.budgets)
        """What the proxy tells of, and asks."""
        if config.usage.enabled and path is not None:
            self.ledger = Ledger(config.usage, path)
            self.accounting = replace(self.accounting, record=self._record)
        self.audit = AuditAccount(config.audit)
        self._audit_folder = config.audit.path
        self.traces = TraceAccount(config)
        self.accounting = self.traces.joined(self.audit.joined(self.accounting))
        self._meter: asyncio.Task[None] | None = None
        self._reading: asyncio.Task[None] | None = None

    def _caps(self, config: Config, path: Path, stored: Stored) -> dict[str, DailyCap]:
        """Of overflow endpoints."""
        if all(endpoint.max_per_day is None for endpoint in config.proxy.overflow):
            return {}
        return make_caps(
            config.proxy.overflow, path, self._zone, time.time(), stored,
            currency=config.cost.currency, allow_unknown=config.usage.when_unknown == "allow",
        )  # fmt: skip

    def _record(self, entry: Entry) -> None:
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
        past = Past()
        if self.ledger is not None and self._path is not None:
            began = time.time()
            past = await asyncio.to_thread(read_past, self._path, self._zone, began)
            if past.unreadable:
                self._reading = asyncio.create_task(self._read_again(self._path, began), name="usage past")
        self.budgets.learn(past)
        if self.ledger is not None:
            self.ledger.start()
            self._meter = asyncio.create_task(_meter(self.ledger, occupancy), name="usage meter")

    async def _read_again(self, path: Path, began: float) -> None:
        """Until the ledger can be read. `began`: the requests that ended since are this daemon's."""
        past = Past(unreadable=True)
        while past.unreadable:
            await asyncio.sleep(READ_AGAIN_S)
            past = await asyncio.to_thread(read_past, path, self._zone, time.time(), began)
        self.budgets.learn(past)
        unknown = [name for name, cap in self.accounting.caps.items() if not cap.known]
        for name, spent in (await asyncio.to_thread(read_again, unknown, path, self._zone, began)).items():
            self.accounting.caps[name].learn(spent)

    async def stop(self) -> None:
        """After the last request has ended: what waits is written. Also without `start`, and again."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
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
                f"the usage ledger was broken: the file is now '{state.moved_to}', and a new one began"
            )
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
