"""The daemon on virtual hosts with several sockets, NUMA nodes, and memory without cpus."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from vm.vm import LAYOUTS

from launcher.base.cpuset import CpuSet

# Memory that each fake engine touches (guest/observe.py); its interpreter takes about 30 MiB more.
ALLOCATED = 48 << 20
Facts = dict[str, Any]


def cpus_of(text: str) -> set[int]:
    return set(CpuSet.parse(text))


def nodes_with_cpus(facts: Facts) -> list[int]:
    return [node for node, has_cpus in enumerate(LAYOUTS[facts["layout"]].nodes) if has_cpus]


def test_the_host_is_the_layout(facts: Facts) -> None:
    layout = LAYOUTS[facts["layout"]]
    assert len(facts["lscpu"]) == layout.cpus
    assert len({cpu["socket"] for cpu in facts["lscpu"]}) == layout.sockets
    l3 = {cpu["l1d:l1i:l2:l3"].rpartition(":")[2] for cpu in facts["lscpu"]}
    assert len(l3) == layout.sockets * layout.dies
    assert f"available: {len(layout.nodes)} nodes" in facts["numactl"]
    assert facts["install"]["status"] == 0, facts["install"]


def test_topology_agrees_with_lscpu(facts: Facts) -> None:
    topology = facts["topology"]
    assert topology["status"] == 0, topology
    for what, entry in (("sockets", "socket"), ("numa_nodes", "node")):
        theirs: dict[int, set[int]] = {}
        for cpu in facts["lscpu"]:
            theirs.setdefault(int(cpu[entry]), set()).add(int(cpu["cpu"]))
        ours = {one["id"]: cpus_of(one["cpus"]) for one in topology[what] if one["cpus"]}
        assert ours == theirs, what
    domains: dict[str, set[int]] = {}
    for cpu in facts["lscpu"]:
        domains.setdefault(cpu["l1d:l1i:l2:l3"].rpartition(":")[2], set()).add(int(cpu["cpu"]))
    assert sorted(map(sorted, domains.values())) == sorted(
        sorted(cpus_of(one["cpus"])) for one in topology["l3_domains"]
    )
    assert len(topology["cores"]) == len({(cpu["socket"], cpu["core"]) for cpu in facts["lscpu"]})


def test_topology_agrees_with_numactl(facts: Facts) -> None:
    ours = {node["id"]: node for node in facts["topology"]["numa_nodes"]}
    text = facts["numactl"]
    for node, cpus in re.findall(r"^node (\d+) cpus:([ \d]*)$", text, re.MULTILINE):
        assert cpus_of(ours[int(node)]["cpus"]) == set(map(int, cpus.split()))
    for node, size in re.findall(r"^node (\d+) size: (\d+) MB$", text, re.MULTILINE):
        assert ours[int(node)]["memory_bytes"] >> 20 == int(size)
    matrix = text.partition("node distances:")[2].splitlines()[2:]
    for row in matrix:
        node, *distances = map(int, row.replace(":", " ").split())
        assert ours[node]["distances"] == {str(other): value for other, value in enumerate(distances)}
    assert len(matrix) == len(ours)


def test_each_slot_is_planned_inside_one_node(facts: Facts) -> None:
    assert facts["plan"]["status"] == 0, facts["plan"]
    nodes = {node["id"]: cpus_of(node["cpus"]) for node in facts["topology"]["numa_nodes"]}
    slots = facts["plan"]["slots"]
    assert [slot["node"] for slot in slots] == nodes_with_cpus(facts)
    for slot in slots:
        assert cpus_of(slot["cpus"]) <= nodes[slot["node"]]
        assert slot["membind"] == str(slot["node"])


def test_the_service_runs(facts: Facts) -> None:
    assert facts["start"]["status"] == 0, facts["start"]
    assert facts["is-active"]["out"] == "active\n"
    status = facts["status"]
    assert status["ready"] == len(status["slots"]) == len(nodes_with_cpus(facts))
    assert status["binding"] == "membind"


def test_the_service_finds_what_root_measured_on_the_same_machine(facts: Facts) -> None:
    """From inside the unit's sandbox the hardware looks as it does to `tune` outside of it."""
    assert facts["remember"]["out"] == "/var/lib/numa-launcher/tuning/best.json\n"
    measured = facts["status"]["measured_layout"]
    assert (measured["in_use"], measured["stale"], measured["ratio_to_default"]) == (True, [], 1.312)


def test_verify_passes(facts: Facts) -> None:
    assert facts["verify"]["status"] == 0, facts["verify"]
    for slot in facts["verify"]["slots"]:
        found = slot["verified"]
        assert (found["ok"], found["differences"], found["foreign"]) == (True, [], [])
        assert cpus_of(found["cpus"]) <= cpus_of(slot["cpus"])
        assert found["bound_share"] >= 0.95
        assert found["node_bytes"][str(slot["node"])] >= ALLOCATED
        assert found["policies"] == [f"bind:{slot['node']}"]
        assert found["processes"] == 2


def test_the_kernel_reports_the_same_pages(facts: Facts) -> None:
    """Counted by the test, not by numa-launcher."""
    for slot, text in facts["numa_maps"].items():
        node = facts["status"]["slots"][int(slot)]["node"]
        pages: Counter[int] = Counter()
        for line in text.splitlines():
            if "anon=" in line and "file=" not in line:
                for where, count in re.findall(r" N(\d+)=(\d+)", line):
                    pages[int(where)] += int(count)
        assert pages[node] * 4096 >= ALLOCATED, slot
        assert pages[node] >= 0.95 * pages.total(), slot


def test_moved_threads_are_reported(facts: Facts) -> None:
    """taskset by another process."""
    assert facts["taskset"]["status"] == 1
    (slot,) = facts["taskset"]["slots"]
    (difference,) = slot["verified"]["differences"]
    assert difference["planned"] == f"on cpus {slot['cpus']}"
    assert f"may run on cpus 0-{LAYOUTS[facts['layout']].cpus - 1}: python" in difference["found"]
    text = facts["taskset-text"]
    assert text["status"] == 1
    assert "slot 0: DIFFERS" in text["out"]
    assert f"- planned: on cpus {slot['cpus']}" in text["out"]
    assert "+ found:" in text["out"]


def test_moved_pages_are_reported(facts: Facts) -> None:
    """migratepages by another process."""
    assert facts["migratepages"]["status"] == 1
    (slot,) = facts["migratepages"]["slots"]
    (difference,) = slot["verified"]["differences"]
    assert difference["what"] == "memory"
    assert difference["planned"] == "at least 95% on node 1"
    assert "MiB on node 0" in difference["found"]
    assert slot["verified"]["bound_share"] < 0.5


def test_the_drawn_machine_is_the_host(facts: Facts) -> None:
    drawn, topology = facts["drawn"], facts["topology"]
    assert {node["node"]: node["cpus"] for node in drawn["nodes"]} == {
        node["id"]: node["cpus"] for node in topology["numa_nodes"]
    }
    assert sorted(cpu for core in drawn["cores"] for cpu in core["cpus"]) == list(range(drawn["cpu_count"]))
    for core in drawn["cores"]:
        assert set(core["cpus"]) <= cpus_of(topology["l3_domains"][core["l3"]]["cpus"])


def test_memory_of_each_node_is_shown_whole(facts: Facts) -> None:
    sizes = {node["id"]: node["memory_bytes"] for node in facts["topology"]["numa_nodes"]}
    for machine in (facts["machine"], facts["machine-misplaced"]):
        assert {node["node"]: node["total_bytes"] for node in machine["nodes"]} == sizes
        for node in machine["nodes"]:
            parts = ("free_bytes", "weights_bytes", "kv_cache_bytes", "foreign_bytes", "other_bytes")
            assert sum(node[part] for part in parts) == node["total_bytes"]
        assert len(machine["busy"]) == LAYOUTS[facts["layout"]].cpus
        assert all(share is not None for share in machine["busy"])
    assert [node["foreign_bytes"] for node in facts["machine"]["nodes"]] == [0] * len(sizes)


def test_misplaced_threads_and_pages_are_in_the_machine_s_load(facts: Facts) -> None:
    for slot in facts["machine"]["slots"]:
        assert (slot["off_node_bytes"], slot["misplaced"]) == (0, [])
    threads, pages, *others = facts["machine-misplaced"]["slots"]
    everywhere = f"0-{LAYOUTS[facts['layout']].cpus - 1}"
    assert threads["misplaced_threads"] >= 1
    assert {thread["cpus"] for thread in threads["misplaced"]} == {everywhere}
    assert pages["misplaced"] == []
    assert pages["off_node_bytes"] >= ALLOCATED
    assert facts["machine-misplaced"]["nodes"][0]["foreign_bytes"] >= ALLOCATED
    assert [(slot["off_node_bytes"], slot["misplaced"]) for slot in others] == [(0, [])] * len(others)


def test_the_service_shows_what_tune_measured(facts: Facts) -> None:
    (found,) = facts["measurements"]["measurements"]
    assert found["kind"] == "tune"
    assert "1.31" in found["what"]


def test_another_program_on_the_slots_cpus_is_reported(facts: Facts) -> None:
    stranger = facts["stranger"]
    assert stranger["verify"]["status"] == 1
    assert (
        f"! sleep (pid {stranger['pid']}) is pinned to cpus {stranger['cpu']}," in stranger["verify"]["out"]
    )


def test_journal_lines_carry_fields(facts: Facts) -> None:
    lines = [line for line in facts["journal"] if line["NUMA_LAUNCHER_SLOT"] is not None]
    slots = {slot["slot"] for slot in facts["status"]["slots"]}
    assert {int(line["NUMA_LAUNCHER_SLOT"]) for line in lines} == slots
    ready = [line for line in lines if line["MESSAGE"].endswith("starting -> ready")]
    assert {(int(line["NUMA_LAUNCHER_SLOT"]), line["NUMA_LAUNCHER_GENERATION"]) for line in ready} == {
        (slot, "1") for slot in slots
    }
    assert {line["_SYSTEMD_UNIT"] for line in ready} == {"numa-launcher.service"}


def test_stop_leaves_nothing(facts: Facts) -> None:
    assert facts["stop"]["status"] == 0, facts["stop"]
    assert facts["stopped"] == {
        "is-active": "inactive", "result": "success", "processes": "", "sleeping": "", "instances": [], "run": [],
        "cgroup": [],
    }  # fmt: skip


def test_no_slot_on_memory_without_cpus(facts: Facts) -> None:
    bare = [node for node, has_cpus in enumerate(LAYOUTS[facts["layout"]].nodes) if not has_cpus]
    assert bare == {"nps4": [], "cxl": [2]}[facts["layout"]]
    for slot in facts["plan"]["slots"]:
        assert slot["node"] not in bare
        assert not cpus_of(slot["membind"]) & set(bare)
    for slot in facts["verify"]["slots"]:
        assert not [node for node in bare if str(node) in slot["verified"]["node_bytes"]]


def test_doctor_knows_the_host(facts: Facts) -> None:
    doctor = facts["doctor"]
    rows = {row["check"]: row for row in doctor["rows"]}
    assert "Zen 4" in rows["cpu"]["fact"]
    assert rows["memory-policy"]["verdict"] == "ok"
    assert rows["tcmalloc"]["verdict"] == "ok"
    # vLLM is not installed.
    assert (doctor["status"], rows["vllm"]["verdict"], doctor["tier"]) == (1, "fail", "fallback")
