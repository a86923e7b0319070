"""What the kernel leaves out is a documented default; what contradicts itself, and no other file
decides, is an error that names the file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.synthetic import Machine, put

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import GIB
from launcher.machine import sysfs

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """2 nodes of 1 L3 of 4 cores of 2 threads: cpus 0-3,8-11 and 4-7,12-15."""
    return Machine(nodes=2, cores=4, smt=2).write(tmp_path)


def remove(root: Path, pattern: str) -> None:
    for path in list(root.glob(pattern)):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


CONTRADICTIONS = {
    "online cpu without folder": (f"{CPU}/online", "0-16", "cpu16"),
    "online cpu that says 0": (f"{CPU}/cpu3/online", "0", "cpu3/online"),
    "no cpu online": (f"{CPU}/online", "", "cpu/online"),
    "bad cpulist": (f"{CPU}/online", "0-x", "cpu/online"),
    "bad number": (f"{CPU}/cpu1/topology/core_id", "one", "cpu1/topology/core_id"),
    "bad mask": (f"{CPU}/cpu1/topology/core_cpus", "0,xyz", "cpu1/topology/core_cpus"),
    "mask with an empty word": (f"{CPU}/cpu1/topology/core_cpus", "1,,2", "cpu1/topology/core_cpus"),
    "mask with a wide word": (f"{CPU}/cpu1/topology/core_cpus", "1ffffffff", "cpu1/topology/core_cpus"),
    "bad cache size": (f"{CPU}/cpu0/cache/index3/size", "bigK", "cache/index3/size"),
    "mask and list of a node": (f"{NODE}/node1/cpulist", "4-7,12-14", "node1/cpulist"),
    "mask and list of a core": (f"{CPU}/cpu1/topology/core_cpus_list", "1", "cpu1/topology/core_cpus_list"),
    "online cpu that is not present": (f"{CPU}/present", "0-14", "cpu/present"),
    "online cpu that is offline too": (f"{CPU}/offline", "15", "cpu/offline"),
    "negative number of nothing": (f"{CPU}/cpu1/topology/core_id", "--1", "cpu1/topology/core_id"),
    "some cores unknown": (f"{CPU}/cpu1/topology/core_id", "-1", "cpu1/topology/core_id"),
    "bad mask of an old status": ("proc/self/status", "Cpus_allowed:\tff,", "proc/self/status"),
    "node without folder": (f"{NODE}/online", "0-2", "node2"),
    "distances in other digits": (f"{NODE}/node1/distance", "32 \u0661\u0660", "node1/distance"),
    "a number of 5,000 digits": (f"{CPU}/cpu1/topology/core_id", "9" * 5000, "cpu1/topology/core_id"),
    "a cache of 5,000 digits": (f"{CPU}/cpu0/cache/index3/size", "9" * 5000, "cache/index3/size"),
    "memory of 5,000 digits": (f"{NODE}/node0/meminfo", f"Node 0 MemTotal: {'9' * 5000} kB", "node0/meminfo"),
    "too few distances": (f"{NODE}/node1/distance", "10", "node1/distance"),
    "no MemTotal": (f"{NODE}/node0/meminfo", "Node 0 MemFree: 1 kB", "node0/meminfo"),
    "bad affinity": ("proc/self/status", "Cpus_allowed_list:\t5-1", "proc/self/status"),
    "some sockets unknown": (
        f"{CPU}/cpu1/topology/physical_package_id",
        "-1",
        "cpu1/topology/physical_package_id",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_name_the_file(case: str, root: Path) -> None:
    file, text, named = CONTRADICTIONS[case]
    put(root / file, text)
    with pytest.raises(LauncherError) as caught:
        sysfs.read(root)
    assert caught.value.message.startswith("cannot read the topology: ")
    assert named in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        (f"{CPU}/cpu2/topology/core_id", "cpu2/topology/core_id"),
        (f"{CPU}/cpu2/topology/physical_package_id", "cpu2/topology/physical_package_id"),
        (f"{CPU}/cpu2/cache/index3/shared_*", "cpu2/cache/index3/shared_cpu_map"),
        (f"{CPU}/cpu2/topology", "cpu2/topology/physical_package_id"),
        (f"{NODE}/node0/cpu*", "node0/cpumap"),
        (f"{CPU}", "devices/system/cpu"),
    ],
)
def test_missing_files_that_every_kernel_has_are_errors(pattern: str, named: str, root: Path) -> None:
    remove(root, pattern)
    with pytest.raises(LauncherError, match=named):
        sysfs.read(root)


def test_masks_are_enough(root: Path) -> None:
    expected = sysfs.read(root)
    remove(root, f"{CPU}/cpu*/**/*_list")
    remove(root, f"{NODE}/node*/cpulist")
    assert sysfs.read(root) == expected


def test_lists_are_enough(root: Path) -> None:
    expected = sysfs.read(root)
    for name in ("core_cpus", "thread_siblings", "shared_cpu_map", "cpumap"):
        remove(root, f"sys/**/{name}")
    assert sysfs.read(root) == expected


def test_without_sibling_files_the_ids_make_the_core(root: Path) -> None:
    expected = sysfs.read(root)
    for name in ("core_cpus", "thread_siblings"):
        remove(root, f"sys/**/{name}*")
    assert sysfs.read(root).cores == expected.cores


def test_online_list_of_old_kernels(root: Path) -> None:
    remove(root, f"{CPU}/online")
    remove(root, f"{CPU}/present")
    put(root / CPU / "cpu15/online", "0")
    remove(root, f"{CPU}/cpu0/online")
    topology = sysfs.read(root)
    assert topology.online == CpuSet.parse("0-14")
    assert topology.offline == CpuSet.parse("15")
    assert any("2.6.28" in note for note in topology.notes)


def test_kernel_without_numa(root: Path) -> None:
    remove(root, NODE)
    put(root / "proc/meminfo", "MemTotal: 4194304 kB\nMemFree: 1048576 kB\nActive(file): 1024 kB")
    topology = sysfs.read(root)
    assert not topology.has_numa
    assert [(node.id, node.cpus, node.memory_bytes) for node in topology.numa_nodes] == [
        (0, topology.online, 4 * GIB)
    ]
    assert topology.numa_nodes[0].available_bytes == GIB + 1024 * 1024


def test_node_without_meminfo_is_not_a_node_without_memory(root: Path) -> None:
    remove(root, f"{NODE}/node1/meminfo")
    topology = sysfs.read(root)
    assert [node.memory_known for node in topology.numa_nodes] == [True, False]
    assert any("meminfo of node 1" in note for note in topology.notes)


def test_node_of_a_cpu_may_be_unknown(root: Path) -> None:
    put(root / NODE / "node1/cpumap", "70f0")
    put(root / NODE / "node1/cpulist", "4-7,12-14")
    topology = sysfs.read(root)
    assert next(core for core in topology.cores if 15 in core.cpus).node == 1, "its sibling has one"
    assert any("cpus 15 are in no NUMA node" in note for note in topology.notes)


def test_sockets_that_no_one_knows_are_socket_0(root: Path) -> None:
    for cpu in range(16):
        put(root / f"{CPU}/cpu{cpu}/topology/physical_package_id", "-1")
    topology = sysfs.read(root)
    assert [socket.id for socket in topology.sockets] == [0]
    assert any("physical_package_id of cpus 0-15" in note for note in topology.notes)


def test_no_topology_folders_at_all(root: Path) -> None:
    remove(root, f"{CPU}/cpu*/topology")
    topology = sysfs.read(root)
    assert len(topology.cores) == 16
    assert len({core.key for core in topology.cores}) == 16


def test_ids_that_no_cpu_has_are_defaults(root: Path) -> None:
    expected = sysfs.read(root)
    remove(root, f"{CPU}/cpu*/topology/core_id")
    topology = sysfs.read(root)
    assert {core.cpus for core in topology.cores} == {core.cpus for core in expected.cores}
    assert any("core_id of cpus 0-15" in note for note in topology.notes)


def test_an_empty_l3_mask_is_the_cores_own(root: Path) -> None:
    for cpu in range(16):
        put(root / f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_map", "00000000")
    topology = sysfs.read(root)
    assert {domain.cpus for domain in topology.l3_domains} == {core.cpus for core in topology.cores}


def test_distances_may_count_possible_nodes(root: Path) -> None:
    remove(root, f"{NODE}/node0")
    put(root / NODE / "online", "1")
    put(root / NODE / "possible", "0-1")
    put(root / NODE / "node1/distance", "21 10")
    assert sysfs.read(root).node(1).distances == {1: 10}
    put(root / NODE / "node1/distance", "10 21")
    with pytest.raises(LauncherError, match="node1/distance"):
        sysfs.read(root)


@pytest.mark.parametrize("gone", ["cache", "cache/index3/level", "cache/index3"])
def test_a_cpu_without_its_l3_folder_is_in_the_domain_that_names_it(gone: str, root: Path) -> None:
    remove(root, f"{CPU}/cpu0/{gone}")
    topology = sysfs.read(root)
    assert [(str(its.cpus), its.size_bytes) for its in topology.l3_domains] == [
        ("0-3,8-11", 32 * 1024**2), ("4-7,12-15", 32 * 1024**2)
    ]  # fmt: skip
    assert any("cpus 0 " in note and "L3" in note for note in topology.notes)


def test_an_empty_distance_file_is_said_and_no_distance(root: Path) -> None:
    put(root / NODE / "node1/distance", "")
    topology = sysfs.read(root)
    assert [len(node.distances) for node in topology.numa_nodes] == [2, 0]
    assert any("node 1" in note and "distance" in note for note in topology.notes)


def test_repeated_core_ids_get_the_node_as_die(root: Path) -> None:
    remove(root, f"{CPU}/cpu*/topology/die_id")
    for cpu in range(16):
        put(root / f"{CPU}/cpu{cpu}/topology/core_id", f"{cpu % 4}")
    topology = sysfs.read(root)
    assert {(core.key.die, core.node) for core in topology.cores} == {(0, 0), (1, 1)}
    assert len({core.key for core in topology.cores}) == 8


def test_l3_is_found_by_level_not_by_index(root: Path) -> None:
    expected = sysfs.read(root).l3_domains
    for cpu in range(16):
        (root / f"{CPU}/cpu{cpu}/cache/index3").rename(root / f"{CPU}/cpu{cpu}/cache/index5")
        put(root / f"{CPU}/cpu{cpu}/cache/index3/level", "2")
    assert sysfs.read(root).l3_domains == expected


@pytest.mark.parametrize(
    ("text", "size"), [("1024K", 2**20), ("2M", 2**21), ("0K", None), ("", None), ("4096", 4096)]
)
def test_cache_sizes(text: str, size: int | None, root: Path) -> None:
    for cpu in range(16):
        put(root / f"{CPU}/cpu{cpu}/cache/index3/size", text)
    assert sysfs.read(root).l3_domains[0].size_bytes == size


def test_affinity(root: Path) -> None:
    assert sysfs.read(root).allowed == CpuSet.parse("0-15")
    put(root / "proc/self/status", "Cpus_allowed_list:\t2-5,40\nMems_allowed_list:\t1")
    topology = sysfs.read(root)
    assert topology.allowed == CpuSet.parse("2-5")
    assert topology.allowed_nodes == CpuSet.parse("1")
    assert sysfs.read(root, affinity=CpuSet.parse("1")).allowed == CpuSet.parse("1")


def contain(root: Path, online: str, cpuset: str) -> None:
    """A container whose lxcfs shows `online` over the host's other files."""
    put(root / CPU / "online", online)
    put(root / "proc/self/status", f"Cpus_allowed_list:\t{cpuset}\nMems_allowed_list:\t0-1")
    put(root / "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    put(root / "proc/self/cgroup", "0::/")
    put(root / "sys/fs/cgroup/cpuset.cpus.effective", cpuset)


@pytest.mark.parametrize(
    ("online", "cpuset", "cores"),
    [
        ("0-3", "4-7", ["4", "5", "6", "7"]),
        ("0-3", "2-5", ["2", "3", "4", "5"]),
        ("0-3", "4-5,12-13", ["4,12", "5,13"]),
        ("0", "15", ["15"]),
        # By a quota on cpu time lxcfs shows fewer.
        ("0-1", "0-3", ["0", "1", "2", "3"]),
        # Without its view of cpus it shows the cpuset itself.
        ("4-7", "4-7", ["4", "5", "6", "7"]),
    ],
)
def test_a_cpu_that_the_kernel_runs_this_process_on_is_online(
    online: str, cpuset: str, cores: list[str], root: Path
) -> None:
    contain(root, online, cpuset)
    topology = sysfs.read(root)
    assert topology.online == topology.allowed == CpuSet.parse(cpuset)
    assert [core.cpus.format() for core in topology.cores] == cores
    assert any("lxcfs" in note for note in topology.notes) == (online != cpuset)


def test_a_virtual_cpu_online_may_list_cpus_that_are_offline(root: Path) -> None:
    contain(root, "0-3", "4-7")
    put(root / f"{CPU}/cpu1/online", "0")
    remove(root, f"{CPU}/cpu1/topology")
    assert sysfs.read(root).online == CpuSet.parse("4-7")


@pytest.mark.parametrize("said", [True, False])
def test_offline_cpus_in_the_mask_stay_offline(said: bool, tmp_path: Path) -> None:
    root = Machine(cores=8, offline=frozenset({6, 7})).write(tmp_path)
    put(root / "proc/self/status", "Cpus_allowed_list:\t0-63")
    if not said:
        remove(root, f"{CPU}/cpu[67]/online")
    topology = sysfs.read(root)
    assert topology.online == topology.allowed == CpuSet.parse("0-5")
    assert topology.notes == ()


@pytest.mark.parametrize(
    ("shown", "cgroup", "limit"),
    [
        (64, "max", 64 * GIB),
        (64, str(32 * GIB), 32 * GIB),
        (64, str(96 * GIB), 64 * GIB),
        (124, "max", None),
        (128, "max", None),
        (200, "max", None),
    ],
)
def test_a_memory_limit_that_only_meminfo_shows(
    shown: int, cgroup: str, limit: int | None, root: Path
) -> None:
    put(root / "proc/meminfo", f"MemTotal: {shown * 2**20} kB\nMemFree: 1 kB\nSwapTotal: 8388608 kB")
    put(root / "proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 none rw")
    put(root / "sys/fs/cgroup/memory.max", cgroup)
    topology = sysfs.read(root)
    assert topology.memory_limit_bytes == limit
    assert any("/proc/meminfo" in note for note in topology.notes) == (shown < 120)


def test_a_meminfo_that_says_nothing_is_no_limit(root: Path) -> None:
    for text in ("", "MemTotal:", "MemTotal: much kB", "MemTotal: 0 kB"):
        put(root / "proc/meminfo", text)
        assert sysfs.read(root).memory_limit_bytes is None


FAST_AND_SLOW = [1024] * 4 + [620] * 4


@pytest.mark.parametrize(
    ("file", "values", "atoms", "speeds"),
    [
        ("cpu_capacity", FAST_AND_SLOW, "", [1.0] * 4 + [0.605] * 4),
        (
            "cpu_capacity",
            [1024, 1024, 880, 900, 480, 480, 310, 310],
            "",
            [1.0] * 4 + [0.469] * 2 + [0.303] * 2,
        ),
        ("cpufreq/cpuinfo_max_freq", [5_100_000] * 4 + [3_300_000] * 4, "", [1.0] * 4 + [0.647] * 4),
        ("cpufreq/cpuinfo_max_freq", [5_100_000] * 4 + [4_100_000] * 4, "4-7", [1.0] * 4 + [0.563] * 4),
        ("", [], "4-7", [1.0] * 4 + [0.7] * 4),
        # Cores that turbo a little higher are no other kind.
        ("cpufreq/cpuinfo_max_freq", [5_700_000, 5_800_000, *[5_200_000] * 6], "", [1.0] * 8),
        ("cpu_capacity", [1024, 1009, *[970] * 6], "", [1.0] * 8),
        # A file that some cores lack, or that says nothing, decides nothing.
        ("cpu_capacity", [1024, 1024, 500], "", [1.0] * 8),
        ("cpu_capacity", [0] * 8, "", [1.0] * 8),
    ],
)
def test_kinds_of_cores(
    file: str, values: list[int], atoms: str, speeds: list[float], tmp_path: Path
) -> None:
    root = Machine(cores=8).write(tmp_path)
    for cpu, value in enumerate(values):
        put(root / f"{CPU}/cpu{cpu}/{file}", f"{value}")
    if atoms:
        put(root / "sys/devices/cpu_atom/cpus", atoms)
    assert [core.speed for core in sysfs.read(root).cores] == speeds


def test_cpuinfo_is_optional(root: Path) -> None:
    remove(root, "proc/cpuinfo")
    topology = sysfs.read(root)
    assert topology.cpu.vendor == ""
    assert any("proc/cpuinfo" in note for note in topology.notes)


def test_the_live_machine() -> None:
    topology = sysfs.read()
    assert topology.allowed <= CpuSet(os.sched_getaffinity(0))
    assert topology.allowed
    assert topology.cpu.flags
