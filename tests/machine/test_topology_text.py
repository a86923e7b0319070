"""The JSON form that other programs read, and the text for a terminal."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.machine.named import find_topology
from launcher.machine.topology_text import layout_json, to_json, to_text


def test_json_form() -> None:
    shown = to_json(Machine(sockets=2, l3=2, cores=2, smt=2, offline=frozenset({15})).topology())
    assert json.loads(json.dumps(shown)) == shown
    assert shown["online"] == "0-14"
    assert shown["offline"] == "15"
    assert shown["allowed"] == "0-14"
    assert shown["sockets"] == [{"id": 0, "cpus": "0-3,8-11"}, {"id": 1, "cpus": "4-7,12-14"}]
    assert shown["numa_nodes"][1]["distances"] == {"0": 32, "1": 10}
    assert shown["l3_domains"][0] == {"cpus": "0-1,8-9", "size_bytes": 33554432, "node": 0}
    assert shown["cores"][0] == {"socket": 0, "die": 0, "core_id": 0, "cpus": "0,8", "node": 0}
    assert shown["cpu"]["flags"] == sorted(shown["cpu"]["flags"])


def test_text_names_what_matters() -> None:
    machine = Machine(
        sockets=2, l3=2, cores=2, smt=2, memory_only=1, offline=frozenset({15}), memory_limit_bytes=2**30,
        allowed=CpuSet.parse("0-3"),
    )  # fmt: skip
    text = to_text(machine.topology())
    assert "node 2 (no socket): cpus none, 64 GiB" in text
    assert "cgroup memory limit 1 GiB" in text
    assert "offline 15" in text
    assert "allowed 0-3" in text


def test_a_node_of_a_kernel_without_numa_has_no_distances() -> None:
    topology = Machine(cores=2).topology()
    bare = replace(topology, numa_nodes=tuple(replace(node, distances={}) for node in topology.numa_nodes))
    assert "distance" in to_text(topology)
    assert "distance" not in to_text(bare)


def test_a_node_is_found_by_its_id() -> None:
    topology = Machine(sockets=2, cores=2).topology()
    assert topology.node(1) is topology.numa_nodes[1]
    with pytest.raises(KeyError):
        topology.node(2)


def test_the_layout_has_what_a_picture_needs() -> None:
    machine = Machine(sockets=2, l3=2, cores=2, smt=2, offline=frozenset({15}))
    shown = layout_json(machine.topology(), CpuSet.parse("0,8"))
    assert json.loads(json.dumps(shown)) == shown
    assert shown["sockets"] == [{"socket": 0, "nodes": [0]}, {"socket": 1, "nodes": [1]}]
    assert shown["nodes"][1] == {"node": 1, "socket": 1, "memory_bytes": 64 * 2**30, "cpus": "4-7,12-14"}
    assert shown["cores"][0] == {"cpus": [0, 8], "socket": 0, "node": 0, "l3": 0}
    assert shown["cores"][-1] == {"cpus": [7], "socket": 1, "node": 1, "l3": 3}
    assert (shown["cpu_count"], shown["reserved"], shown["allowed"]) == (15, "0,8", "0-14")


def test_the_layout_of_512_cpus_is_small() -> None:
    shown = layout_json(find_topology("epyc-9755-2p"), CpuSet())
    assert (shown["cpu_count"], len(shown["cores"])) == (512, 256)
    assert len(json.dumps(shown, separators=(",", ":"))) < 16_000
