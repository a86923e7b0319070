"""What systemd is told while the daemon serves: READY=1, the STATUS= line, the watchdog's kicks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from launcher.background import Failures, persist
from launcher.host import notify
from launcher.instances.slot_state import State
from launcher.instances.supervisor import Supervisor
from launcher.proxy.server import ProxyServer

log = logging.getLogger("launcher.daemon")

# Between updates of systemd's STATUS= line where no watchdog sets the interval.
STATUS_INTERVAL_S: Final = 5.0


class SystemdStatus:
    def __init__(self, supervisor: Supervisor, proxy: ProxyServer, ready: Callable[[], bool]) -> None:
        """`ready`: whether an instance serves."""
        self._supervisor = supervisor
        self._proxy = proxy
        self._ready = ready
        self._watchdog = notify.Watchdog("loop", "slots")
        self._failures = Failures(log, "report to systemd")

    async def run(self) -> None:
        """Until it is cancelled."""
        await persist(self._report, self._failures)

    async def _report(self) -> None:
        """READY=1 at the first ready instance, then STATUS= and the watchdog. It runs in the slot controllers' event loop:
        a loop that hangs does not kick the watchdog."""
        announced = False
        interval = min(notify.watchdog_interval_s() or STATUS_INTERVAL_S, STATUS_INTERVAL_S)
        while True:
            text = self._summary()
            if not announced and self._ready():
                announced = True
                notify.ready(text)
            notify.status(text)
            self._watchdog.beat("loop")
            if self._supervisor.makes_progress(time.monotonic()):
                self._watchdog.beat("slots")
            self._failures.end()
            if not self._watchdog.kick():
                log.error("watchdog withheld: no progress in %s", ", ".join(sorted(self._watchdog.missing)))
            await asyncio.sleep(interval if announced else min(interval, 0.2))

    def _summary(self) -> str:
        states = [controller.slot_state.state.value for controller in self._supervisor.controllers.values()]
        counts = ", ".join(f"{states.count(state)} {state}" for state in State if state.value in states)
        where = f" at {self._proxy.endpoints[0]}" if self._proxy.endpoints else ""
        return f"{counts}; {self._proxy.readings.stats()['in_flight']} requests in flight{where}"
