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
    assert late["after the mount"], "the service sees a mount that came after its start"
    assert late["restarts"] == "0"


def test_an_address_that_comes_later_is_served(late: Facts) -> None:
    assert late["socket"] in {"active", "running"}
    assert late["before the address"]["status"] != 0
    assert late["add address"]["status"] == 0, late["add address"]
    assert late["after the address"]["out"] == "200\n", late["after the address"]


def test_a_mount_that_is_away_for_a_while_fails_no_slot_for_good(late: Facts) -> None:
    without = late["without the mount"]
    assert without, "the slot says what it lacks"
    assert "no such directory" in without["last_cause"]["message"]
    assert without["state"] in {"backoff", "starting"}
    assert late["again"]
    assert late["stop"]["status"] == 0, late["stop"]
