"""Reads the machine periodically and logs how it differs from the plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from launcher.background import Failures, attempt
from launcher.daemon.drift import MachineView, added, drift, read_machine
from launcher.errors import LauncherError
from launcher.plan import Plan
from launcher.topology.model import Topology

log = logging.getLogger("launcher.daemon")

# Between two readings of cpus, cpuset and memory; one takes milliseconds.
MACHINE_INTERVAL_S: Final = 15.0


class MachineWatch:
    """`planned` returns the machine and the plan in force; `read` reads the machine as it is."""

    def __init__(
        self,
        planned: Callable[[], tuple[Topology, Plan]],
        read: Callable[[Topology], MachineView] = read_machine,
    ) -> None:
        self._planned = planned
        self._read = read
        self._first: MachineView | None = None
        self.found: tuple[str, ...] = ()
        """The differences, one line each."""

    async def run(self) -> None:
        failures = Failures(log, "read the machine")
        while True:
            await asyncio.sleep(MACHINE_INTERVAL_S)
            await attempt(self.check, failures)

    async def check(self) -> None:
        """Read the machine once; log each new difference."""
        topology, plan = self._planned()
        try:
            now = await asyncio.to_thread(self._read, topology)
            self._first = self._first or now
            found = drift(topology, now.topology, plan, added(topology, self._first, now))
        except LauncherError as error:
            found = (error.message,)
        for line in found:
            if line not in self.found:
                log.warning("the machine has changed: %s", line, extra={"drift": line})
        if self.found and not found:
            log.info("the machine matches the plan again", extra={"drift": ""})
        self.found = found
