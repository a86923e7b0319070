"""The plan against what the kernel says."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.fakes import a_slot

from launcher.base.cpuset import CpuSet
from launcher.engines.base import Expected
from launcher.instances.verify import MIN_BOUND_SHARE, verify
from launcher.machine.placement import Bystander, ProcessFacts, ThreadGroup
from launcher.plan.plan import Placement

MIB = 1 << 20


BOUND = Expected(binds_memory=True)


def group(cpus: str, *names: str) -> ThreadGroup:
    return ThreadGroup(CpuSet.parse(cpus), tuple((name, names.count(name)) for name in dict.fromkeys(names)))


def facts(*groups: ThreadGroup, policies: tuple[str, ...] = ("bind:0",), **more: object) -> ProcessFacts:
    fields = {"node_bytes": ((0, 98 * MIB), (1, 2 * MIB)), "libraries": frozenset({"libgomp"})} | more
    return ProcessFacts(
        pid=7, name="vllm", groups=groups or (group("0-3", "vllm"),), policies=frozenset(policies),
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def test_as_planned() -> None:
    found = verify(
        a_slot().placement, [facts(group("0-3", "a", "a", "b")), facts(group("1", "c"))], expected=BOUND
    )
    assert (found.ok, found.problems, found.processes, found.threads) == (True, (), 2, 4)
    assert (found.cpus, found.bound_cpus, found.policies) == ("0-3", "1", ("bind:0",))
    assert found.libraries == ("libgomp",)
    assert found.bound_share == pytest.approx(0.98)
    assert found.node_bytes == {0: 196 * MIB, 1: 4 * MIB}


@pytest.mark.parametrize(("allowed", "ok"), [("0", True), ("0-1", False), ("1", False), ("", False)])
def test_a_cpuset_on_the_planned_nodes_binds_as_well_as_a_policy(allowed: str, ok: bool) -> None:
    """A container's processes have no policy of their own."""
    contained = facts(policies=("default",), allowed_nodes=CpuSet.parse(allowed))
    assert verify(a_slot().placement, [contained], expected=BOUND).ok is ok


def test_threads_outside_the_set_are_named() -> None:
    inside = group("0-3", "main")
    stray = [group("2-5", "omp", "omp", "omp", "io", "a", "b"), group("9", "omp")]
    found = verify(a_slot().placement, [facts(inside, *stray)], expected=Expected())
    (difference,) = found.differences
    assert difference.what == "threads of vllm (pid 7)"
    assert difference.planned == "on cpus 0-3"
    assert difference.found == "7 of 8 may run on cpus 2-5,9: omp x 4, io, a, ... (1 more names)"
    assert not found.ok
    assert found.misplaced_threads == 7
    assert found.problems == (f"{difference.what}: {difference.found}, planned: {difference.planned}",)


@pytest.mark.parametrize(
    ("nodes", "policy", "ok"),
    [
        ("0", "bind:0", True),
        ("0", "bind=static:0", True),
        ("0-1", "bind:0-1", True),
        ("0-1", "bind:0", True),  # vLLM's worker binds itself to its own node
        ("0", "bind:0-1", False),
        ("1", "bind:10", False),
        ("0", "bind:0,2", False),
        ("0", "default", False),
        ("0", "prefer:0", False),
        ("0", "interleave:0", False),
    ],
)
def test_memory_policy(nodes: str, policy: str, ok: bool) -> None:
    process = facts(policies=(policy,), node_bytes=())
    found = verify(a_slot(nodes=nodes).placement, [process], expected=BOUND)
    assert found.ok == ok
    if not ok:
        assert found.problems == (f"memory policy of vllm (pid 7): {policy}, planned: bind:{nodes}",)
    assert verify(a_slot(nodes=nodes).placement, [process], expected=Expected()).ok


@pytest.mark.parametrize(
    ("policies", "ok"), [(("bind:0", "local"), True), (("local",), False), (("bind:1", "local"), False)]
)
def test_buffers_of_openblas_are_local_in_a_bound_process(policies: tuple[str, ...], ok: bool) -> None:
    assert verify(a_slot().placement, [facts(policies=policies)], expected=BOUND).ok is ok


@pytest.mark.parametrize(("there", "ok"), [(100, True), (95, True), (94, False), (0, False)])
def test_share_of_the_memory_on_its_node(there: int, ok: bool) -> None:
    assert MIN_BOUND_SHARE == 0.95
    process = facts(node_bytes=((0, there * MIB), (2, (100 - there) * MIB)))
    found = verify(a_slot().placement, [process], expected=BOUND)
    assert found.ok == ok
    assert verify(a_slot().placement, [process], expected=Expected()).ok
    if there == 94:
        assert found.problems == (
            "memory: 94% there (94 MiB on node 0, 6 MiB on node 2), planned: at least 95% on node 0",
        )


def test_share_is_of_the_whole_instance() -> None:
    big, small = facts(node_bytes=((0, 1000 * MIB),)), facts(node_bytes=((1, 10 * MIB),))
    assert verify(a_slot().placement, [big, small], expected=BOUND).ok


def test_nothing_there() -> None:
    found = verify(a_slot().placement, [], expected=BOUND)
    assert (found.ok, found.bound_share) == (False, None)
    assert found.problems == ("processes: no process, planned: at least one",)


def test_share_is_unknown_without_numa() -> None:
    assert verify(a_slot(nodes="").placement, [facts()], expected=Expected()).bound_share is None
    assert verify(a_slot().placement, [facts(node_bytes=())], expected=BOUND).bound_share is None


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([group("0", "a"), group("1", "b"), group("2", "c"), group("0-3", "main")], None),
        ([group("0-2", "a", "b", "c"), group("0-3", "main")], None),
        ([group("0", "a"), group("1", "b"), group("0-3", "main")], "bound to cpus 0-1"),
        ([group("0-3", "main")], "bound to cpus none of them"),
    ],
)
def test_openmp_threads(groups: list[ThreadGroup], found: str | None) -> None:
    expected = Expected(binds_memory=True, omp_cpus=(CpuSet.parse("0-2"),))
    differences = verify(a_slot().placement, [facts(*groups)], expected=expected).differences
    assert [(d.what, d.planned, d.found) for d in differences] == (
        [] if found is None else [("OpenMP threads of rank 0", "one on each of cpus 0-2", found)]
    )


TWO = Expected(binds_memory=True, omp_cpus=(CpuSet.parse("0-1"), CpuSet.parse("2-3")))


def on_two_nodes() -> Placement:
    return replace(a_slot(nodes="0-1").placement, omp_cpus=TWO.omp_cpus, rank_nodes=(0, 1))


def rank(pid: int, *cpus: int, node: int, policy: str = "", elsewhere: int = 0) -> ProcessFacts:
    """A worker as vLLM binds it: a thread on each cpu, and its memory on its node."""
    its = facts(
        *(group(f"{cpu}", "omp") for cpu in cpus), policies=(policy or f"bind:{node}",),
        node_bytes=((node, (100 - elsewhere) * MIB), (1 - node, elsewhere * MIB)),
    )  # fmt: skip
    return replace(its, pid=pid, name="VLLM::Worker")


# API server and EngineCore, with pages on both nodes.
OTHERS = facts(group("0-3", "main"), policies=("bind:0-1",), node_bytes=((0, 50 * MIB), (1, 50 * MIB)))


def test_each_rank_is_matched_to_its_process_and_node() -> None:
    found = verify(on_two_nodes(), [OTHERS, rank(12, 2, 3, node=1), rank(11, 0, 1, node=0)], expected=TWO)
    assert found.ok, found.problems
    assert [(its.rank, its.pid, its.node, its.cpus) for its in found.ranks] == [
        (0, 11, 0, "0-1"),
        (1, 12, 1, "2-3"),
    ]
    assert [its.bound_share for its in found.ranks] == [1.0, 1.0]
    places = replace(rank(12, node=1), groups=(group("2-3", "omp", "omp"),))
    assert verify(on_two_nodes(), [OTHERS, places, rank(11, 0, 1, node=0)], expected=TWO).ok, "OMP_PLACES"


@pytest.mark.parametrize(
    ("worker", "what", "found"),
    [
        (rank(12, 2, 3, node=0), "memory policy of rank 1, VLLM::Worker (pid 12)", "bind:0"),
        (
            rank(12, 2, 3, node=1, policy="bind:0-1"),
            "memory policy of rank 1, VLLM::Worker (pid 12)",
            "bind:0-1",
        ),
        (
            rank(12, 2, 3, node=1, policy="default"),
            "memory policy of rank 1, VLLM::Worker (pid 12)",
            "default",
        ),
        (
            rank(12, 2, 3, node=1, elsewhere=40),
            "memory of rank 1, VLLM::Worker (pid 12)",
            "60% there (40 MiB on node 0, 60 MiB on node 1)",
        ),
        (
            rank(12, 2, node=1),
            "OpenMP threads of rank 1",
            "those of VLLM::Worker (pid 12) are bound to cpus 2",
        ),
        (OTHERS, "OpenMP threads of rank 1", "none is bound to one of them"),
    ],
)
def test_a_rank_that_is_elsewhere_is_named(worker: ProcessFacts, what: str, found: str) -> None:
    """As a whole each of these instances is on its cpus and nodes."""
    differences = verify(on_two_nodes(), [OTHERS, rank(11, 0, 1, node=0), worker], expected=TWO).differences
    assert (differences[0].what, differences[0].found) == (what, found)
    assert len({each.what for each in differences}) == len(differences)
    assert sum(each.what.startswith("memory policy") for each in differences) <= 1
    unbound = replace(TWO, binds_memory=False)
    kinds = verify(on_two_nodes(), [OTHERS, rank(11, 0, 1, node=0), worker], expected=unbound).differences
    assert not [each for each in kinds if each.what.startswith("memory")]


def test_a_rank_whose_cpuset_binds_it_needs_no_policy() -> None:
    contained = replace(rank(12, 2, 3, node=1, policy="default"), allowed_nodes=CpuSet((1,)))
    assert verify(on_two_nodes(), [OTHERS, rank(11, 0, 1, node=0), contained], expected=TWO).ok
    wider = replace(contained, allowed_nodes=CpuSet.parse("0-1"))
    assert not verify(on_two_nodes(), [OTHERS, rank(11, 0, 1, node=0), wider], expected=TWO).ok


def test_two_ranks_in_one_process_are_one_too_few() -> None:
    both = rank(11, 0, 1, 2, 3, node=0)
    found = verify(on_two_nodes(), [OTHERS, both], expected=TWO)
    assert found.problems == ("process of rank 1: VLLM::Worker (pid 11), as rank 0, planned: one of its own",)


def test_threads_of_a_rank_are_in_one_process() -> None:
    """A list that two processes share is no rank's."""
    workers = [rank(11, 0, 1, node=0), rank(12, 2, node=1), rank(13, 3, node=1)]
    (difference,) = verify(on_two_nodes(), [OTHERS, *workers], expected=TWO).differences
    assert difference.what == "OpenMP threads of rank 1"


def test_an_instance_without_numa_has_ranks_by_their_threads() -> None:
    place = replace(on_two_nodes(), membind=CpuSet(), rank_nodes=(0, 0))
    found = verify(place, [rank(11, 0, 1, node=0), rank(12, 2, 3, node=0)], expected=TWO)
    assert [its.node for its in found.ranks] == [None, None]
    assert [its.pid for its in found.ranks] == [11, 12]


def test_libraries() -> None:
    expected = Expected(
        binds_memory=True, libraries=(frozenset({"libtcmalloc"}), frozenset({"libgomp", "libiomp5"}))
    )
    found = verify(a_slot().placement, [facts()], expected=expected)
    assert found.problems == ("libraries: only libgomp, planned: libtcmalloc mapped",)
    nothing = verify(a_slot().placement, [facts(libraries=frozenset())], expected=expected)
    assert [d.found for d in nothing.differences] == ["only none", "only none"]
    assert nothing.differences[1].planned == "libgomp or libiomp5 mapped"


def bystander(*groups: ThreadGroup, pid: int = 1, name: str = "init") -> Bystander:
    return Bystander(pid, name, groups)


def test_others_pinned_onto_our_cpus() -> None:
    free = bystander(group("0-15", "systemd"))
    elsewhere = bystander(group("8-11", "db"), pid=50, name="db")
    here = bystander(group("2-5", "taskset"), group("0-15", "helper"), pid=60, name="burn")
    found = verify(a_slot().placement, [facts()], expected=BOUND, others=[free, elsewhere, here])
    assert found.foreign == ("burn (pid 60) is pinned to cpus 2-5, of which 2-3 are this slot's",)
    assert found.ok


def test_a_containers_cpuset_is_no_pinning() -> None:
    shell = bystander(group("0-3", "sh"))
    assert (
        verify(a_slot().placement, [facts()], expected=BOUND, others=[shell, replace(shell, pid=2)]).foreign
        == ()
    )
