"""The dashboard's unit in a virtual host with systemd; guest/dashboard.py records the facts."""

from __future__ import annotations

from typing import Any

import pytest

Facts = dict[str, Any]
pytestmark = pytest.mark.release
PAGE = "numa-launcher-dashboard"


def test_it_is_off_by_default(dashboard: Facts) -> None:
    assert dashboard["enabled"]["out"].strip() == "disabled"


def test_before_the_daemon_it_says_so(dashboard: Facts) -> None:
    assert dashboard["start-page"]["status"] == 0, dashboard["start-page"]
    before = dashboard["before"]
    assert (before["answers"], before["verdict"]["level"]) == (False, "unknown")


def test_its_own_user_reads_the_daemon(dashboard: Facts) -> None:
    assert dashboard["now"]["answers"], dashboard["now"]["trouble"]
    assert dashboard["now"]["status"]["ready"] >= 1
    assert dashboard["process"] == [PAGE, PAGE, "10"]


def test_it_may_change_nothing(dashboard: Facts) -> None:
    assert dashboard["change"]["status"] == 2
    assert "may only read" in dashboard["change"]["error"]


def test_the_page_is_for_its_group(dashboard: Facts) -> None:
    assert dashboard["socket"] == [PAGE, PAGE, 0o660, 0o750]
    assert dashboard["member"]["out"] == "200\n", dashboard["member"]
    assert "PermissionError" in dashboard["stranger"]["error"]


def test_it_is_hardened(dashboard: Facts) -> None:
    assert "SAFE" in dashboard["security"][0], dashboard["security"]


def test_stop_leaves_nothing(dashboard: Facts) -> None:
    assert dashboard["stop"]["status"] == 0
    exists, journal = dashboard["left"]
    assert not exists
    assert "Traceback" not in journal
