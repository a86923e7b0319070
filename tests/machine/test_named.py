"""Descriptions: the machines in configs/machines are what their makers say, and bad lines are quoted."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support import synthetic
from support.examples import examples

from launcher.base.cpuset import CpuSet
from launcher.base.errors import LauncherError
from launcher.base.text import GIB, MIB
from launcher.machine import named
from launcher.machine.named import UNNAMED, find_topology, parse_machine
from launcher.machine.topology import Topology
from launcher.machine.topology_text import to_json, to_text

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "machines"

# name: sockets, nodes, L3s, cores, cpus, channels of a node, L3 MiB. Source: the makers' product pages.
FACTS = {
    "epyc-9755-1p": (1, 1, 16, 128, 256, 12, 32),
    "epyc-9755-2p": (2, 2, 32, 256, 512, 12, 32),
    "epyc-9755-2p-smtoff": (2, 2, 32, 256, 256, 12, 32),
    "epyc-9654-1p": (1, 1, 12, 96, 192, 12, 32),
    "epyc-9654-2p": (2, 2, 24, 192, 384, 12, 32),
    "epyc-9654-2p-nps1": (2, 2, 24, 192, 384, 12, 32),
    "epyc-9654-1p-nps2": (1, 2, 12, 96, 192, 6, 32),
    "epyc-9654-2p-nps4": (2, 8, 24, 192, 384, 3, 32),
    "epyc-9654-2p-nps4-smtoff": (2, 8, 24, 192, 192, 3, 32),
    "epyc-9454-1p": (1, 1, 8, 48, 96, 12, 32),
    "epyc-9454-2p": (2, 2, 16, 96, 192, 12, 32),
    "epyc-9454-2p-cxl": (2, 4, 16, 96, 192, 12, 32),
    "epyc-7763-1p": (1, 1, 8, 64, 128, 8, 32),
    "epyc-7763-2p": (2, 2, 16, 128, 256, 8, 32),
    "xeon-6972p-2p-snc3": (2, 6, 2, 192, 384, 4, 480),
    "epyc-vm-24": (1, 1, 3, 24, 24, None, 32),
}


@pytest.mark.parametrize("name", FACTS)
def test_known_machine(name: str) -> None:
    topology = find_topology(name)
    domains = topology.l3_domains
    assert domains[0].size_bytes is not None
    assert FACTS[name] == (
        len(topology.sockets),
        len(topology.numa_nodes),
        len(domains),
        len(topology.cores),
        len(topology.online),
        topology.numa_nodes[0].memory_channels,
        domains[0].size_bytes // MIB,
    )
    assert name.partition("-")[0] in topology.cpu.model.lower()
    hold_together(topology)


def hold_together(topology: Topology) -> None:
    """Every cpu is in one socket, one node and one core, and in at most one L3."""
    for parts in (topology.sockets, topology.numa_nodes, topology.cores):
        cpus = [cpu for part in parts for cpu in part.cpus]
        assert sorted(cpus) == list(topology.online)
    shared = [cpu for domain in topology.l3_domains for cpu in domain.cpus]
    assert not shared or sorted(shared) == list(topology.online)
    for domain in topology.l3_domains:
        homes = {node.id for node in topology.numa_nodes if not node.cpus.isdisjoint(domain.cpus)}
        assert domain.node == (homes.pop() if len(homes) == 1 else None)
    for node in topology.numa_nodes:
        assert node.distances[node.id] == min(node.distances.values()) == 10
        assert {other.distances[node.id] for other in topology.numa_nodes} == set(node.distances.values())


def test_every_known_machine_is_in_the_table_and_in_the_folder() -> None:
    assert set(named.names()) <= set(FACTS)
    assert sorted(file.stem for file in CONFIGS.glob("*.toml")) == named.names()


def test_the_wheel_ships_them() -> None:
    project = (CONFIGS.parents[1] / "pyproject.toml").read_text()
    assert '"machine/machines/*.toml"' in project
    assert named.FOLDER.parent.name == "machine"


def test_servers_number_all_first_threads_before_the_second_ones() -> None:
    topology = find_topology("epyc-9755-2p")
    assert topology.numa_nodes[1].cpus == CpuSet.parse("128-255,384-511")
    assert topology.cores[1].cpus == CpuSet((1, 257))
    assert topology.l3_domains[0].cpus == CpuSet.parse("0-7,256-263")


def test_a_description_is_the_machine_that_the_tests_describe() -> None:
    """Two independent makers of topologies agree."""
    cases = {
        "socket:2 node:4(memory=64GiB) l3:2(size=32MiB) core:3 smt:2": synthetic.Machine(
            sockets=2, nodes=4, l3=2, cores=3, smt=2
        ),
        "socket:1 node:1(memory=64GiB) l3:2(size=32MiB) core:4 smt:2(numbering=adjacent)": synthetic.Machine(
            l3=2, cores=4, smt=2, adjacent=True
        ),
        "socket:2 node:1(memory=64GiB) core:4 cxl:2(memory=64GiB,distance=50)": synthetic.Machine(
            sockets=2, cores=4, memory_only=2, has_l3=False
        ),
    }
    for line, machine in cases.items():
        assert parse_machine(line).topology() == replace(machine.topology(), cpu=UNNAMED)


def test_l3_that_holds_nodes() -> None:
    topology = parse_machine("socket:1 l3:2(size=1MiB) node:2(channels=2,near=11,far=21) core:3").topology()
    assert [domain.cpus.format() for domain in topology.l3_domains] == ["0-5", "6-11"]
    assert [domain.node for domain in topology.l3_domains] == [None, None]
    assert [node.cpus.format() for node in topology.numa_nodes] == ["0-2", "3-5", "6-8", "9-11"]
    assert topology.numa_nodes[0].distances == {0: 10, 1: 11, 2: 11, 3: 11}
    assert "L3 (1 MiB) spans nodes: cpus 0-5" in to_text(topology)
    assert "L3 spans nodes" in to_text(parse_machine("socket:1 l3:1 node:2 core:1").topology())
    assert to_json(topology)["numa_nodes"][0]["memory_channels"] == 2


COUNTS = st.integers(1, 4)


@settings(max_examples=examples(100), deadline=None)
@given(
    COUNTS, COUNTS, COUNTS, COUNTS, st.integers(1, 3), st.sampled_from(["server", "adjacent"]), st.booleans()
)
def test_any_description_holds_together(  # noqa: PLR0917
    sockets: int, nodes: int, l3: int, cores: int, smt: int, numbering: str, outside: bool
) -> None:
    inner = f"l3:{l3} node:{nodes}" if outside else f"node:{nodes} l3:{l3}"
    line = f"socket:{sockets} {inner} core:{cores} smt:{smt}(numbering={numbering})"
    topology = parse_machine(line).topology()
    assert len(topology.cores) == sockets * nodes * l3 * cores
    assert len(topology.l3_domains) == sockets * l3 * (1 if outside else nodes)
    hold_together(topology)


BAD_LINES = {
    "socket:1 node:1": "not in the order",
    "node:1 socket:1 core:1": "not in the order",
    "socket:1 node:1 core:1 core:2": "not in the order",
    "socket:x node:1 core:1": "'socket:x' is not one of",
    "pack:1 node:1 core:1": "'pack:1' is not one of",
    "socket:0 node:1 core:1": "counts none",
    "socket:1(size=1) node:1 core:1": "valid in its brackets: nothing",
    "socket:1 node:1(memory) core:1": "brackets: channels, far, memory, near",
    "socket:1 node:1(memory=much) core:1": "'much' is not a size",
    "socket:1 node:1(channels=0) core:1": "channels=0 is not a number",
    "socket:1 node:1(far=x) core:1": "far=x is not a number",
    "socket:1 node:1 core:1 smt:2(numbering=odd)": "numbering=odd is not server or adjacent",
    "socket:1 node:1 core:65537": "65537 cpus on 1 nodes exceed 65536",
    "socket:1 node:65536 core:1": "65536 nodes",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_description(line: str) -> None:
    with pytest.raises(LauncherError) as caught:
        find_topology(line)
    assert caught.value.message.startswith(f"cannot use machine {line!r}: ")
    assert BAD_LINES[line] in caught.value.message


def test_a_line_and_a_file_of_ones_own(tmp_path: Path) -> None:
    line = "socket:1 node:1(memory=1GiB) core:2"
    file = tmp_path / "own.toml"
    file.write_text(f'layout = "{line}"\n')
    assert find_topology(str(file)) == find_topology(line)
    assert find_topology(line).numa_nodes[0].memory_bytes == GIB
    file.write_text(f'layout = "{line}"\n[cpu]\nvendor = "AuthenticAMD"\nfamily = 26\nflags = "avx512f"\n')
    assert find_topology(str(file)).cpu.is_zen
    assert find_topology(str(file)).cpu.model == UNNAMED.model


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layout = 1", "`layout` is missing or not a text"),
        ('layuot = "x"', "unknown key 'layuot'"),
        (
            'layout = "socket:1 node:1 core:1"\n[cpu]\nmhz = 1',
            "key 'mhz' of [cpu] is unknown or of the wrong type",
        ),
        ('layout = "socket:1 node:1 core:1"\n[cpu]\nfamily = "x"', "key 'family' of [cpu]"),
        ("layout = ", "line 1: invalid value"),
    ],
)
def test_bad_files(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text)
    with pytest.raises(LauncherError) as caught:
        find_topology(str(file))
    assert said in caught.value.message


def test_missing_file_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match="no such file"):
        find_topology(str(tmp_path / "none.toml"))
    with pytest.raises(LauncherError, match="did you mean 'epyc-9755-2p'"):
        find_topology("epyc-9755-2")
    with pytest.raises(LauncherError, match="no such name") as caught:
        find_topology("vax")
    assert "epyc-7763-1p" in caught.value.remedy
    with pytest.raises(LauncherError, match="cannot be split into 4 nodes"):
        find_topology("epyc-vm-24-nps4")
    with pytest.raises(LauncherError, match="cannot be split into 2 nodes"):
        find_topology("xeon-6972p-2p-snc3-nps2")


def test_nodes_can_be_cut_where_channels_are_not_known() -> None:
    machine = parse_machine("socket:1 node:1 l3:4 core:2")
    assert machine.split(2).channels is None
    with pytest.raises(ValueError, match="cannot be split"):
        parse_machine("socket:1 node:1(channels=3) l3:4 core:2").split(2)
