"""A machine that changes while the daemon runs: said once, and when it is over."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
from daemon.test_drift import PLAN, PLANNED

from launcher.cpuset import CpuSet
from launcher.daemon.drift import Sight
from launcher.daemon.machine_watch import MachineWatch
from launcher.errors import LauncherError
from launcher.topology.model import Topology

LESS = replace(PLANNED, online=CpuSet.parse("0-5"), allowed=CpuSet.parse("0-5"))
GONE = "cpus 6-7 went offline: slot 1 planned there; numa-launcher reload plans anew"


@dataclass
class Machine:
    """As it is now."""

    now: Topology | LauncherError = PLANNED
    planned: Topology = PLANNED

    def look(self, planned: Topology) -> Sight:
        assert planned is self.planned
        if isinstance(self.now, LauncherError):
            raise self.now
        return Sight(self.now, self.now.allowed)


async def test_each_thing_is_said_when_it_is_new(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    watch = MachineWatch(lambda: (machine.planned, PLAN), machine.look)
    caplog.set_level(logging.INFO, "launcher.daemon")
    await watch.look()
    assert (watch.found, caplog.messages) == ((), [])
    machine.now = LESS
    await watch.look()
    await watch.look()
    assert watch.found == (GONE,)
    assert caplog.messages == [f"the machine has changed: {GONE}"]
    machine.now = LauncherError("cannot read '/sys/x': I/O error", "look")
    await watch.look()
    assert watch.found == ("cannot read '/sys/x': I/O error",)
    machine.now = PLANNED
    await watch.look()
    assert watch.found == ()
    assert caplog.messages[-1] == "the machine is again the one that was planned for"


async def test_a_cpuset_that_grows_is_said() -> None:
    narrow = replace(PLANNED, allowed=CpuSet.parse("0-3"))
    machine = Machine(now=narrow, planned=narrow)
    watch = MachineWatch(lambda: (machine.planned, PLAN), machine.look)
    await watch.look()
    machine.now = PLANNED
    await watch.look()
    assert len(watch.found) == 1
    assert watch.found[0].startswith("cpus 4-7 were added to this cgroup's cpuset")


async def test_a_reload_makes_the_machine_that_is_the_one_that_was_planned_for() -> None:
    machine = Machine(now=LESS)
    watch = MachineWatch(lambda: (machine.planned, PLAN), machine.look)
    await watch.look()
    assert watch.found
    machine.planned = LESS
    await watch.look()
    assert watch.found == ()
