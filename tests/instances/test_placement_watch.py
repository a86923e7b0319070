"""What a look at an instance's threads and pages leaves behind, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from fakes import FakeProcess, a_slot

from launcher.cpuset import CpuSet
from launcher.host.placement import Bystander, ProcessFacts, ThreadGroup
from launcher.instances.instance import Instance
from launcher.instances.placement_watch import PlacementWatch


def threads(cpus: str, name: str) -> tuple[ThreadGroup, ...]:
    return (ThreadGroup(CpuSet.parse(cpus), ((name, 1),)),)


ENGINE = ProcessFacts(
    pid=1, name="vllm", groups=threads("0-3", "vllm"), policies=frozenset({"bind:0"}), node_bytes=((0, 4096),),
    libraries=frozenset(),
)  # fmt: skip
WIDE = Bystander(7, "init", threads("0-9", "init"))


@dataclass
class Host:
    """What runs on it."""

    facts: Sequence[ProcessFacts] = (ENGINE,)
    others: Sequence[Bystander] = (WIDE,)
    instance: Instance = field(default_factory=Instance)
    ends: bool = False

    def watch(self) -> PlacementWatch:
        self.instance.process = FakeProcess(1, 0, 1, print)
        return PlacementWatch(self.observe, lambda: self.others, bound=True)

    def observe(self, _pid: int) -> Sequence[ProcessFacts]:
        if self.ends:
            self.instance.process = None
        return self.facts


async def test_it_stays_with_the_life() -> None:
    host = Host()
    found = await host.watch().look(a_slot(), host.instance, ())
    assert found is not None
    assert found.ok
    assert host.instance.verification is found
    assert host.instance.pids == {1}


async def test_of_one_that_ends_meanwhile_nothing_is_kept() -> None:
    host = Host(ends=True)
    assert await host.watch().look(a_slot(), host.instance, ()) is None
    assert host.instance.verification is None


async def test_strangers_are_one_line_however_many_and_once(caplog: pytest.LogCaptureFixture) -> None:
    host = Host(others=(WIDE, *(Bystander(pid, "taskset", threads("2", "x")) for pid in range(20, 50))))
    watch = host.watch()
    await watch.look(a_slot(), host.instance, ())
    await watch.look(a_slot(), host.instance, ())
    assert len(caplog.messages) == 1
    assert caplog.messages[0] == (
        "slot 0: not ours on its cpus: taskset (pid 20) is pinned to cpus 2, of which 2 are this slot's, and 29 more; "
        "`numa-launcher verify 0` shows all"
    )
    host.others = (*host.others, Bystander(60, "irq", threads("1", "x")))
    await watch.look(a_slot(), host.instance, ())
    assert caplog.messages[1].startswith("slot 0: not ours on its cpus: irq (pid 60) is pinned to cpus 1")
    assert "more" not in caplog.messages[1]


async def test_a_thread_that_somebody_moved_is_said_once_and_again_when_it_is_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host()
    watch = host.watch()
    await watch.look(a_slot(), host.instance, ())
    assert caplog.messages == []
    for cpus in ("0-9", "0-9", "9"):
        host.facts = (
            ProcessFacts(1, "vllm", threads(cpus, "vllm"), ENGINE.policies, ENGINE.node_bytes, frozenset()),
        )
        await watch.look(a_slot(), host.instance, ())
    assert len(caplog.messages) == 2
    assert all("placement differs from the plan: threads of vllm (pid 1)" in said for said in caplog.messages)
