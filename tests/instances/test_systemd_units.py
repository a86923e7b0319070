"""What systemd says of a unit, read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from launcher.base.address import UnixAddress
from launcher.engines.base import MARK, Launch
from launcher.instances.diagnosis import UNIT_OOM
from launcher.instances.ports import Exit
from launcher.instances.state_file import Record, digest
from launcher.instances.systemd_bus import UnitFacts, unit_path
from launcher.instances.systemd_units import diagnosis_lines, exit_of, fitting
from launcher.instances.unit import mark
from launcher.models.identity import ModelFiles


def launch(generation: int) -> Launch:
    return Launch(("serve",), {"A": "1"}, frozenset(), UnixAddress(f"/run/s-{generation}"))


DIGEST = digest(launch(2))
RECORD = Record(slot=1, generation=2, unit="u", digest=DIGEST, socket="/run/s-2", pid=7, invocation="ab")
FACTS = UnitFacts(
    active="active", has_job=False, main_pid=7, invocation="ab", code=0, status=0, result="success",
    environment=("B=2", f"{MARK}={mark(1, 2, DIGEST)}"), started_s=1.0,
)  # fmt: skip
SLOTS: dict[int, Callable[[int], Launch]] = {1: launch}


@pytest.mark.parametrize(
    ("code", "status", "how"),
    [
        (1, 0, Exit(0, None)),
        (1, 3, Exit(3, None)),
        (1, 203, Exit(127, None)),
        (2, 9, Exit(None, 9)),
        (3, 6, Exit(None, 6)),
    ],
)
def test_how_it_ended(code: int, status: int, how: Exit) -> None:
    assert exit_of(replace(FACTS, code=code, status=status)) == how


def test_what_an_exit_status_does_not_say() -> None:
    assert diagnosis_lines(replace(FACTS, result="signal")) == []
    assert diagnosis_lines(replace(FACTS, result="oom-kill")) == [UNIT_OOM]
    assert diagnosis_lines(replace(FACTS, result="timeout"))[0].endswith("Result=timeout")


def test_over_is_when_nothing_is_left_or_under_way() -> None:
    assert not FACTS.over
    assert not replace(FACTS, active="deactivating").over
    assert not replace(FACTS, active="failed", has_job=True).over
    assert replace(FACTS, active="failed").over


def test_the_same_generation_is_adopted() -> None:
    assert fitting(1, RECORD, FACTS, SLOTS) == launch(2)
    young = replace(RECORD, invocation="", pid=0)  # its daemon was killed before systemd had answered
    assert fitting(1, young, FACTS, SLOTS) == launch(2)


@pytest.mark.parametrize(
    ("slot", "record", "facts", "why"),
    [
        (3, RECORD, FACTS, "no such slot"),
        (1, None, FACTS, "no record"),
        (1, RECORD, replace(FACTS, active="deactivating"), "it is deactivating"),
        (1, RECORD, replace(FACTS, has_job=True), "it is active"),
        (1, RECORD, replace(FACTS, main_pid=0), "it is active"),
        (1, RECORD, replace(FACTS, environment=()), "not the generation"),
        (1, RECORD, replace(FACTS, invocation="cd"), "not the generation"),
        (1, replace(RECORD, generation=3), FACTS, "not the generation"),
    ],
)
def test_what_does_not_fit_is_named(slot: int, record: Record | None, facts: UnitFacts, why: str) -> None:
    found = fitting(slot, record, facts, SLOTS)
    assert isinstance(found, str)
    assert why in found


def test_another_plan_is_not_adopted() -> None:
    def other(generation: int) -> Launch:
        return replace(launch(generation), argv=("serve", "--more"))

    assert fitting(1, RECORD, FACTS, {1: other}) == "the plan would start it differently now"


def test_other_files_of_the_model_are_not_adopted() -> None:
    """The path is the same: a link has moved, or the files were replaced."""
    files = ModelFiles("/models/v2", "d2")
    slots = {1: lambda generation: replace(launch(generation), files=files)}
    record = replace(RECORD, model="d1 /models/v1")
    assert fitting(1, record, FACTS, slots) == "its model's files are others now: /models/v2 (d2)"
    same = fitting(1, replace(RECORD, model=files.to_text()), FACTS, slots)
    assert isinstance(same, Launch)
    assert same.files == files
    unknown = fitting(1, RECORD, FACTS, slots)
    assert isinstance(unknown, Launch), "a record of a release before"
    assert unknown.files is None


def test_object_paths_are_escaped_as_systemd_does() -> None:
    path = unit_path("numa-launcher-slot10.service")
    assert path == "/org/freedesktop/systemd1/unit/numa_2dlauncher_2dslot10_2eservice"
    assert unit_path("1a.slice").endswith("/_31a_2eslice")
