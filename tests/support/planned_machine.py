"""A machine, and the same one as a plan knew it."""

from __future__ import annotations

from support.fakes import a_slot
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.config.schema import Strategy
from launcher.plan.plan import Plan

MACHINE = Machine(nodes=2, cores=4)
PLANNED = MACHINE.topology()
PLAN = Plan(
    Strategy.CONTIGUOUS,
    (a_slot(0, cpus="0-3", nodes="0"), a_slot(1, cpus="4-7", nodes="1")),
    CpuSet(),
    CpuSet(),
    (),
    (),
)
