"""The comparison of an instance with the plan: what is kept and what is logged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from support.fakes import FakeEngine, FakeProcess, a_slot

from launcher.base.cpuset import CpuSet
from launcher.instances.instance import Instance
from launcher.instances.instance_monitor import PlacementWatch
from launcher.machine.oom import OomWatch
from launcher.machine.placement import Bystander, MisplacedThread, ProcessFacts, ThreadGroup


def threads(cpus: str, name: str) -> tuple[ThreadGroup, ...]:
    return (ThreadGroup(CpuSet.parse(cpus), ((name, 1),)),)


ENGINE = ProcessFacts(
    pid=1, name="vllm", groups=threads("0-3", "vllm"), policies=frozenset({"bind:0"}), node_bytes=((0, 4096),),
    libraries=frozenset(),
)  # fmt: skip
WIDE = Bystander(7, "init", threads("0-9", "init"))


@dataclass
class Host:
    """What runs on the host."""

    facts: Sequence[ProcessFacts] = (ENGINE,)
    others: Sequence[Bystander] = (WIDE,)
    instance: Instance = field(default_factory=Instance)
    ends: bool = False
    misplaced: tuple[MisplacedThread, ...] = ()

    def watch(self) -> PlacementWatch:
        self.instance.spawned(FakeProcess(1, 0, 1, print), OomWatch(1), 0.0, 0.0)
        self.instance.launched(FakeEngine().launch(a_slot(), 1))
        return PlacementWatch(self.observe, lambda: self.others, self.look)

    def look(self, pids: Iterable[int], _cpus: CpuSet) -> tuple[MisplacedThread, ...]:
        return self.misplaced if 1 in pids else ()

    def observe(self, _pid: int) -> Sequence[ProcessFacts]:
        if self.ends:
            self.instance.exited()
        return self.facts


async def test_the_result_is_kept() -> None:
    host = Host()
    await host.watch().verify(a_slot(), host.instance, (), None)
    assert host.instance.verification is not None
    assert host.instance.verification.ok
    assert host.instance.pids == {1}


async def test_nothing_is_kept_of_an_instance_that_ends_meanwhile() -> None:
    host = Host(ends=True)
    await host.watch().verify(a_slot(), host.instance, (), None)
    assert host.instance.verification is None


async def test_other_processes_are_logged_once_and_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(others=(WIDE, *(Bystander(pid, "taskset", threads("2", "x")) for pid in range(20, 50))))
    watch = host.watch()
    await watch.verify(a_slot(), host.instance, (), None)
    await watch.verify(a_slot(), host.instance, (), None)
    assert len(caplog.messages) == 1
    assert caplog.messages[0] == (
        "slot 0: other processes on its cpus: taskset (pid 20) is pinned to cpus 2, of which 2 are this slot's, "
        "and 29 more; `numa-launcher verify 0` shows all"
    )
    host.others = (*host.others, Bystander(60, "irq", threads("1", "x")))
    await watch.verify(a_slot(), host.instance, (), None)
    assert caplog.messages[1].startswith(
        "slot 0: other processes on its cpus: irq (pid 60) is pinned to cpus 1"
    )
    assert "more" not in caplog.messages[1]


async def test_each_new_difference_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host()
    watch = host.watch()
    await watch.verify(a_slot(), host.instance, (), None)
    assert caplog.messages == []
    for cpus in ("0-9", "0-9", "9"):
        host.facts = (
            ProcessFacts(1, "vllm", threads(cpus, "vllm"), ENGINE.policies, ENGINE.node_bytes, frozenset()),
        )
        await watch.verify(a_slot(), host.instance, (), None)
    assert len(caplog.messages) == 2
    assert all("placement differs from the plan: threads of vllm (pid 1)" in said for said in caplog.messages)


async def test_threads_that_move_are_noticed_between_verifications() -> None:
    host = Host()
    watch = host.watch()
    await watch.verify(a_slot(), host.instance, (), None)
    assert host.instance.misplaced == ()
    assert not await watch.threads_moved(a_slot(), host.instance)
    host.misplaced = (MisplacedThread(7, "worker", CpuSet.parse("0-9")),)
    assert await watch.threads_moved(a_slot(), host.instance)
    assert host.instance.misplaced == host.misplaced
    assert not await watch.threads_moved(a_slot(), host.instance)
    host.misplaced = ()
    assert await watch.threads_moved(a_slot(), host.instance)
    host.instance.exited()
    assert not await watch.threads_moved(a_slot(), host.instance)
