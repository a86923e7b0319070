"""Compile caches under the shipped unit, in a virtual host with systemd; guest/caches.py records the facts."""

from __future__ import annotations

import json
from typing import Any

import pytest

Facts = dict[str, Any]
USER = "numa-launcher"


def said(caches: Facts, *, unit: str = "numa-launcher.service") -> list[str]:
    return [message for of, message in caches["journal"] if of == unit]


def kernels(tree: Facts, slot: int) -> dict[str, str]:
    """Names and contents."""
    return {
        name.rpartition("/")[2]: facts[2]
        for name, facts in tree.items()
        if f"/slot{slot}/inductor/" in name and name.endswith(".so")
    }


def stamps(tree: Facts) -> list[str]:
    return sorted(name.split("/")[1] for name in tree if name.endswith("/stamp.json"))


def test_it_is_the_shipped_unit(caches: Facts) -> None:
    assert caches["ready"]
    assert "RestrictSUIDSGID=yes" in caches["unit"]
    assert "CapabilityBoundingSet=cap_chown cap_sys_ptrace" in caches["unit"]


def test_the_usage_ledger_is_root_s_alone(caches: Facts) -> None:
    """The unit may write it; the instances, which run the model's code, may not even read it."""
    ledger = caches["ledger"]
    assert ledger["owners"] == ["root", "root"]
    assert ledger["modes"] == [0o640, 0o750]
    assert ledger["instances"]["status"] != 0
    assert ledger["instances"]["error"].count("Permission denied") == 2
    assert not [line for line in said(caches) if "usage ledger" in line or "keep the history" in line]


def test_each_slot_has_a_stamped_cache_of_what_was_compiled_together(caches: Facts) -> None:
    first = caches["first"]
    assert stamps(first) == ["slot0", "slot1"]
    assert len(kernels(first, 0)) == 3
    assert kernels(first, 0) == kernels(first, 1)
    assert not [name for name in first if "/workshop-" in name], "nobody compiles any more"


def test_a_second_slot_starts_from_a_copy(caches: Facts) -> None:
    assert caches["emptied"]["status"] == 0, caches["emptied"]
    assert caches["restart-1"]["ready"], caches["restart-1"]
    assert "slot 1: compile cache copied from slot0" in said(caches)
    assert kernels(caches["second"], 1) == kernels(caches["first"], 0)
    assert stamps(caches["second"]) == ["slot0", "slot1"]
    counts = [
        line for line in said(caches, unit="numa-launcher-slot1.service") if line.startswith("stand-in: ")
    ]
    assert counts[-1] == "stand-in: 0 kernels compiled"


@pytest.mark.parametrize("when", ["first", "second"])
def test_caches_belong_to_the_instances_user(caches: Facts, when: str) -> None:
    """No folder or file is accessible to others."""
    inside = {name: facts for name, facts in caches[when].items() if "/" in name}
    assert {facts[0] for facts in inside.values()} == {USER}
    assert [name for name, facts in inside.items() if facts[2] is None and facts[1] & 0o007] == []


def test_root_follows_no_planted_link(caches: Facts) -> None:
    assert caches["planted"]["status"] == 0, caches["planted"]
    assert caches["restart-0"]["ready"], "the slot starts all the same"
    assert caches["roots"] == {
        "group": 0, "mode": 0o700, "state": "root's state", "names": ["secret", "state"], "found": "",
    }  # fmt: skip
    assert any(line.startswith("slot 0: cannot stamp its compile cache") for line in said(caches))


def test_scratch_folders_belong_to_the_instances_user(caches: Facts) -> None:
    """They are emptied at each start; otherwise the stand-in engine would not start twice."""
    assert not [line for line in said(caches, unit="numa-launcher-slot0.service") if "left-behind" in line]


def test_stamps_name_the_compiled_configuration(caches: Facts) -> None:
    found = {
        json.loads(bytes.fromhex(facts[2]))["kind"]
        for name, facts in caches["first"].items()
        if name.endswith("/stamp.json")
    }
    assert len(found) == 1
