"""Costs while the daemon runs: the bill counted up, energy metered, the last hour and today read from the usage ledger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from launcher.accounts.cost import (
    JOULES,
    JOULES_S,
    CostNow,
    Meter,
    Observed,
    bill,
    is_priced,
    observe,
    output_since,
)
from launcher.accounts.ledger_file import DamagedLedgerError
from launcher.accounts.report_values import HOUR_S, day_begin
from launcher.accounts.usage_report import reading
from launcher.base.background import Failures
from launcher.base.clock import Clock
from launcher.base.errors import LauncherError
from launcher.base.money import to_decimal
from launcher.config.schema import Cost
from launcher.machine.load import POWERCAP, Energy
from launcher.telemetry import metrics
from launcher.telemetry.machine_metrics import Values

log = logging.getLogger("launcher.daemon")

# A package's counter may wrap around after half a minute (launcher.machine.load).
MEASURE_S: Final = 10.0
READ_EVERY: Final = 6
"""Measurements between two readings of the ledger."""


class _Read(NamedTuple):
    """Of the ledger."""

    output_tokens: int  # served here since the daemon's start, or since the clock was set
    today: Observed | None


class Ledger(Protocol):
    """The usage ledger, as far as costs need it."""

    @property
    def path(self) -> Path: ...

    def meter(self, amounts: Iterable[tuple[str, str, float]]) -> None: ...

    def suspect(self) -> None: ...


class Costs:
    """`settings`: [cost] in force."""

    def __init__(
        self,
        settings: Callable[[], Cost],
        ledger: Ledger | None,
        powercap: Path = POWERCAP,
        clock: Clock | None = None,
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._powercap = powercap
        self._clock = clock or Clock()
        now = self._clock.now()
        self._counted_from = now.wall
        self._steps = now.steps
        self._bill = Meter(now.steady)
        self._today: Observed | None = None
        self._energy: Energy | None = None
        self._joules: dict[str, float] = {}
        self._watts: float | None = None
        """As last measured."""
        self._failed = ""
        self.failures = Failures(log, "costs")

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.read()
            self.failures.end()
            for _ in range(READ_EVERY):
                await asyncio.sleep(MEASURE_S)
                self.count()

    def count(self) -> None:
        """The bill and the energy until now."""
        cost = self._settings()
        self._bill.count(
            cost, self._clock.now().steady, self._measure() if cost.watts == "measured" else None
        )

    def _measure(self) -> float | None:
        """Joules since the last measurement. A failure is logged once."""
        try:
            if self._energy is None:
                self._energy = Energy(time.monotonic(), self._powercap)
                return None
            measured = self._energy.measure(time.monotonic())
        except LauncherError as error:
            self._energy = None
            if error.message != self._failed:
                self._failed = error.message
                log.warning("%s; %s", error.message, error.remedy)
            return None
        self._failed = ""
        if measured is None:
            return None
        for package, amount in measured.joules.items():
            self._joules[package] = self._joules.get(package, 0.0) + amount
        if measured.seconds > 0:
            self._watts = sum(measured.joules.values()) / measured.seconds
        if self._ledger is not None:
            joules = [(JOULES, package, amount) for package, amount in measured.joules.items()]
            self._ledger.meter([*joules, (JOULES_S, "", measured.seconds)])
        return sum(measured.joules.values())

    async def read(self) -> None:
        """The ledger's sums. A ledger that cannot be read is said by its writer."""
        if self._ledger is None or not is_priced(self._settings()):
            return
        now = self._clock.now()
        self.count()
        if now.steps != self._steps:  # tokens are counted by the hours in which they were entered
            self._steps, self._counted_from = now.steps, now.wall
            self._bill.forget()
        try:
            found = await asyncio.to_thread(_read, self._ledger.path, self._counted_from, now.wall)
        except LauncherError as error:
            self._today = None
            if isinstance(error, DamagedLedgerError):
                self._ledger.suspect()
            return
        self._today = found.today
        self._bill.sample(now.steady, found.output_tokens)

    def per_hour(self) -> float | None:
        """The bill of an hour like this moment, in the currency's unit; None without a price in [cost]."""
        cost = self._settings()
        if not is_priced(cost):
            return None
        joules = None if self._watts is None else self._watts * HOUR_S
        return float(to_decimal(bill(cost, HOUR_S, joules).total))

    def now(self) -> CostNow | None:
        """None without a price in [cost]."""
        cost = self._settings()
        return self._bill.now(cost, self._today) if is_priced(cost) else None

    def values(self) -> Values:
        """For the metrics page."""
        self.count()  # before anything is read: the bill and the energy are of the same moment
        cost = self._settings()
        energy: dict[tuple[str, ...], float] = {
            (package,): joules for package, joules in self._joules.items()
        }
        if not is_priced(cost):
            return {metrics.ENERGY: energy}
        hour = self._bill.now(cost, None).per_million_output
        return {
            metrics.COST: {(cost.currency,): float(to_decimal(self._bill.spent))},
            metrics.COST_PER_MILLION: {(cost.currency,): hour} if hour is not None else {},
            metrics.ENERGY: energy,
        }


def _read(path: Path, since: float, now: float) -> _Read:
    with reading(path) as (reader, zone, ledger_began):
        begin, end = max(day_begin(now, zone), int(ledger_began)), int(now)
        return _Read(
            output_tokens=output_since(reader, int(since) - HOUR_S),
            today=observe(reader, begin, end, zone) if begin < end else None,
        )
