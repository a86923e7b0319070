"""Where the ingress is asked."""

from __future__ import annotations

import pytest

from launcher.fleet.config import FleetConfig, Hosts, Ingress
from launcher.fleet.ingress import endpoints, status_socket


@pytest.mark.parametrize(
    ("group", "control", "where"),
    [
        (None, "/run/numa-launcher/control.sock", "/s/ingress.sock"),
        ("g", "/run/numa-launcher/control.sock", "/run/numa-launcher/ingress.sock"),
        ("g", "/c/x.sock", "/c/ingress.sock"),
    ],
)
def test_where_the_ingress_shows_its_status(group: str | None, control: str, where: str) -> None:
    config = FleetConfig(
        state="/s", ingress=Ingress(hosts=("a",), read_group=group), hosts=Hosts(control=control)
    )
    assert str(status_socket(config)) == where


def test_what_clients_ask() -> None:
    config = FleetConfig(ingress=Ingress(hosts=("a", "fd00::1"), listen="[::]:80", tls_cert="/c.pem"))
    assert endpoints(config) == ("https://a:80", "https://[fd00::1]:80")
