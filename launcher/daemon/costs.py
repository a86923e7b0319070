"""Costs while the daemon runs: the bill counted up, energy metered, the last hour and today read from the usage ledger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from launcher.background import Failures
from launcher.config.schema import Cost
from launcher.errors import LauncherError
from launcher.money import to_decimal
from launcher.telemetry import metrics
from launcher.telemetry.spec import Values
from launcher.usage.bill import bill, is_priced
from launcher.usage.cost import Observed
from launcher.usage.energy import POWERCAP, Energy
from launcher.usage.live import CostNow, Meter
from launcher.usage.observe import JOULES, JOULES_S, observe, output_since
from launcher.usage.report import reading
from launcher.usage.spans import HOUR_S, day_begin

log = logging.getLogger("launcher.daemon")

# A package's counter may wrap around after half a minute (launcher.usage.energy).
MEASURE_S: Final = 10.0
READ_EVERY: Final = 6
"""Measurements between two readings of the ledger."""


class _Read(NamedTuple):
    """Of the ledger."""

    output_tokens: int  # served here since the daemon's start
    today: Observed | None


class Ledger(Protocol):
    """The usage ledger, as far as costs need it."""

    @property
    def path(self) -> Path: ...

    def meter(self, amounts: Iterable[tuple[str, str, float]]) -> None: ...


class Costs:
    """`settings`: [cost] in force."""

    def __init__(
        self, settings: Callable[[], Cost], ledger: Ledger | None, powercap: Path = POWERCAP
    ) -> None:
        self._settings = settings
        self._ledger = ledger
        self._powercap = powercap
        self._began = time.time()
        self._bill = Meter(self._began)
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
        self._bill.count(cost, time.time(), self._measure() if cost.watts == "measured" else None)

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
        now = time.time()
        self.count()
        try:
            found = await asyncio.to_thread(_read, self._ledger.path, self._began, now)
        except LauncherError:
            self._today = None
            return
        self._today = found.today
        self._bill.sample(now, found.output_tokens)

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
        cost = self._settings()
        energy: dict[tuple[str, ...], float] = {
            (package,): joules for package, joules in self._joules.items()
        }
        if not is_priced(cost):
            return {metrics.ENERGY: energy}
        self.count()
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
