"""Machines that few people have, written as their kernels would show them, against hwloc."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.hwloc import compare, lstopo, parse_oracle
from support.plans import make_plan
from support.synthetic import Machine, mask, put, put_cpus
from support.trees import ARCHIVES, OWN, title

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import GIB
from launcher.config.schema import Config, Model
from launcher.machine import snapshot, sysfs
from launcher.machine.kernel_files import Folder, Root
from launcher.machine.packages import by_identity, disputed, first_come
from launcher.machine.topology import Topology
from launcher.machine.topology_text import to_json, to_text

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


def put_topology(root: Path, cpus: Iterable[int], **values: int | CpuSet) -> None:
    for cpu in cpus:
        for name, value in values.items():
            file = root / f"{CPU}/cpu{cpu}/topology/{name}"
            put_cpus(file, value) if isinstance(value, CpuSet) else put(file, str(value))


def remove(root: Path, pattern: str) -> None:
    for path in list(root.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def s390(root: Path) -> None:
    """Two books of two sockets of two cores of two threads: sockets count within a book; no NUMA distances."""
    Machine(sockets=4, cores=2, smt=2, adjacent=True).write(root)
    remove(root, f"{CPU}/cpu*/topology/die_id")
    remove(root, NODE)
    Machine(cores=8, smt=2, adjacent=True)._write_nodes(root)
    for socket in range(4):
        book = CpuSet(range(socket // 2 * 8, socket // 2 * 8 + 8))
        cpus = range(socket * 4, socket * 4 + 4)
        put_topology(root, cpus, physical_package_id=socket % 2, book_id=socket // 2, book_siblings=book)
        put_topology(root, cpus[:2], core_id=0)
        put_topology(root, cpus[2:], core_id=1)


def power9_with_gpus(root: Path) -> None:
    """SMT4 switched off: cpus 0, 4, 8, ...; nodes 0 and 8; the GPUs' memory is on nodes 252 to 255."""
    Machine(sockets=2, cores=4, smt=4, adjacent=True, offline=frozenset(i for i in range(32) if i % 4)).write(
        root
    )
    remove(root, f"{CPU}/cpu*/topology/die_id")
    put_topology(root, range(0, 16, 4), physical_package_id=0)
    put_topology(root, range(16, 32, 4), physical_package_id=8)
    for core in range(8):
        put_topology(root, (core * 4,), core_id=core * 4 + 2048 * (core // 4))
    (root / NODE / "node1").rename(root / NODE / "node8")
    nodes = (0, 8, 252, 253, 254, 255)
    for node in nodes:
        folder = root / NODE / f"node{node}"
        put(
            folder / "distance",
            " ".join("10" if to == node else "40" if max(to, node) == 8 else "80" for to in nodes),
        )
        put(folder / "meminfo", f"Node {node} MemTotal: 16777216 kB\nNode {node} MemFree: 16777216 kB")
        if node > 8:
            put(folder / "cpulist", "")
            put(folder / "cpumap", mask(CpuSet()))
    put(root / NODE / "online", "0,8,252-255")
    put(root / NODE / "possible", "0-255")


def sparse_cpus(root: Path) -> None:
    """Four cpus of a machine with room for more."""
    Machine(cores=4).write(root)
    cpus = CpuSet((0, 35, 70, 130))
    for old, new in ((3, 130), (2, 70), (1, 35)):
        (root / CPU / f"cpu{old}").rename(root / CPU / f"cpu{new}")
    for cpu in cpus:
        one = CpuSet((cpu,))
        put_topology(root, one, package_cpus=cpus, core_siblings=cpus, core_cpus=one, thread_siblings=one)
        put(root / CPU / f"cpu{cpu}/cache/index3/shared_cpu_map", mask(cpus))
        put(root / CPU / f"cpu{cpu}/cache/index3/shared_cpu_list", cpus.format())
    for name in ("online", "present"):
        put(root / CPU / name, cpus.format())
    put(root / CPU / "possible", "0-255")
    put_cpus(root / NODE / "node0/cpumap", cpus)
    (root / NODE / "node0/cpumap_list").rename(root / NODE / "node0/cpulist")


def sub_numa_clusters(root: Path) -> None:
    """Intel's SNC2: the L3 is the socket's."""
    Machine(sockets=2, nodes=2, cores=4).write(root)
    for cpu in range(16):
        socket = CpuSet(range(cpu // 8 * 8, cpu // 8 * 8 + 8))
        put(root / CPU / f"cpu{cpu}/cache/index3/shared_cpu_map", mask(socket))
        put(root / CPU / f"cpu{cpu}/cache/index3/shared_cpu_list", socket.format())


def two_dies(root: Path) -> None:
    """Cascade Lake-AP: core_id repeats on the second die."""
    Machine(cores=8).write(root)
    for die in range(2):
        its = CpuSet(range(die * 4, die * 4 + 4))
        put_topology(root, its, die_id=die, die_cpus=its)
        for cpu in its:
            put_topology(root, (cpu,), core_id=cpu % 4)


def arm_clusters(root: Path) -> None:
    """Clusters, no dies, big package ids of a table without names, no L3."""
    Machine(sockets=2, cores=8, has_l3=False).write(root)
    for cpu in range(16):
        cluster = CpuSet(range(cpu // 4 * 4, cpu // 4 * 4 + 4))
        package = 36 if cpu < 8 else 3180
        put_topology(
            root, (cpu,), die_id=-1, cluster_id=cpu // 4, cluster_cpus=cluster, physical_package_id=package
        )


def hybrid(root: Path) -> None:
    """Two cores with two threads and four with one."""
    Machine(cores=8).write(root)
    for cpu in range(8):
        its = CpuSet((cpu // 2 * 2, cpu // 2 * 2 + 1)) if cpu < 4 else CpuSet((cpu,))
        put_topology(
            root, (cpu,), core_cpus=its, thread_siblings=its, core_id=cpu // 2 * 4 if cpu < 4 else cpu + 8
        )
    put(root / "sys/devices/cpu_core/cpus", "0-3")
    put(root / "sys/devices/cpu_atom/cpus", "4-7")


def l3_for_some(root: Path) -> None:
    """Hybrid mobile processors: low-power cores outside the L3."""
    Machine(l3=2, cores=4).write(root)
    for cpu in range(4, 8):
        remove(root, f"{CPU}/cpu{cpu}/cache")


def l3_map_with_offline_cpus(root: Path) -> None:
    Machine(l3=2, cores=4, offline=frozenset({1})).write(root)
    for cpu in (0, 2, 3):
        put(root / CPU / f"cpu{cpu}/cache/index3/shared_cpu_map", "f")
        put(root / CPU / f"cpu{cpu}/cache/index3/shared_cpu_list", "0-3")


def cgroup_v2(root: Path) -> None:
    Machine(sockets=2, cores=4, smt=2).write(root)
    put(root / "proc/self/cgroup", "0::/system.slice/x.service")
    put(root / "proc/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0")
    top = root / "sys/fs/cgroup"
    put(top / "cgroup.controllers", "cpuset memory")
    put(top / "system.slice/cpuset.cpus.effective", "0-7")
    put(top / "system.slice/x.service/cpuset.cpus.effective", "1-3,9-11")
    put(top / "system.slice/x.service/cpuset.mems.effective", "0")


def cgroup_v1(root: Path) -> None:
    Machine(sockets=2, cores=4, smt=2).write(root)
    put(root / "proc/self/cgroup", "4:cpuset:/docker/abc\n3:memory:/docker/abc")
    put(root / "proc/self/cpuset", "/docker/abc")
    put(root / "proc/mounts", "cgroup /sys/fs/cgroup/cpuset cgroup rw,cpuset 0 0")
    put(root / "sys/fs/cgroup/cpuset/docker/abc/cpuset.cpus", "4-7")
    put(root / "sys/fs/cgroup/cpuset/docker/abc/cpuset.mems", "1")


def written(machine: Machine) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        machine.write(root)

    return write


TREES: dict[str, Callable[[Path], None]] = {
    "power9 with GPUs, SMT off": power9_with_gpus,
    "sparse cpus": sparse_cpus,
    "sub-NUMA clusters": sub_numa_clusters,
    "two dies": two_dies,
    "arm clusters": arm_clusters,
    "hybrid": hybrid,
    "L3 for some": l3_for_some,
    "L3 map with offline cpus": l3_map_with_offline_cpus,
    "cgroup v2": cgroup_v2,
    "cgroup v1": cgroup_v1,
    "cpu 0 is offline": written(Machine(sockets=2, cores=4, smt=2, offline=frozenset({0, 8}))),
    "a socket is offline": written(Machine(sockets=2, cores=4, offline=frozenset({4, 5, 6, 7}))),
    "SMT off": written(Machine(cores=4, smt=2, offline=frozenset({4, 5, 6, 7}))),
    "1,024 cpus on 32 nodes": written(Machine(sockets=8, nodes=4, l3=4, cores=8)),
}


def read(write: Callable[[Path], None], root: Path) -> Topology:
    write(root)
    return sysfs.read(root)


@pytest.mark.parametrize("name", TREES)
def test_agrees_with_hwloc(name: str, tmp_path: Path) -> None:
    topology = read(TREES[name], tmp_path)
    compare(topology, parse_oracle(lstopo(tmp_path)))
    assert topology.notes == ()


@pytest.mark.parametrize("name", ["hybrid", "two dies", "arm clusters", "cpu 0 is offline"])
def test_counts_agree_with_lscpu(name: str, tmp_path: Path) -> None:
    topology = read(TREES[name], tmp_path)
    done = subprocess.run(
        ["lscpu", "--sysroot", str(tmp_path), "-p=CPU,CORE,SOCKET"],
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.split(",") for line in done.stdout.splitlines() if not line.startswith("#")]
    assert CpuSet(int(row[0]) for row in rows) == topology.online
    assert len({row[1] for row in rows}) == len(topology.cores)
    assert len({row[2] for row in rows}) == len(topology.sockets)


def test_sockets_of_two_books_are_four(tmp_path: Path) -> None:
    topology = read(s390, tmp_path)
    assert {socket.id: socket.cpus.format() for socket in topology.sockets} == {
        0: "0-3", 1: "4-7", 2: "8-11", 3: "12-15"
    }  # fmt: skip
    oracle = parse_oracle(lstopo(tmp_path))
    assert {core.cpus for core in topology.cores} == oracle.cores
    assert len(topology.cores) == len({core.key for core in topology.cores}) == 8
    assert any("is the same in several package_cpus" in note for note in topology.notes)


def test_a_package_list_that_is_not_its_map_is_said(tmp_path: Path) -> None:
    Machine(sockets=2, cores=4).write(tmp_path)
    put(tmp_path / f"{CPU}/cpu5/topology/package_cpus_list", "0-7")
    topology = sysfs.read(tmp_path)
    compare(topology, parse_oracle(lstopo(tmp_path)))
    assert topology.notes == ("package_cpus_list of cpus 5 differs from package_cpus: the map is used",)


def test_memory_of_gpus_is_no_node(tmp_path: Path) -> None:
    Machine(sockets=2, cores=4, memory_only=2).write(tmp_path)
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    put(gpus / "0004:04:00.0/numa_status", "Node:           3\nStatus:         online")
    put(gpus / "0035:03:00.0/numa_status", "Node:           -1")
    (gpus / "0035:04:00.0").mkdir()
    topology = sysfs.read(tmp_path)
    compare(topology, parse_oracle(lstopo(tmp_path)))
    assert [node.id for node in topology.numa_nodes] == [0, 1, 2]
    assert topology.node(0).distances == {0: 10, 1: 32, 2: 50}
    assert topology.allowed_nodes == CpuSet(range(3))
    assert topology.notes == ("nodes 3 are GPU memory: they are excluded",)
    file = tmp_path / "machine.tar.gz"
    file.write_bytes(snapshot.capture(tmp_path, date="2026-01-01", version="1").data)
    assert snapshot.read_snapshot(file) == topology


def test_sockets_without_ids_are_told_apart_by_their_maps(tmp_path: Path) -> None:
    Machine(sockets=2, cores=4).write(tmp_path)
    put_topology(tmp_path, range(8), physical_package_id=-1)
    topology = sysfs.read(tmp_path)
    assert {socket.id: socket.cpus.format() for socket in topology.sockets} == {0: "0-3", 1: "4-7"}
    assert any("numbered by their lowest cpu" in note for note in topology.notes)


CONTRADICTIONS: dict[str, tuple[Machine, dict[str, str], str]] = {
    "a core in two nodes": (
        Machine(nodes=2, cores=2, smt=2),
        {f"{NODE}/node{i}/{name}": text for i, its in enumerate((("f", "0-3"), ("f0", "4-7")))
         for name, text in zip(("cpumap", "cpulist"), its, strict=True)},
        "node1/cpumap",
    ),
    "a cpu in two nodes": (
        Machine(nodes=2, cores=4), {f"{NODE}/node1/cpumap": "f1", f"{NODE}/node1/cpulist": "0,4-7"}, "node1/cpumap"
    ),
    "a node that is nearer than the node itself": (
        Machine(nodes=2, cores=4), {f"{NODE}/node1/distance": "10 21"}, "node1/distance"
    ),
    "a number of huge pages that is none": (
        Machine(cores=4), {f"{NODE}/node0/hugepages/hugepages-2048kB/nr_hugepages": "many"}, "nr_hugepages"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_name_the_file(name: str, tmp_path: Path) -> None:
    machine, files, named = CONTRADICTIONS[name]
    machine.write(tmp_path)
    for file, text in files.items():
        put(tmp_path / file, text)
    with pytest.raises(LauncherError) as caught:
        sysfs.read(tmp_path)
    assert named in caught.value.message


def sets(topology: Topology) -> dict[str, str]:
    """The machine in four lines."""
    return {
        "sockets": " ".join(f"{socket.id}:{socket.cpus}" for socket in topology.sockets),
        "nodes": " ".join(f"{node.id}:{node.cpus}" for node in topology.numa_nodes),
        "cores": " ".join(str(core.cpus) for core in topology.cores),
        "l3": " ".join(str(domain.cpus) for domain in topology.l3_domains),
    }


def put_l3(root: Path, cpus: Iterable[int], shared: str) -> None:
    for cpu in cpus:
        put(root / CPU / f"cpu{cpu}/cache/index3/shared_cpu_map", mask(CpuSet.parse(shared)))
        put(root / CPU / f"cpu{cpu}/cache/index3/shared_cpu_list", shared)


def put_core(root: Path, cpu: int, siblings: str) -> None:
    its = CpuSet.parse(siblings)
    put_topology(root, (cpu,), core_cpus=its, thread_siblings=its)


def put_package(root: Path, cpus: Iterable[int], package: str) -> None:
    its = CpuSet.parse(package)
    put_topology(root, cpus, package_cpus=its, core_siblings=its)


def put_node(root: Path, node: int, cpus: str) -> None:
    put(root / NODE / f"node{node}/cpumap", mask(CpuSet.parse(cpus)))
    put(root / NODE / f"node{node}/cpulist", cpus)


def link_nodes(root: Path, of: Callable[[int], int], cpus: Iterable[int]) -> None:
    for cpu in cpus:
        (root / CPU / f"cpu{cpu}/node{of(cpu)}").symlink_to(f"../../node/node{of(cpu)}")


SMT = Machine(cores=4, smt=2)
TWO = Machine(sockets=2, cores=4)
L3S = Machine(l3=2, cores=4)
NODES = Machine(nodes=2, cores=4)
# What the firmware says wrong, of which machine, what of the machine is read otherwise for it, and what is said. Where hwloc
# (2.9) goes on with the same, `test_a_decided_contradiction_is_hwlocs` holds the two against each other.
DECIDED: dict[str, tuple[Machine, Callable[[Path], None], dict[str, str], str]] = {
    "a sibling that does not list the other": (
        SMT, lambda root: put_core(root, 4, "4"), {}, "(core_cpus) of cpus 0,4 contradict"
    ),
    "a core that reaches over another": (
        SMT, lambda root: put_core(root, 0, "0-1,4-5"), {}, "(core_cpus) of cpus 0-1,4-5 contradict"
    ),
    "a chain of siblings": (
        Machine(cores=4, smt=2, adjacent=True), lambda root: put_core(root, 1, "1-2"), {}, "of cpus 0-3 contradict"
    ),
    "siblings without the cpu": (
        SMT, lambda root: put_core(root, 4, "5"), {}, "of cpus 0-1,4-5 contradict"
    ),
    "a core in two sockets": (
        TWO, lambda root: [put_core(root, cpu, "0,4") for cpu in (0, 4)] and None, {}, "of cpus 0,4 contradict"
    ),
    "a core in two dies": (
        SMT, lambda root: put_topology(root, (4,), die_id=1), {}, "die_id of cpus 4 is not that of their core's lowest"
    ),
    "a package that one cpu sees differently": (
        Machine(cores=4), lambda root: put_package(root, (2,), "2"), {}, "(package_cpus) of cpus 0-3 contradict"
    ),
    "packages that overlap": (
        TWO, lambda root: put_package(root, (4,), "3-7"), {}, "(package_cpus) of cpus 0-7 contradict"
    ),
    "two ids in one package": (
        Machine(cores=4), lambda root: put_topology(root, (2,), physical_package_id=1), {},
        "physical_package_id of cpus 2 differs from that of cpu 0",
    ),
    "L3s that overlap": (
        L3S, lambda root: put_l3(root, range(4, 8), "3-7"), {"l3": "0-3"}, "cpus 4-7 are in no L3 domain"
    ),
    "an L3 that one cpu sees differently": (
        L3S, lambda root: put_l3(root, (5,), "5"), {}, "the L3 maps (shared_cpu_map) of cpus 5 contradict"
    ),
    "an L3 that one cpu sees larger": (
        L3S, lambda root: put_l3(root, (5,), "0-7"), {}, "the L3 maps (shared_cpu_map) of cpus 5 contradict"
    ),
    "an L3 without its own cpu": (
        L3S, lambda root: put_l3(root, (5,), "0-3"), {}, "the L3 maps (shared_cpu_map) of cpus 5 contradict"
    ),
    "an L3 across two sockets": (
        TWO, lambda root: put_l3(root, range(2, 6), "2-5") or put_l3(root, (0, 1), "0-1"), {"l3": "0-1 4-7"},
        "of cpus 2-5 contradict those of other cpus, or split a core or a socket",
    ),
    "L3s that cut cores": (
        SMT, lambda root: put_l3(root, range(4), "0-3") or put_l3(root, range(4, 8), "4-7"), {"l3": ""},
        "cpus 0-7 are in no L3 domain",
    ),
    "a cpu that two nodes claim": (
        NODES, lambda root: put_node(root, 1, "0,4-7") or link_nodes(root, lambda cpu: cpu // 4, range(8)), {},
        "list cpus 0: each belongs to the node of its own link, cpuN/nodeM (node 0: 0)",
    ),
    "a node that claims another's cpus": (
        NODES, lambda root: put_node(root, 0, "0-7") or link_nodes(root, lambda cpu: cpu // 4, range(8)), {},
        "list cpus 4-7: each belongs to the node of its own link, cpuN/nodeM (node 1: 4-7)",
    ),
}  # fmt: skip
# hwloc keeps a set within another of its kind, the first of two packages, no package around a core in two, and no later
# one of two nodes.
OTHERWISE = {
    "a sibling that does not list the other", "a core that reaches over another", "a core in two sockets",
    "a package that one cpu sees differently", "packages that overlap",
    "an L3 that one cpu sees differently", "an L3 across two sockets",
    "a cpu that two nodes claim", "a node that claims another's cpus",
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_a_contradiction_that_another_file_decides(name: str, tmp_path: Path) -> None:
    machine, spoil, otherwise, said = DECIDED[name]
    sane = sets(machine.topology())
    machine.write(tmp_path)
    spoil(tmp_path)
    topology = sysfs.read(tmp_path)
    assert sets(topology) == sane | otherwise
    assert len(topology.conflicts) == 1
    assert said in topology.conflicts[0]
    # It is loud: on the terminal, in JSON, and in every plan.
    assert f"WARNING: {topology.conflicts[0]}" in to_text(topology)
    assert to_json(topology)["conflicts"] == list(topology.conflicts)
    plan = make_plan(topology, Config(models=(Model(name="m", path="/m"),)), {}, cpus_only=True)
    assert [f.message for f in plan.warnings if f.code == "firmware-contradicts"] == list(topology.conflicts)


@pytest.mark.parametrize("name", sorted(DECIDED.keys() - OTHERWISE))
def test_a_decided_contradiction_is_hwlocs(name: str, tmp_path: Path) -> None:
    machine, spoil, _, _ = DECIDED[name]
    machine.write(tmp_path)
    spoil(tmp_path)
    compare(sysfs.read(tmp_path), parse_oracle(lstopo(tmp_path)))


@pytest.mark.parametrize("name", ["a cpu that two nodes claim", "a chain of siblings"])
def test_a_snapshot_holds_what_decided(name: str, tmp_path: Path) -> None:
    machine, spoil, _, _ = DECIDED[name]
    machine.write(tmp_path)
    spoil(tmp_path)
    file = tmp_path / "machine.tar.gz"
    file.write_bytes(snapshot.capture(tmp_path, date="2026-01-01", version="1").data)
    assert snapshot.read_snapshot(file) == sysfs.read(tmp_path)


UNDECIDED: dict[str, tuple[Machine, Callable[[Path], None], str]] = {
    "siblings, and ids that repeat": (
        SMT, lambda root: put_core(root, 4, "4") or put_topology(root, (0, 4), core_id=1), "topology/core_cpus"
    ),
    "siblings, and ids that nothing else says": (
        SMT, lambda root: put_core(root, 0, "0,5") or put_topology(root, (4, 1), core_id=0), "topology/core_cpus"
    ),
    "siblings without ids": (
        SMT, lambda root: put_core(root, 4, "4") or put_topology(root, range(8), core_id=-1), "topology/core_cpus"
    ),
    "packages, and one id for all": (
        TWO, lambda root: put_package(root, (4,), "4") or put_topology(root, range(8), physical_package_id=0),
        "topology/package_cpus",
    ),
    "packages without ids": (
        TWO, lambda root: put_package(root, (4,), "3-7") or put_topology(root, range(8), physical_package_id=-1),
        "topology/package_cpus",
    ),
    "nodes without links": (NODES, lambda root: put_node(root, 1, "0,4-7"), "no link to either"),
    "nodes with both links": (
        NODES,
        lambda root: put_node(root, 1, "0,4-7") or link_nodes(root, lambda _: 0, (0,))
        or link_nodes(root, lambda _: 1, (0,)),
        "links to both",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_nothing_decides_is_refused(name: str, tmp_path: Path) -> None:
    machine, spoil, named = UNDECIDED[name]
    machine.write(tmp_path)
    spoil(tmp_path)
    with pytest.raises(LauncherError) as caught:
        sysfs.read(tmp_path)
    assert named in caught.value.message


@given(
    st.dictionaries(st.integers(0, 9), st.frozensets(st.integers(0, 9), max_size=5), min_size=1),
    st.lists(st.integers(0, 3), min_size=10, max_size=10),
)
def test_whatever_cpus_tell_the_outcome_is_a_partition(
    told: dict[int, frozenset[int]], identity: list[int]
) -> None:
    maps = {cpu: CpuSet(told.get(cpu, frozenset((cpu,)))) for cpu in range(10)}
    odd = disputed(maps)
    for cpu in CpuSet(range(10)) - odd:
        assert cpu in maps[cpu]
        assert all(maps[other] == maps[cpu] for other in maps[cpu])
    groups = by_identity(maps, odd, dict(enumerate(identity)))
    if groups is not None:
        settled = maps | groups
        assert all(settled[other] == its for its in settled.values() for other in its)
    taken, _ = first_come(maps)
    assert all(taken[other] == its for its in taken.values() for other in its)


def test_an_old_kernels_map_is_named(tmp_path: Path) -> None:
    SMT.write(tmp_path)
    remove(tmp_path, f"{CPU}/cpu*/topology/*_cpus*")
    put_topology(tmp_path, (2,), core_siblings=CpuSet((2,)), physical_package_id=-1)
    put_topology(tmp_path, range(8), physical_package_id=-1)
    with pytest.raises(LauncherError, match=r"topology/core_siblings: .* contradicts"):
        sysfs.read(tmp_path)
    put_topology(tmp_path, (2,), core_siblings=CpuSet(range(8)), thread_siblings=CpuSet((2,)))
    put_topology(tmp_path, range(8), core_id=-1)
    with pytest.raises(LauncherError, match=r"topology/thread_siblings: .* contradicts"):
        sysfs.read(tmp_path)


@pytest.mark.parametrize("files", ["package_cpus*", "c*_cpus*"])
def test_maps_that_some_cpus_lack_are_an_error(files: str, tmp_path: Path) -> None:
    Machine(cores=4).write(tmp_path)
    remove(tmp_path, f"{CPU}/cpu*/topology/*_siblings*")
    remove(tmp_path, f"{CPU}/cpu2/topology/{files}")
    with pytest.raises(LauncherError, match=r"cpu2/topology/\w+_cpus: missing"):
        sysfs.read(tmp_path)


def test_an_l3_list_that_is_not_its_map_is_said(tmp_path: Path) -> None:
    Machine(l3=2, cores=4).write(tmp_path)
    put(tmp_path / CPU / "cpu5/cache/index3/shared_cpu_list", "0-7")
    topology = sysfs.read(tmp_path)
    compare(topology, parse_oracle(lstopo(tmp_path)))
    assert topology.notes == (
        "shared_cpu_list of the L3 of cpus 5 differs from shared_cpu_map: the map is used",
    )


def test_the_masks_of_an_old_status(tmp_path: Path) -> None:
    Machine(sockets=2, cores=4).write(tmp_path)
    put(tmp_path / "proc/self/status", "Name:\tcat\nCpus_allowed:\t00000000,0000003c\nMems_allowed:\t2")
    topology = sysfs.read(tmp_path)
    assert (topology.allowed.format(), topology.allowed_nodes.format()) == ("2-5", "1")


def test_huge_pages_of_all_sizes_count(tmp_path: Path) -> None:
    Machine(sockets=2, cores=4).write(tmp_path)
    pools = tmp_path / NODE / "node1/hugepages"
    put(pools / "hugepages-1048576kB/nr_hugepages", "3")
    put(pools / "hugepages-2048kB/nr_hugepages", "512")
    put(pools / "hugepages-64kB/free_hugepages", "1")
    put(pools / "notes", "")
    topology = sysfs.read(tmp_path)
    assert [node.hugepages_bytes for node in topology.numa_nodes] == [0, 4 * GIB]
    assert [node.memory_bytes for node in topology.numa_nodes] == [64 * GIB, 64 * GIB]


def test_8192_cpus_on_one_list(tmp_path: Path) -> None:
    """Lists and masks of that length; not all the folders of such a machine."""
    Machine(cores=4).write(tmp_path)
    put(tmp_path / CPU / "possible", "0-8191")
    put(tmp_path / CPU / "offline", "4-8191")
    put(
        tmp_path / "proc/self/status",
        f"Cpus_allowed:\t{','.join(['ffffffff'] * 256)}\nCpus_allowed_list:\t0-8191",
    )
    assert sysfs.read(tmp_path).allowed == CpuSet(range(4))


# Nothing there, nothing in it, no text, a number that nobody expects, digits of another script, too many digits, half a
# list, a huge one, a negative number, a mask of 9,600 cpus, and what a driver answers that fails.
GARBAGE = (
    None, b"", b"\xff\xfe x", b"7", "\u0661".encode(), b"9" * 5000, b"0-", b"0-99999999999", b"-1",
    b",".join([b"ffffffff"] * 300), errno.EIO,
)  # fmt: skip
FEW = sorted((file for file in ARCHIVES if file.parent != OWN), key=lambda file: file.stat().st_size)[:4]


def sampled(files: Iterable[str], cpus: CpuSet) -> list[str]:
    """The files of two cpus, and all that are not a cpu's: the others are like them."""
    kept = {cpus.first, max(cpus)}
    of_cpu = re.compile(rf"{CPU}/cpu(\d+)/")
    return [file for file in files if (its := of_cpu.match(file)) is None or int(its[1]) in kept]


def is_refused(machine: snapshot.Recording, path: str, text: bytes | int | None) -> bool:
    """The machine with other bytes in one file, an errno from it, or without that file or folder. False: it is planned
    for; anything but a LauncherError is a failure."""
    files = {file: data for file, data in machine.files.items() if not f"{file}/".startswith(f"{path}/")}
    folders = {folder for folder in machine.folders if not f"{folder}/".startswith(f"{path}/")}
    errors = machine.errors | ({path: text} if isinstance(text, int) else {})
    if isinstance(text, bytes):
        files[path] = text
    spoiled = replace(machine, files=files, folders=folders, errors=errors, _names={})
    try:
        topology = sysfs.read_source(Root(spoiled))
        assert to_text(topology)
        assert make_plan(topology, Config(models=(Model(name="m", path="/m"),)), {}, cpus_only=True)
    except LauncherError as error:
        assert error.message.startswith("cannot ")  # noqa: PT017  one of two good ends
        return True
    return False


@pytest.mark.parametrize("archive", sorted(OWN.glob("*.tar.gz")), ids=title)
def test_no_single_file_that_is_gone_or_garbled_ends_in_a_traceback(
    archive: Path, tree: Callable[[Path], Path]
) -> None:
    recorder = snapshot.Recorder(Folder(tree(archive)))
    whole = sysfs.read_source(Root(recorder))
    machine = recorder.kept
    jobs = [(file, text) for file in sampled(machine.files, whole.online) for text in GARBAGE]
    jobs += [(folder, None) for folder in sampled(machine.folders, whole.online)]
    jobs = jobs[:: max(2, len(whole.online) // 8)]  # a large machine takes longer to read, and is no other
    refused = sum(is_refused(machine, *job) for job in jobs)
    assert 0 < refused < len(jobs)


@pytest.mark.parametrize("archive", FEW, ids=title)
def test_no_recorded_machine_ends_in_a_traceback(archive: Path, tree: Callable[[Path], Path]) -> None:
    """Of firmware that nobody here wrote; none of them is in the repository."""
    recorder = snapshot.Recorder(Folder(tree(archive)))
    with contextlib.suppress(LauncherError):
        sysfs.read_source(Root(recorder))
    machine, random = recorder.kept, Random(7)  # noqa: S311
    paths = sorted(machine.files)
    for _ in range(60):
        is_refused(machine, random.choice(paths), random.choice(GARBAGE))
    for folder in random.sample(sorted(machine.folders), min(10, len(machine.folders))):
        is_refused(machine, folder, None)
