"""The unit of a fleet's ingress in a virtual host with systemd; guest/ingress.py records the facts."""

from __future__ import annotations

from typing import Any

import pytest

Facts = dict[str, Any]
pytestmark = pytest.mark.release


def test_it_is_off_by_default(ingress: Facts) -> None:
    assert ingress["enabled"]["out"].strip() == "disabled"


def test_it_serves_through_haproxy(ingress: Facts) -> None:
    assert ingress["start-ingress"]["status"] == ingress["start"]["status"] == 0
    assert ingress["hosts"]
    assert ingress["answer"]["whole"], ingress["answer"]


def test_a_restart_leaves_haproxy_and_its_streams(ingress: Facts) -> None:
    assert ingress["restart"]["status"] == 0, ingress["restart"]
    now = ingress["restarted"]
    before, after = now["haproxy"]
    assert before == after
    assert len(before) >= 1
    old, new = now["ingress"]
    assert old != new
    assert now["stream"]["whole"], now["stream"]
    assert ingress["found-again"]


def test_a_stop_ends_haproxy_after_its_last_stream(ingress: Facts) -> None:
    assert ingress["stop"]["status"] == 0, ingress["stop"]
    assert ingress["refused"]
    assert ingress["stopped"]["haproxy"]  # while the stream was open
    assert ingress["stopped"]["stream"]["whole"], ingress["stopped"]
    assert ingress["ended"]
    assert ingress["again"]["status"] == 0
    assert ingress["serves-again"]


def test_it_is_hardened_and_that_breaks_nothing(ingress: Facts) -> None:
    assert "OK" in ingress["security"][0] or "SAFE" in ingress["security"][0], ingress["security"]
    journal = "\n".join(ingress["journal"])
    assert "HAProxy started" in journal
    assert "Traceback" not in journal
    assert "denied" not in journal.lower()
    assert "not permitted" not in journal


def test_a_wrong_configuration_is_named_and_not_tried_again(ingress: Facts) -> None:
    assert ingress["wrong"]["failed"]
    assert "cannot use /etc/numa-launcher/fleet.toml" in ingress["wrong"]["journal"]
