"""Looks at the machine now and then, and says when it is no longer the one that was planned for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from launcher.background import Failures, attempt
from launcher.daemon.drift import Sight, added, drift, look
from launcher.errors import LauncherError
from launcher.plan import Plan
from launcher.topology.model import Topology

log = logging.getLogger("launcher.daemon")

# Between two looks: cpus, cpuset, memory. One costs milliseconds.
MACHINE_INTERVAL_S: Final = 15.0


class MachineWatch:
    """`planned` is the machine and the plan that are in force; `look_at` reads the machine as it is."""

    def __init__(
        self,
        planned: Callable[[], tuple[Topology, Plan]],
        look_at: Callable[[Topology], Sight] = look,
    ) -> None:
        self._planned = planned
        self._look_at = look_at
        self._first: Sight | None = None
        self.found: tuple[str, ...] = ()
        """What is other than planned, one line each."""

    async def run(self) -> None:
        """Until cancelled."""
        failures = Failures(log, "look at the machine")
        while True:
            await asyncio.sleep(MACHINE_INTERVAL_S)
            await attempt(self.look, failures)

    async def look(self) -> None:
        """Once; each thing is said when it is new."""
        topology, plan = self._planned()
        try:
            now = await asyncio.to_thread(self._look_at, topology)
            self._first = self._first or now
            found = drift(topology, now.topology, plan, added(topology, self._first, now))
        except LauncherError as error:
            found = (error.message,)
        for line in found:
            if line not in self.found:
                log.warning("the machine has changed: %s", line, extra={"drift": line})
        if self.found and not found:
            log.info("the machine is again the one that was planned for", extra={"drift": ""})
        self.found = found
