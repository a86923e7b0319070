"""The JSON form that other programs read, and the text for a terminal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from synthetic import Machine

from launcher.cpuset import CpuSet
from launcher.topology.render import to_json, to_text


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
