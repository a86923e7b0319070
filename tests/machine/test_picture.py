"""Pictures show every cpu once, can be read without colour, and are sound SVG."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.colours import contrast
from support.examples import examples
from support.synthetic import Machine

from launcher.base.cpuset import CpuSet
from launcher.machine.named import find_topology, parse_machine
from launcher.machine.picture import (
    MARKS,
    PALETTE,
    SIGNS,
    DrawnSlot,
    Mark,
    Picture,
    colour,
    draw,
    ink,
    make_picture,
    sign,
)
from launcher.machine.svg import MAX_ROW, shorten, to_svg
from launcher.machine.topology import CpuInfo, Topology

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
SVG = "{http://www.w3.org/2000/svg}"


def slots(topology: Topology, count: int, stop: int | None = None) -> list[DrawnSlot]:
    """Interleaved over the first cpus of the cores up to `stop`."""
    firsts = [core.cpus.first for core in topology.cores][:stop]
    return [DrawnSlot(f"slot {k}", CpuSet(firsts[k::count]), (f"node {k}",)) for k in range(count)]


def epyc(count: int = 2) -> Picture:
    topology = find_topology("epyc-9755-2p")
    return make_picture(topology, slots(topology, count, stop=254), CpuSet((254, 255, 510, 511)))


EXPECTED = """\
AMD EPYC 9755 128-Core Processor
2 sockets · 2 NUMA nodes · 32 L3 caches · 256 cores · 512 cpus (2 per core)

socket 0
  node 0 · 768 GiB · 12 channels · cpus 0-127,256-383 · 16 × L3 32 MiB
    0        8        16       24       32       40       48       56
    01010101 01010101 01010101 01010101 01010101 01010101 01010101 01010101
    ········ ········ ········ ········ ········ ········ ········ ········
    64       72       80       88       96       104      112      120
    01010101 01010101 01010101 01010101 01010101 01010101 01010101 01010101
    ········ ········ ········ ········ ········ ········ ········ ········
socket 1
  node 1 · 768 GiB · 12 channels · cpus 128-255,384-511 · 16 × L3 32 MiB
    128      136      144      152      160      168      176      184
    01010101 01010101 01010101 01010101 01010101 01010101 01010101 01010101
    ········ ········ ········ ········ ········ ········ ········ ········
    192      200      208      216      224      232      240      248
    01010101 01010101 01010101 01010101 01010101 01010101 01010101 010101==
    ········ ········ ········ ········ ········ ········ ········ ······==

01 instances   = reserved for proxy and OS   · idle SMT sibling"""


@pytest.mark.parametrize("width", [80, 100, 120])
def test_two_sockets_of_128_cores(width: int) -> None:
    assert draw(epyc(), width=width) == EXPECTED


def test_colours_change_nothing_but_colours() -> None:
    shown = draw(epyc(), width=80, color=True)
    assert "\x1b[48;5;32;38;5;16m0\x1b[0m" in shown
    assert ESCAPE.sub("", shown) == EXPECTED


def test_other_marks() -> None:
    machine = Machine(cores=4, smt=2, allowed=CpuSet.parse("0-2,4-6"), offline=frozenset({7}), memory_only=1)
    topology = machine.topology()
    shown = draw(make_picture(topology, [DrawnSlot("slot 0", CpuSet((0,)))]))
    assert "\n    0--/\n    ·--\n" in shown
    assert "memory without cpus\n  node 1 · 64 GiB · no cpus" in shown
    assert shown.endswith("0 instance   - not used   · idle SMT sibling   / not allowed to this process")


def test_without_a_plan_only_the_odd_is_explained() -> None:
    assert draw(make_picture(Machine(cores=2).topology())).endswith("    --\n")
    denied = Machine(cores=2, allowed=CpuSet((0,))).topology()
    assert draw(make_picture(denied)).endswith("/ not allowed to this process")


def test_a_socket_without_l3_or_with_one_l3_is_broken_into_lines() -> None:
    shown = draw(make_picture(parse_machine("socket:1 node:1 core:96").topology()), width=40)
    assert shown.count("-" * 32) == 3
    assert "L3 cache" in shown
    assert "0 L3 caches" in shown


def test_cores_in_no_node_and_nodes_of_unknown_memory() -> None:
    topology = Machine(cores=2, l3=2).topology()
    lost = replace(
        topology,
        cores=(*topology.cores[:3], replace(topology.cores[3], node=None)),
        numa_nodes=(replace(topology.numa_nodes[0], memory_known=False),),
        cpu=CpuInfo("", "", None, frozenset()),
    )
    shown = draw(make_picture(lost))
    assert shown.startswith("unknown cpu\n1 socket · 1 NUMA node · 2 L3 caches · 4 cores · 4 cpus\n")
    assert "in no NUMA node · cpus 3" in shown
    assert "node 0 · memory unknown" in shown


def test_l3_sizes() -> None:
    topology = Machine(cores=2, l3=2).topology()
    one, two = topology.l3_domains
    for size, said in ((None, "2 × L3"), (2**20, "2 × L3 1 MiB / 32 MiB")):
        odd = replace(
            topology, l3_domains=(replace(one, size_bytes=size), replace(two, size_bytes=size and 2**25))
        )
        assert said in draw(make_picture(odd))
    assert "part of L3 480 MiB" in draw(make_picture(find_topology("xeon-6972p-2p-snc3")))
    assert "· L3 32 MiB" in draw(make_picture(Machine(cores=2).topology()))


def test_signs_are_told_apart() -> None:
    assert len({*SIGNS, *MARKS.values(), "#"}) == len(SIGNS) + len(MARKS) + 1
    assert [sign(0), sign(9), sign(10), sign(61), sign(62)] == ["0", "9", "a", "Z", "#"]
    many = Machine(cores=70).topology()
    assert "YZ#" in draw(make_picture(many, slots(many, 70)))


def test_every_colour_is_read_with_its_ink() -> None:
    """WCAG's contrast of at least 4.5 for text."""
    for i in range(len(PALETTE)):
        assert contrast(colour(i), ink(colour(i))) >= 4.5
    assert len(set(PALETTE)) == len(PALETTE)
    assert colour(len(PALETTE)) == colour(0)


MACHINES = st.builds(
    Machine,
    sockets=st.integers(1, 3),
    nodes=st.integers(1, 3),
    l3=st.integers(1, 3),
    cores=st.integers(1, 9),
    smt=st.integers(1, 3),
    adjacent=st.booleans(),
    has_l3=st.booleans(),
    memory_only=st.integers(0, 2),
)


@settings(max_examples=examples(60), deadline=None)
@given(MACHINES, st.integers(1, 5), st.integers(40, 120))
def test_every_cpu_is_drawn_once_and_lines_fit(machine: Machine, count: int, width: int) -> None:
    topology = machine.topology()
    picture = make_picture(topology, slots(topology, count))
    body = draw(picture, width=width).split("\n\n")[1]
    rows = [line for line in body.splitlines() if line.startswith("    ")]
    assert max(map(len, rows)) <= width
    assert set(picture.marks) == set(topology.online)
    drawn = Counter(
        sign for row in rows if not row.strip().split()[0].isdigit() or "·" in row for sign in row
    )
    assert drawn["·"] == sum(mark is Mark.IDLE for mark in picture.marks.values())
    tree = ET.fromstring(to_svg(picture))  # noqa: S314 - our own
    assert len(list(tree.iter(f"{SVG}g"))) == len(topology.cores)


def test_svg_is_sound_and_within_its_page() -> None:
    tree = ET.fromstring(to_svg(epyc(16), "a < b"))  # noqa: S314 - our own
    width, height = float(tree.attrib["width"]), float(tree.attrib["height"])
    assert width <= MAX_ROW + 100
    for rect in tree.iter(f"{SVG}rect"):
        if rect.get("x") is not None:
            assert 0 <= float(rect.attrib["x"]) <= width - float(rect.attrib["width"])
            assert 0 <= float(rect.attrib["y"]) <= height - float(rect.attrib["height"])
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert "a < b" in texts
    assert "slot 15" in texts
    assert texts.count("128") == 1
    tips = [tip.text for group in tree.iter(f"{SVG}g") for tip in group.iter(f"{SVG}title")]
    assert tips[0] == "cpu 0,256 · core 0 of die 0, socket 0 · idle SMT sibling · slot 0"
    assert tips[-1].endswith("reserved for proxy and OS")


def test_svg_of_a_bare_machine_and_of_a_hostile_name() -> None:
    topology = Machine(cores=2, allowed=CpuSet((0,)), memory_only=1, sockets=9).topology()
    hostile = replace(topology, cpu=CpuInfo("", "<script>&", None, frozenset()))
    text = to_svg(make_picture(hostile))
    assert "<script" not in text
    tree = ET.fromstring(text)  # noqa: S314 - our own
    assert "not allowed to this process" in [text.text for text in tree.iter(f"{SVG}text")]
    assert "url(#denied)" in text
    assert ET.fromstring(to_svg(make_picture(Machine(cores=2).topology()))) is not None  # noqa: S314


def test_cpulists_in_the_legend() -> None:
    assert shorten(CpuSet.parse("0-63,128-191")) == "0-63,128-191"
    assert shorten(CpuSet(range(0, 128, 2))) == "0,2,4,…,126"
