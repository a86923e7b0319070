"""A launch as a transient unit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.cpuset import CpuSet
from launcher.instances.unit import SANDBOX, Frame, as_user, bit_mask, properties, secrets_text
from launcher.plan.plan import Placement

PLACE = Placement(
    socket=0, node=1, cpus=CpuSet.parse("4-7"), membind=CpuSet.parse("1"), omp_cpus=(CpuSet.parse("4-7"),)
)


def of(frame: Frame, **more: object) -> dict[str, object]:
    found = properties(
        frame, 3, 2, command="/usr/bin/numactl", argv=("numactl", "$x"), env={"A": "b c"},
        secrets_file="/run/s.env", placement=PLACE,
    )  # fmt: skip
    return {name: value for name, _, value in found}


def test_names() -> None:
    frame = Frame(daemon_unit="nl-b.service")
    assert frame.unit(12) == "nl-b-slot12.service"
    assert frame.slot_of("nl-b-slot12.service") == 12
    for other in ("nl-b-slotx.service", "nl-b-slot01.service", "nl-slot1.service", "nl-b.service"):
        assert frame.slot_of(other) is None
    assert frame.sockets == ("nl-b.socket", "nl-b-control.socket")


def test_a_user_of_its_own_has_a_sandbox() -> None:
    caged = of(Frame(user="numa-launcher"))
    assert (caged["User"], caged["Group"], caged["CapabilityBoundingSet"]) == (
        "numa-launcher",
        "numa-launcher",
        0,
    )
    assert caged["NoNewPrivileges"] is True
    assert not {"User", "NoNewPrivileges", "PrivateTmp"} & of(Frame()).keys()


def test_its_scratch_folder_is_emptied_by_that_user_and_not_by_us() -> None:
    found = properties(
        Frame(user="numa-launcher"), 0, 1, command="/x", argv=("x",), env={}, secrets_file=None, scratch="/run/a b"
    )  # fmt: skip
    (before,) = [value for name, _, value in found if name == "ExecStartPre"]
    assert before == [
        ["/bin/rm", ["rm", "-rf", "--", "/run/a b"], True],
        ["/bin/mkdir", ["mkdir", "-p", "-m", "0770", "--", "/run/a b"], True],
    ]


def test_no_key_that_systemd_does_not_read_back() -> None:
    """systemd 252 writes ExecStartEx= into a transient unit's file, and drops it at the next daemon-reload."""
    found = properties(
        Frame(user="nl"), 0, 1, command="/x", argv=("x",), env={}, secrets_file=None, scratch="/run/s"
    )  # fmt: skip
    assert [name for name, _, _ in found if name.endswith("Ex")] == []


def test_what_is_done_for_the_instances_is_done_in_their_sandbox() -> None:
    words = as_user(Frame(user="nl", slice="nl.slice"))
    assert words[0] == "systemd-run"
    assert words[-1] == "--"
    assert {"--uid=nl", "--gid=nl", "--slice=nl.slice", "--wait", "--pipe", "--property=NoNewPrivileges=yes",
            "--property=CapabilityBoundingSet=", "--property=ProtectSystem=full"} <= {*words}  # fmt: skip
    assert len([word for word in words if word.startswith("--property=")]) == len(SANDBOX) + 2
    of_root = as_user(Frame())
    assert of_root[0] == "systemd-run"
    assert not [word for word in of_root if "id=" in word or "NoNewPrivileges" in word]


def test_limits_are_set_where_they_are_asked_for() -> None:
    assert not {"MemoryMax", "AllowedCPUs", "AllowedMemoryNodes"} & of(Frame()).keys()
    limited = of(Frame(allowed_cpus=True, memory_max_bytes=1 << 30))
    assert (limited["MemoryMax"], limited["AllowedCPUs"], limited["AllowedMemoryNodes"]) == (
        1 << 30,
        b"\xf0\x00",
        b"\x02",
    )


def test_the_command_is_taken_literally() -> None:
    """Also by a systemd that has read its unit's file again: no "$" and no ";" stands there."""
    ((path, argv, _),) = of(Frame())["ExecStart"]
    assert not [word for word in (path, *argv) if "$" in word or ";" in word]
    assert Path(path).resolve() == Path(sys.executable).resolve()
    assert of(Frame())["Environment"] == ["A=b c"]
    assert of(Frame())["EnvironmentFiles"] == [["/run/s.env", False]]


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20), max_size=5))
@settings(max_examples=20)
def test_any_arguments_are_executed_unchanged(words: list[str]) -> None:
    argv = (sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *words)
    found = properties(Frame(), 0, 1, command=sys.executable, argv=argv, env={}, secrets_file=None)
    ((path, told, _),) = next(value for name, _, value in found if name == "ExecStart")
    done = subprocess.run(told, executable=path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{words!a}\n"


@given(st.frozensets(st.integers(0, 1023), min_size=1))
def test_bit_masks(cpus: frozenset[int]) -> None:
    mask = bit_mask(CpuSet(cpus))
    assert {byte * 8 + bit for byte, value in enumerate(mask) for bit in range(8) if value >> bit & 1} == cpus


def test_secrets_are_quoted() -> None:
    assert secrets_text({"T": 'a"b\\c$d`e f'}) == b'T="a\\"b\\\\c\\$d\\`e f"\n'
