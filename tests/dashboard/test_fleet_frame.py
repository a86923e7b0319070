"""What `GET /api/fleet` answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from browser.planted_fleet import planted

from launcher.base.errors import LauncherError
from launcher.dashboard.fleet import FleetAt, FleetSeen, fleet_frame, status_of

AT = FleetAt(status="/s/ingress.sock", endpoints=("http://a:8000",), dashboard="https://{host}.example.com/")


def shown(status: dict[str, Any], fleet: FleetAt = AT) -> dict[str, Any]:
    return fleet_frame(FleetSeen(at=100.0, status=status_of(json.dumps(status).encode())), fleet, 101.5)


def test_two_hundred_hosts() -> None:
    found = shown(planted(200))
    assert (found["answers"], found["age_s"], len(found["hosts"])) == (True, 1.5, 200)
    assert found["verdict"]["line"].startswith(
        "DEGRADED 194/200 hosts serving; host10, host107 down; host8, host91, host174 slow; "
        "host6, host67, host128 and 1 more draining; 1578/1584 instances ready; "
    )
    assert [problem["host"] for problem in found["verdict"]["problems"]] == [
        "host8", "host10", "host91", "host107", "host174",
    ]  # fmt: skip
    by_name = {host["name"]: host for host in found["hosts"]}
    assert by_name["host1"] == {
        "name": "host1", "state": "ready", "address": "10.0.0.1:8001", "ready": 8, "instances": 8, "running": 40,
        "waiting": 0, "predicted_ttft_s": 0.21, "kv_usage": 0.35, "share": pytest.approx(0.004, abs=0.001), "slow": "",
        "link": "https://host1.example.com/",
    }  # fmt: skip
    down = by_name["host10"]
    assert (down["state"], down["ready"], down["running"], down["kv_usage"]) == ("down", None, None, None)
    assert (by_name["host6"]["state"], by_name["host8"]["slow"]) == ("draining", "slot 1, 3")
    assert sum(host["share"] or 0 for host in found["hosts"]) == pytest.approx(1, abs=0.02)


def test_a_host_that_the_ingress_has_not_asked_yet_is_down() -> None:
    status = planted(2)
    del status["hosts"]["host2"]
    assert [host["state"] for host in shown(status)["hosts"]] == ["ready", "down"]


def test_stragglers_are_those_of_the_picker_that_decides() -> None:
    status = planted(8)
    assert shown(status)["hosts"][7]["slow"] == "slot 1, 3"
    found = shown(status | {"decides": False})
    assert {host["slow"] for host in found["hosts"]} == {""}
    assert found["ingress"] == {"decides": False, "asked": 812_347, "held": 3, "members": "1795440000.12"}


def test_a_host_whose_first_tokens_come_late_is_slow() -> None:
    status = planted(3)
    status["hosts"]["host2"]["predicted_ttft_s"] = 9.0
    found = shown(status)
    assert [host["slow"] for host in found["hosts"]] == ["", "late", ""]
    assert found["verdict"]["line"].startswith("OK 3/3 hosts serving, 1 warning; host2 slow; ")


def test_an_haproxy_that_does_not_answer() -> None:
    found = shown(planted(2) | {"servers": None})
    assert found["verdict"]["line"].startswith("DEGRADED 2/2 hosts serving; HAProxy of this host does not")


def test_an_ingress_of_before_and_a_fleet_without_hosts() -> None:
    """Without shares; hosts that have not answered yet have no figures."""
    status = planted(1)
    del status["shares"]
    status["hosts"]["host1"] = {"draining": False, "lost": True, "sent": 0, "stragglers": []}
    assert (shown(status)["hosts"][0]["share"], shown(status)["verdict"]["level"]) == (None, "bad")
    assert shown(planted(0))["verdict"]["line"].startswith("DOWN 0/0 hosts serving")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"{}", b"\xff", b'{"members": 1}', b"[" * 100_000, b'{"hosts": {"a": 1}}']
)
def test_what_is_no_status_is_refused(text: bytes) -> None:
    with pytest.raises(LauncherError, match="cannot read the status of the ingress: ") as caught:
        status_of(text)
    assert "different versions" in caught.value.remedy
    assert len(caught.value.message) < 300


def test_names_of_others_stay_texts_in_links() -> None:
    status = planted(1)
    name = "<img src=x>/../\x1b"
    status["members"]["members"][0]["host"] = name
    status["hosts"] = {name: status["hosts"]["host1"]}
    host = shown(status)["hosts"][0]
    assert (host["name"], host["state"]) == ("<img src=x>/../\\x1b", "ready")
    assert host["link"] == "https://%3Cimg%20src%3Dx%3E%2F..%2F%5Cx1b.example.com/"
