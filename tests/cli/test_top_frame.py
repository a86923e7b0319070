"""What one frame of `top` has in it, for machines of all sizes and terminals of all sizes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text
from support.fake_operations import CAUSE, FakeOperations, slot_status

from launcher.base.cpuset import CpuSet
from launcher.cli.top_frame import View, compose
from launcher.machine.named import find_topology

EPYC = find_topology("epyc-9755-2p")
RESERVED = CpuSet.parse("126-127,254-255,382-383,510-511")


def status_of(*slots: Any) -> dict[str, Any]:
    operations = FakeOperations(slots={slot.slot: slot for slot in slots})
    found: dict[str, Any] = msgspec.to_builtins(operations.status())
    return found


def interleaved(slot: int, **more: Any) -> Any:
    """Every second core of a socket of 128, as the plan of two instances a socket has it."""
    first = slot // 2 * 128 + slot % 2
    cpus = ",".join(str(cpu) for cpu in range(first, slot // 2 * 128 + 126, 2))
    return slot_status(slot, cpus=cpus, node=slot // 2, socket=slot // 2, **more)


def view(**more: Any) -> View:
    fields: dict[str, Any] = {
        "status": status_of(*(interleaved(n) for n in range(4))), "now": 160.0, "topology": EPYC, "reserved": RESERVED,
    }  # fmt: skip
    return View(**(fields | more))


def plain(lines: list[Text]) -> list[str]:
    return [line.plain.rstrip() for line in lines]


def styles(lines: list[Text], sign: str) -> set[str]:
    """Styles that a sign of the machine's picture has."""
    found = set()
    for line in lines:
        if line.plain.startswith("  ") and set(line.plain) <= set("0123=·- "):
            for span in line.spans:
                if line.plain[span.start] == sign:
                    found.add(str(span.style))
    return found


def test_a_large_machine() -> None:
    lines = plain(compose(view(), 160, 40))
    assert lines[0].startswith("OK 4/4 ready")
    assert lines[9:] == [
        "",
        "socket 0 · node 0 · 768 GiB · 12 channels",
        "  " + "01010101 " * 15 + "010101==",
        "socket 1 · node 1 · 768 GiB · 12 channels",
        "  " + "23232323 " * 15 + "232323==",
        "digit: slot; dim: idle; reversed: busy · = reserved for proxy and OS · · idle SMT sibling",
        "",
        "warning: mind the gap",
    ]


def test_100_columns_break_at_an_l3() -> None:
    lines = plain(compose(view(), 100, 40))
    assert lines[11:13] == ["  " + "01010101 " * 10 + "01010101", "  " + "01010101 " * 4 + "010101=="]


def test_less_room_less_picture() -> None:
    """Titles go first, then the picture; words about what is wrong are there before it."""
    needed = len(compose(view(), 80, 99))
    assert needed == 19
    short = plain(compose(view(), 80, needed - 1))
    assert not any(line.startswith("socket") for line in short)
    assert any(line.startswith("n0 01010101") for line in short)
    assert "(the drawing of the machine needs 1 more lines)" in plain(compose(view(), 80, needed - 3))
    ill = status_of(*(interleaved(n, state="failed", last_cause=CAUSE) for n in range(4)))
    words = plain(compose(view(status=ill), 80, 24))
    assert "slot 0: oom: it died" in words
    assert len(words) <= 24


@pytest.mark.parametrize(
    ("state", "colour"), [("ready", "green"), ("starting", "yellow"), ("failed", "red"), ("held", "")]
)
def test_a_core_has_the_colour_of_its_slots_state(state: str, colour: str) -> None:
    status = status_of(interleaved(0, state=state), *(interleaved(n) for n in range(1, 4)))
    lines = compose(view(status=status), 160, 40)
    assert styles(lines, "0") == ({colour} if colour else set())
    assert styles(lines, "1") == {"green"}
    assert styles(lines, "=") == {"dim"}


def test_a_core_is_stronger_the_more_it_works() -> None:
    busy = dict.fromkeys(range(512), 0.0) | {0: 0.99, 2: 0.5}
    lines = compose(view(busy=busy), 160, 40)
    assert styles(lines, "0") == {"reverse green", "green", "dim green"}


def test_smt_siblings_have_signs_where_a_slot_runs_on_them() -> None:
    status = status_of(slot_status(0, cpus="0-7,256-263"))
    lines = plain(compose(view(status=status, reserved=None), 160, 60))
    assert any(line.startswith("  " + "0" * 16) for line in lines)


def test_the_daemon_does_not_answer() -> None:
    lines = plain(compose(view(trouble="no answer for 3 s: gone; retrying"), 80, 24))
    assert lines[0] == "no answer for 3 s: gone; retrying"
    assert lines[1].startswith("OK 4/4")


def test_without_a_machine() -> None:
    lines = plain(compose(view(topology=None), 80, 24))
    assert not any("socket" in line or "picture" in line for line in lines)


def test_memory_without_cpus_is_a_title_alone() -> None:
    lines = plain(compose(view(topology=find_topology("epyc-9454-2p-cxl")), 160, 60))
    titles = [n for n, line in enumerate(lines) if line.startswith("memory without cpus")]
    assert titles
    assert all(not lines[n + 1].startswith("  ") for n in titles)


@given(
    st.integers(1, 250),
    st.integers(1, 80),
    st.sampled_from(["epyc-9755-2p", "epyc-9755-1p", "xeon-6972p-2p-snc3"]),
)
def test_no_frame_is_larger_than_the_terminal(width: int, height: int, machine: str) -> None:
    lines = compose(view(topology=find_topology(machine)), width, height)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
