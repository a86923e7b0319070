"""Each rule at a machine that is good in everything, spoiled in one thing."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
from msgspec.structs import replace

from launcher.base.cpuset import CpuSet
from launcher.base.text import GIB
from launcher.base.watched_file import FileCondition, FileState
from launcher.doctor.checks import examine
from launcher.doctor.facts import AskedModel, Facts, Kernel
from launcher.doctor.rows import Report
from launcher.engines.checks import Installed, Row, Tier, Trouble, Verdict, ok
from launcher.engines.numactl import Binding, MemPolicy
from launcher.engines.software import Stack
from launcher.machine.hardware import HostFacts
from launcher.machine.topology import Core, CoreKey, CpuInfo, CpusApart, NumaNode, Socket, Topology

ZEN4 = frozenset({"avx2", "avx512f", "avx512_bf16"})


def node(number: int, cpus: str, gib: int = 64, **more: Any) -> NumaNode:
    return NumaNode(number, 0, CpuSet.parse(cpus), gib * GIB, gib * GIB // 2, {}, **more)


TOPOLOGY = Topology(
    online=CpuSet.parse("0-7"),
    offline=CpuSet(),
    allowed=CpuSet.parse("0-7"),
    sockets=(Socket(0, CpuSet.parse("0-7")),),
    numa_nodes=(node(0, "0-7"),),
    l3_domains=(),
    cores=tuple(Core(CoreKey(0, 0, cpu), CpuSet([cpu]), 0) for cpu in range(8)),
    cpu=CpuInfo("AuthenticAMD", "EPYC", 25, ZEN4),
    allowed_nodes=CpuSet([0]),
)
HOST = HostFacts("AuthenticAMD", "AMD EPYC 9654", 0x19, ZEN4, 8, 40 * GIB)
SOFTWARE = Installed(stack=Stack(command=("/venv/bin/vllm",)))
KERNEL = Kernel("always", False, frozenset({"performance"}), False, True, None)
GOOD = Facts(
    host=HOST,
    topology=TOPOLOGY,
    binding=Binding(MemPolicy.MEMBIND, numactl="/usr/bin/numactl"),
    binding_trouble=None,
    software=SOFTWARE,
    kernel=KERNEL,
)


@pytest.mark.parametrize(
    ("state", "why", "verdict"),
    [
        (FileCondition.IN_USE, "", Verdict.OK),
        (FileCondition.EXPIRING, "it expires at noon", Verdict.WARN),
        (FileCondition.EXPIRED, "it expired at noon", Verdict.FAIL),
        (FileCondition.UNUSABLE, "cannot read it: no such file", Verdict.FAIL),
        (FileCondition.UNUSABLE, "cannot read it: permission denied", Verdict.WARN),
    ],
)
def test_files(state: FileCondition, why: str, verdict: Verdict) -> None:
    file = FileState(
        what="API keys", path="/k", state=state, since=1.0, why=why, remedy="mend it" if why else ""
    )
    (row,) = (row for row in look(files=(file,)).rows if row.check == "keys")
    assert row.verdict is verdict
    assert row.fact == (why or "API keys '/k': can be used")
    assert row.remedy.endswith(file.remedy)


def engine(software: Installed, host: HostFacts, topology: Topology) -> Iterator[Row]:
    """The check of some engine."""
    assert software is SOFTWARE
    assert host.logical_cpus
    yield ok("engine", f"it is here, with {len(topology.cores)} cores")


def look(**changes: Any) -> Report:
    return examine(replace(GOOD, **changes), (engine,))


def host(**changes: Any) -> dict[str, Any]:
    return {"host": replace(HOST, **changes)}


def topology(**changes: Any) -> dict[str, Any]:
    return {"topology": replace(TOPOLOGY, **changes)}


def kernel(**changes: Any) -> dict[str, Any]:
    return {"kernel": replace(KERNEL, **changes)}


def test_a_good_machine() -> None:
    report = look()
    assert (report.tier, report.failed) == (Tier.OPTIMISED, False)
    assert {row.verdict for row in report.rows} == {Verdict.OK}
    checks = [row.check for row in report.rows]
    assert len(set(checks)) == len(checks)
    assert report.rows[0].fact == "AMD EPYC 9654, Zen 4, 8 cores, 8 cpus"
    assert checks.index("governor") < checks.index("engine") < checks.index("build"), "host, engine, our own"


OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
BEST, LESS, LEAST = Tier.OPTIMISED, Tier.DEGRADED, Tier.FALLBACK


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "tier", "says"),
    [
        ({"build": "stale"}, "build", WARN, BEST, "do not match the sources"),
        ({"build": "compiled"}, "build", OK, BEST, "compiled libraries"),
        (host(brand="", vendor=""), "cpu", OK, BEST, "unknown"),
        (topology(has_numa=False), "numa", WARN, LESS, "no NUMA support"),
        (topology(numa_nodes=(node(0, "0-3"), node(1, "4-7"))), "numa", OK, BEST, "1 socket, 2 nodes with cpus"),
        (topology(numa_nodes=(node(0, "0-7"), node(1, ""))), "numa", OK, BEST, "1 without cpus (these get no"),
        (topology(cores=(Core(CoreKey(0, 0, 0), CpuSet([0, 1]), 0),)), "smt", OK, BEST, "on: one cpu"),
        (topology(allowed=CpuSet.parse("0-3")), "cpus", WARN, BEST, "4 of 8 online cpus may be used, 4-7 may not"),
        (
            topology(allowed=CpuSet(), apart=CpusApart(CpuSet.parse("0-1"), CpuSet.parse("2-7"))), "cpus", FAIL, LEAST,
            "this process may use cpus 0-1, the slice of its instances cpus 2-7, and no cpu is in both",
        ),
        (topology(numa_nodes=(node(0, "0-3"), node(1, "4-7", 0))), "memory", WARN, LESS, "of its own on node 1"),
        (topology(numa_nodes=(node(0, "0-3"), node(1, "4-7", 32))), "memory", WARN, BEST, "nodes differ"),
        (topology(numa_nodes=(node(0, "0-7", 0, memory_known=False),)), "memory", OK, BEST, "node 0"),
        (topology(memory_limit_bytes=8 * GIB), "memory-limit", WARN, BEST, "allows 8 GiB of 64 GiB"),
        (topology(memory_limit_bytes=80 * GIB), "memory-limit", OK, BEST, "no cgroup limit"),
        (topology(cpu_quota=Fraction(1, 2)), "cpu-quota", WARN, BEST, "the time of 0.5 of "),
        (topology(cpu_quota=Fraction(999)), "cpu-quota", OK, BEST, "no cgroup limit"),
        ({"binding": None, "binding_trouble": Trouble("no numactl", "install")}, "numactl", FAIL, LEAST, "no numactl"),
        ({"binding": None}, "numactl", FAIL, LEAST, "not searched for"),
        ({"binding": Binding(MemPolicy.NONE, taskset="taskset")}, "numactl", WARN, LEAST, "taskset pins the cores"),
        ({"binding": Binding(MemPolicy.NONE)}, "numactl", WARN, LEAST, "nothing pins"),
        ({"binding": Binding(MemPolicy.NONE, warning="refused")}, "numactl", WARN, LEAST, "refused"),
        ({"binding": Binding(MemPolicy.PREFERRED, "n", warning="EPERM")}, "memory-policy", WARN, LESS, "EPERM"),
        ({"binding": Binding(MemPolicy.NONE, "n"), **topology(has_numa=False)}, "memory-policy", WARN, LESS, "no NUMA"),
        (kernel(container="docker", seccomp=True, sys_nice=False), "container", WARN, BEST, "docker"),
        (kernel(container="docker", seccomp=True, sys_nice=True), "container", OK, BEST, "filtered"),
        (kernel(seccomp=None, sys_nice=None), "container", OK, BEST, "filter unknown, capabilities unknown"),
        ({"measured": None}, "layout", OK, BEST, "none was measured"),
        ({"measured": "2026-11-20: interleaved × 4"}, "layout", OK, BEST, "measured on 2026-11-20: interleaved × 4"),
        (kernel(hugepages=None), "hugepages", OK, BEST, "unknown"),
        (kernel(hugepages="never"), "hugepages", WARN, BEST, "never"),
        (kernel(numa_balancing=True), "numa-balancing", WARN, BEST, "on:"),
        (kernel(numa_balancing=None), "numa-balancing", OK, BEST, "not supported"),
        (kernel(governors=None), "governor", OK, BEST, "hypervisor"),
        (kernel(governors=frozenset({"powersave", "performance"})), "governor", WARN, BEST, "performance, powersave"),
    ],
)  # fmt: skip
def test_one_thing_is_different(
    changes: dict[str, Any], check: str, verdict: Verdict, tier: Tier, says: str
) -> None:
    row = next(row for row in look(**changes).rows if row.check == check)
    assert (row.verdict, row.tier) == (verdict, tier), row
    assert says in row.fact
    if verdict is FAIL and row.fact != "not searched for":
        assert row.remedy


def test_advice_for_several_nodes_per_socket() -> None:
    rows = look(**topology(numa_nodes=(node(0, "0-3"), node(1, "4-7")))).rows
    assert "NPS2" in next(row for row in rows if row.check == "numa").remedy


@pytest.mark.parametrize(
    ("model", "verdict", "said"),
    [
        (AskedModel("m", GIB, 2 * GIB, 4096), Verdict.OK, "weights 1 GiB, one request of 4096 tokens 2 GiB"),
        (
            AskedModel("m", doubts=(Trouble("the engine does not take 'm': no kernel", "use another"),)),
            Verdict.WARN,
            "the engine does not take 'm': no kernel",
        ),
    ],
)
def test_what_the_engine_says_of_a_model_is_a_row(model: AskedModel, verdict: Verdict, said: str) -> None:
    (row,) = (its for its in look(models=(model,)).rows if its.check == "model")
    assert row.verdict is verdict
    assert said in row.fact
    assert not look(models=(model,)).failed
