"""Limits of cgroup v1, v2, both at once, containers, and the cpuset file system before cgroups."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from support.synthetic import put

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.machine.cgroup import Limits, read_limits, slice_path
from launcher.machine.kernel_files import Root

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1 = (
    "33 32 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "34 32 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
)
DOCKER_V1 = V1.replace(" / ", " /docker/abc ")
NONE = Limits(None, None, None)


def limits(root: Path, **files: str) -> Limits:
    for name, text in files.items():
        put(root / name, text)
    return read_limits(Root(root))


def test_nothing_is_no_limit(tmp_path: Path) -> None:
    assert read_limits(Root(tmp_path)) == NONE


def test_v2_takes_the_innermost_cpuset_and_the_tightest_memory(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        **{
            "proc/self/mountinfo": V2,
            "proc/self/cgroup": "0::/a.slice/b.service",
            "sys/fs/cgroup/a.slice/cpuset.cpus.effective": "0-7",
            "sys/fs/cgroup/a.slice/cpuset.mems.effective": "0",
            "sys/fs/cgroup/a.slice/memory.max": "1000",
            "sys/fs/cgroup/a.slice/b.service/memory.max": "2000",
            "sys/fs/cgroup/cpuset.cpus.effective": "0-63",
        },
    )
    assert found == Limits(CpuSet.parse("0-7"), CpuSet.parse("0"), 1000)


def test_v2_place_from_the_cpuset_file(tmp_path: Path) -> None:
    files = {
        "proc/mounts": "none /cgroup/unified cgroup2 rw 0 0",
        "proc/self/cpuset": "/uid_1/job_2",
        "cgroup/unified/uid_1/job_2/cpuset.cpus.effective": "0-5",
    }
    assert limits(tmp_path, **files).cpus == CpuSet.parse("0-5")


def test_v2_without_a_limit(tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": "max"}
    assert limits(tmp_path, **files) == NONE


def test_v2_by_its_usual_place(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cgroup.controllers": "cpuset memory", "sys/fs/cgroup/memory.max": "5000"}
    assert limits(tmp_path, **files).memory_bytes == 5000


def test_v1(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        **{
            "proc/self/mountinfo": V1,
            "proc/self/cgroup": "3:cpuset:/job\n4:memory:/job/x\n0::/",
            "sys/fs/cgroup/cpuset/job/cpuset.cpus": "1-2",
            "sys/fs/cgroup/cpuset/job/cpuset.mems": "1",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert found == Limits(CpuSet.parse("1-2"), CpuSet.parse("1"), 4096)


def test_v1_effective_cpus_may_be_stale(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": V1,
        "sys/fs/cgroup/cpuset/cpuset.cpus": "0-9",
        "sys/fs/cgroup/cpuset/cpuset.effective_cpus": "0-3",
    }
    assert limits(tmp_path, **files).cpus == CpuSet.parse("0-9")


def test_v1_by_its_usual_place(tmp_path: Path) -> None:
    assert limits(tmp_path, **{"sys/fs/cgroup/cpuset/cpuset.cpus": "0-3"}).cpus == CpuSet.parse("0-3")


@pytest.mark.parametrize("place", ["/docker/abc", "/docker/abc/inner", "/elsewhere"])
def test_container_sees_its_own_cgroup_as_root(place: str, tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": DOCKER_V1,
        "proc/self/cgroup": f"3:cpuset:{place}",
        "sys/fs/cgroup/cpuset/cpuset.cpus": "4-5",
    }
    assert limits(tmp_path, **files).cpus == CpuSet.parse("4-5")


def test_hybrid_memory_of_v1_and_cpuset_of_v2(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        **{
            "proc/self/mountinfo": f"{V2.replace('/sys/fs/cgroup ', '/sys/fs/cgroup/unified ')}\n{V1.splitlines()[1]}",
            "proc/self/cgroup": "4:memory:/m\n0::/u",
            "sys/fs/cgroup/unified/u/cpuset.cpus.effective": "3",
            "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "77",
        },
    )
    assert (found.cpus, found.memory_bytes) == (CpuSet.parse("3"), 77)


def test_cpuset_file_system(tmp_path: Path) -> None:
    found = limits(
        tmp_path,
        **{
            "proc/mounts": "none /dev/cpuset cpuset rw 0 0\nbroken",
            "proc/self/cpuset": "/dummy",
            "dev/cpuset/dummy/cpus": "0-6",
            "dev/cpuset/dummy/mems": "1-4",
        },
    )
    assert found == Limits(CpuSet.parse("0-6"), CpuSet.parse("1-4"), None)


def test_odd_mountinfo_lines_are_passed_over(tmp_path: Path) -> None:
    assert limits(tmp_path, **{"proc/self/mountinfo": "one two\n1 2 3 / / rw - ext4 /dev/a rw"}) == NONE


def test_bad_limit_names_the_file(tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": V2, "sys/fs/cgroup/memory.max": "much"}
    with pytest.raises(LauncherError, match=r"memory\.max"):
        limits(tmp_path, **files)


CPU_V1 = "35 32 0:32 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("800000 100000", 8),
        ("max 100000", None),
        ("750000 100000", Fraction(15, 2)),
        ("40000 20000", 2),
        ("50000", Fraction(1, 2)),
    ],
)
def test_v2_cpu_time(text: str, cpus: Fraction | None, tmp_path: Path) -> None:
    files = {"proc/self/mountinfo": V2, "proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": text}
    assert limits(tmp_path, **files).cpu_quota == cpus


def test_cpu_time_of_the_tightest_ancestor(tmp_path: Path) -> None:
    files = {
        "proc/self/mountinfo": V2,
        "proc/self/cgroup": "0::/kubepods.slice/pod1/c1",
        "sys/fs/cgroup/kubepods.slice/cpu.max": "6400000 100000",
        "sys/fs/cgroup/kubepods.slice/pod1/cpu.max": "400000 100000",
        "sys/fs/cgroup/kubepods.slice/pod1/c1/cpu.max": "max 100000",
    }
    assert limits(tmp_path, **files).cpu_quota == 4


@pytest.mark.parametrize(("quota", "cpus"), [("-1", None), ("250000", 5)])
def test_v1_cpu_time(quota: str, cpus: int | None, tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/cpu,cpuacct/job"
    files = {
        "proc/self/mountinfo": CPU_V1,
        "proc/self/cgroup": "5:cpu,cpuacct:/job",
        f"{folder}/cpu.cfs_quota_us": quota,
        f"{folder}/cpu.cfs_period_us": "50000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
    }
    assert limits(tmp_path, **files).cpu_quota == cpus


def test_v1_cpu_time_by_its_usual_place(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}
    assert limits(tmp_path, **files).cpu_quota == Fraction(3, 2)


def test_bad_cpu_time_names_the_file(tmp_path: Path) -> None:
    for text in ("much 100000", "1000 0"):
        files = {"proc/self/mountinfo": V2, "sys/fs/cgroup/cpu.max": text}
        with pytest.raises(LauncherError, match=r"cpu\.max"):
            limits(tmp_path, **files)


def test_the_slice_of_the_instances_counts_for_cpu_time_and_memory(tmp_path: Path) -> None:
    for name, text in {
        "proc/self/mountinfo": V2,
        "proc/self/cgroup": "0::/system.slice/numa-launcher.service",
        "sys/fs/cgroup/system.slice/numa-launcher.service/cpu.max": "max 100000",
        "sys/fs/cgroup/numa.slice/cpu.max": "1600000 100000",
        "sys/fs/cgroup/numa.slice/numa-launcher.slice/memory.max": "4096",
    }.items():
        put(tmp_path / name, text)
    found = read_limits(Root(tmp_path), slice_name="numa-launcher.slice")
    assert (found.cpu_quota, found.memory_bytes) == (16, 4096)
    assert read_limits(Root(tmp_path)) == NONE


def test_the_path_of_a_slice() -> None:
    assert slice_path("a-b-c.slice") == "/a.slice/a-b.slice/a-b-c.slice"
    assert slice_path("-.slice") == "/"


SLICE = {
    "proc/self/mountinfo": V2,
    "proc/self/cgroup": "0::/system.slice/numa-launcher.service",
    "sys/fs/cgroup/cpuset.cpus.effective": "0-63",
    "sys/fs/cgroup/cpuset.mems.effective": "0-3",
    "sys/fs/cgroup/system.slice/cpuset.cpus.effective": "0-47",
    "sys/fs/cgroup/system.slice/cpuset.mems.effective": "0-2",
}


def test_the_slice_of_instances_limits_their_cpus_and_memory_nodes(tmp_path: Path) -> None:
    """AllowedCPUs= and AllowedMemoryNodes= of numa-launcher.slice: the daemon does not run below it."""
    for name, text in SLICE.items():
        put(tmp_path / name, text)
    assert read_limits(Root(tmp_path), slice_name="numa-launcher.slice").cpus == CpuSet.parse("0-47")
    put(tmp_path / "sys/fs/cgroup/numa.slice/numa-launcher.slice/cpuset.cpus.effective", "8-55")
    put(tmp_path / "sys/fs/cgroup/numa.slice/numa-launcher.slice/cpuset.mems.effective", "1-3")
    found = read_limits(Root(tmp_path), slice_name="numa-launcher.slice")
    assert found == Limits(CpuSet.parse("8-47"), CpuSet.parse("1-2"), None, slice_cpus=CpuSet.parse("8-55"))
    assert read_limits(Root(tmp_path)) == Limits(CpuSet.parse("0-47"), CpuSet.parse("0-2"), None)


def test_the_slice_of_instances_inherits_its_parents_cpuset(tmp_path: Path) -> None:
    for name, text in SLICE.items():
        put(tmp_path / name, text)
    put(tmp_path / "sys/fs/cgroup/numa.slice/cpuset.cpus.effective", "0-7")
    put(tmp_path / "sys/fs/cgroup/numa.slice/numa-launcher.slice/memory.max", "max")
    assert read_limits(Root(tmp_path), slice_name="numa-launcher.slice").cpus == CpuSet.parse("0-7")
