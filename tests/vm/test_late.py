"""A mount and an address that come late, under the shipped units in a virtual host; guest/late.py records the facts."""

from __future__ import annotations

from typing import Any

import pytest

Facts = dict[str, Any]
pytestmark = pytest.mark.release


def test_a_model_that_is_not_mounted_yet_is_waited_for(late: Facts) -> None:
    said, state, text = late["before the mount"]
    assert said, late
    assert state == "activating"
    assert text.startswith("cannot read model '/srv/share/model': no such directory; waiting for it")
    meanwhile = late["asked meanwhile"]
    assert meanwhile["status"] == 3, meanwhile
    assert "the daemon waits: cannot read model '/srv/share/model': no such directory" in meanwhile["error"]
    assert late["after the mount"], "the service sees a mount that came after its start"
    assert late["restarts"] == "0"


def test_an_address_that_comes_later_is_served_and_no_other(late: Facts) -> None:
    assert late["socket"] in {"active", "running"}
    for name in ("link add", "address add", "link set"):
        assert late[name]["status"] == 0, late[name]
    before, elsewhere, listening = late["before the address"]
    assert "Network is unreachable" in before["error"], before
    assert "Connection refused" in elsewhere["error"], elsewhere
    assert listening == ["10.86.0.7:8000"]
    assert late["absent"] == ["http://10.86.0.7:8000"]
    after, elsewhere, listening = late["after the address"]
    assert after["out"] == "200\n", after
    assert "Connection refused" in elsewhere["error"], elsewhere
    assert listening == ["10.86.0.7:8000"]
    assert late["absent no more"] == []


def test_a_mount_that_is_away_for_a_while_fails_no_slot_for_good(late: Facts) -> None:
    without = late["without the mount"]
    assert without, "the slot says what it lacks"
    assert "no such directory" in without["last_cause"]["message"]
    assert without["state"] in {"backoff", "starting"}
    assert late["again"]
    assert late["stop"]["status"] == 0, late["stop"]
