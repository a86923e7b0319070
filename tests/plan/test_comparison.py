"""The strategies side by side: figures that a person can count on the machine's picture."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import compare
from support.synthetic import Machine

from launcher.base.text import GIB
from launcher.config.schema import Config, Layout, Model, Strategy
from launcher.machine.named import find_topology
from launcher.machine.topology import Topology
from launcher.models.profile import ModelProfile
from launcher.plan.comparison import Column, notes, rows, to_json

PROFILE = ModelProfile(
    weights_bytes=2 * GIB,
    kv_bytes_per_token=32 * 1024,
    max_model_len=4096,
    num_attention_heads=32,
    num_kv_heads=8,
)


def columns(topology: Topology, *, cpus_only: bool = False, **layout: object) -> dict[str, Column]:
    config = Config(models=(Model(name="m", path="/m"),), layout=Layout(**layout))  # type: ignore[arg-type]
    profiles = {} if cpus_only else {"m": PROFILE}
    return {
        column.plan.strategy.value: column
        for column in compare(topology, config, profiles, cpus_only=cpus_only)
    }


def table(found: dict[str, Column]) -> dict[str, list[str]]:
    return {row[0]: row[1:] for row in rows(list(found.values()))}


def test_two_instances_on_a_socket_of_an_epyc() -> None:
    found = columns(find_topology("epyc-9755-1p"), instances_per_socket=2, reserve_cores=0)
    assert list(found) == [strategy.value for strategy in Strategy]
    shown = table(found)
    assert shown["instances"] == ["2", "2", "2", "refused: per-node-count"]
    assert shown["cores each"] == ["64", "64", "64", "128"]
    assert shown["L3 caches per instance"] == ["16", "8", "8", "16"]
    assert shown["cores per instance in an L3"] == ["4", "8", "8", "8"]
    assert shown["instances sharing an L3"] == ["2, by up to 2", "none", "none", "none"]
    assert shown["memory channels each"] == ["12, shared by 2"] * 3 + ["12"]
    assert shown["KV cache each"][0] == shown["KV cache each"][2] != "-"
    assert shown["free memory on the fullest node"][0].endswith("GiB")


def test_uneven_division_is_said() -> None:
    shown = table(columns(Machine(l3=16, cores=8).topology(), instances_per_socket=3, reserve_cores=0))
    assert shown["cores each"][:3] == ["43-43-42", "43-43-42", "48-40-40"]
    assert shown["cores per instance in an L3"][:3] == ["2 to 3", "2 to 8", "8"]
    many = table(columns(Machine(sockets=3, cores=8).topology(), instances_per_socket=3, reserve_cores=0))
    assert many["cores each"][0] == "2 to 3"


def test_channels_are_those_of_the_first_cpus_node() -> None:
    nps4 = find_topology("epyc-9654-2p-nps4")
    spanning = columns(nps4, instances_per_socket=1, span_nodes=True, reserve_cores=0)
    assert table(spanning)["memory channels each"] == ["3", "3", "3", "3"]
    assert [reach.nodes for reach in spanning["contiguous"].reaches] == [(0,), (4,)]
    plain = Machine(sockets=2, nodes=4, cores=4).topology()
    assert table(columns(plain, reserve_cores=0))["memory channels each"] == ["1 of 8 nodes'"] * 4


def test_without_l3_cores_or_a_model() -> None:
    shown = table(columns(Machine(cores=8, has_l3=False).topology(), cpus_only=True))
    assert shown["instances"] == ["1", "1", "refused: cannot-cut", "1"]
    for question in ("L3 caches per instance", "cores per instance in an L3", "instances sharing an L3"):
        assert shown[question] == ["-"] * 4
    assert shown["cores each"][2] == shown["memory channels each"][2] == "-"
    assert shown["KV cache each"] == shown["free memory on the fullest node"] == ["-"] * 4


def test_kv_of_nodes_that_differ() -> None:
    machine = Machine(nodes=2, cores=4, memory_only=1, memoryless=frozenset({1}), node_bytes=16 * GIB)
    shown = table(columns(machine.topology(), reserve_cores=0))
    assert " to " in shown["KV cache each"][0] or shown["KV cache each"][0] != "-"


def test_notes_say_each_thing_once() -> None:
    found = list(columns(find_topology("epyc-9755-1p"), cpus_only=True, instances_per_socket=3).values())
    said = notes(found)
    assert sum(note.startswith("all: warning: no model given") for note in said) == 1
    assert any(note.startswith("per-node: cannot place 3 instances") for note in said)
    assert len(said) == len(set(said))


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        Machine,
        sockets=st.integers(1, 2),
        nodes=st.integers(1, 3),
        l3=st.integers(1, 3),
        cores=st.integers(1, 6),
        smt=st.integers(1, 2),
        has_l3=st.booleans(),
    ),
    st.just("auto") | st.integers(1, 6),
    st.booleans(),
)
def test_figures_add_up(machine: Machine, count: int | str, use_smt: bool) -> None:
    topology = machine.topology()
    found = columns(topology, instances_per_socket=count, use_smt=use_smt, span_nodes=True)
    shown = to_json(list(found.values()))
    assert json.loads(json.dumps(shown)) == shown
    for entry, column in zip(shown["strategies"], found.values(), strict=True):
        assert entry["instances"] == len(entry["cores"]) == len(column.plan.slots)
        for cores, per_l3, touched in zip(
            entry["cores"], entry["cores_per_l3"], entry["l3_touched"], strict=True
        ):
            assert len(per_l3) == touched
            assert not machine.has_l3 or sum(per_l3) == cores
        assert entry["instances_sharing_an_l3"] <= entry["instances"]
        assert (entry["most_instances_on_one_l3"] > 1) == (entry["instances_sharing_an_l3"] > 0)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_l3_aligned_shares_no_l3(count: int) -> None:
    found = columns(find_topology("epyc-9654-1p"), instances_per_socket=count)["l3-aligned"]
    assert found.sharing == 0
