"""A machine that changes while the daemon runs: said once, and when it is over."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from msgspec.structs import replace
from support.planned_machine import PLAN, PLANNED

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.daemon.drift import MachineView, MachineWatch
from launcher.machine.topology import Topology

LESS = replace(PLANNED, online=CpuSet.parse("0-5"), allowed=CpuSet.parse("0-5"))
GONE = "cpus 6-7 are offline: slot 1 planned there; numa-launcher reload plans again"


@dataclass
class Machine:
    """As it is now."""

    now: Topology | LauncherError = PLANNED
    planned: Topology = PLANNED

    def read(self, planned: Topology) -> MachineView:
        assert planned is self.planned
        if isinstance(self.now, LauncherError):
            raise self.now
        return MachineView(self.now, self.now.allowed)


async def test_each_new_difference_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    watch = MachineWatch(lambda: (machine.planned, PLAN), machine.read)
    caplog.set_level(logging.INFO, "launcher.daemon")
    await watch.check()
    assert (watch.found, caplog.messages) == ((), [])
    machine.now = LESS
    await watch.check()
    await watch.check()
    assert watch.found == (GONE,)
    assert caplog.messages == [f"the machine has changed: {GONE}"]
    machine.now = LauncherError("cannot read '/sys/x': I/O error", "look")
    await watch.check()
    assert watch.found == ("cannot read '/sys/x': I/O error",)
    machine.now = PLANNED
    await watch.check()
    assert watch.found == ()
    assert caplog.messages[-1] == "the machine matches the plan again"


async def test_a_larger_cpuset_is_reported() -> None:
    narrow = replace(PLANNED, allowed=CpuSet.parse("0-3"))
    machine = Machine(now=narrow, planned=narrow)
    watch = MachineWatch(lambda: (machine.planned, PLAN), machine.read)
    await watch.check()
    machine.now = PLANNED
    await watch.check()
    assert len(watch.found) == 1
    assert watch.found[0].startswith("cpus 4-7 were added to this cgroup's cpuset")


async def test_a_reload_ends_a_difference() -> None:
    machine = Machine(now=LESS)
    watch = MachineWatch(lambda: (machine.planned, PLAN), machine.read)
    await watch.check()
    assert watch.found
    machine.planned = LESS
    await watch.check()
    assert watch.found == ()
