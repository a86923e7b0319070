"""fleet.toml: what is the same on every host of a fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from launcher.base.errors import LauncherError
from launcher.config.explain import explain
from launcher.config.loading import read_tree

DEFAULT_CONFIG: Final = Path("/etc/numa-launcher/fleet.toml")
AUTO: Final = "auto"
DEFAULT_STATE: Final = "/var/lib/numa-launcher/fleet"

Address = Annotated[str, msgspec.Meta(pattern=r"^[\w.:-]+$", examples=["10.0.0.1"])]
Listen = Annotated[str, msgspec.Meta(pattern=r"^\S*:\d{1,5}$", examples=["0.0.0.0:8000"])]
Port = Annotated[int, msgspec.Meta(ge=1, le=65533)]
Command = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
"""Program and arguments: no shell reads them."""


class Ingress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hosts that take requests of clients, and how."""

    hosts: Annotated[
        tuple[Address, ...], msgspec.Meta(min_length=1, max_length=2, examples=[["10.0.0.1", "10.0.0.2"]])
    ]
    """Addresses of the ingress hosts for one another. The first one's picker decides, the other's stands by."""
    listen: Listen = "0.0.0.0:8000"
    picker_port: Port = 8010
    """TCP port of the pickers; the next one (UDP) takes the ends of requests, the one after it serves HAProxy's figures on
    the loopback. For the ingress hosts only."""
    tls_cert: str | None = None
    """PEM file with certificate and key for clients."""
    picker_cert: str | None = None
    """PEM file with certificate and key of the ingress hosts, by `[hosts] ca`. The pickers, which see keys and prompts,
    are then asked over TLS."""
    read_group: str | None = None
    """System group whose members may read the status of this host's ingress, as the dashboard does; None: its own user
    and root."""
    start: Command = ("systemctl", "start", "numa-launcher-ingress")
    """What `fleet up` runs on an ingress host that does not answer."""


class Hosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The daemons behind the ingress."""

    most: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200
    """Hosts that there may ever be: HAProxy gets a server for each when it starts."""
    control: str = "/run/numa-launcher/control.sock"
    """The daemon's control socket on each host."""
    keys: str = "/etc/numa-launcher/api-keys"
    """The API keys file on each host: [proxy] api_keys_file of its daemon."""
    start: Command = ("systemctl", "start", "numa-launcher")
    """What `fleet up` runs on a host whose daemon does not answer."""
    upgrade: Command = ("systemctl", "restart", "numa-launcher")
    """What `fleet upgrade` runs on a host."""
    ca: str | None = None
    """PEM file with the authority that signed the daemons' certificates; None: the daemons speak plain HTTP."""
    dashboard: Annotated[str, msgspec.Meta(pattern="^https?://")] | None = None
    """Address of each host's own dashboard behind its web server, `{host}` for the host's name; None: no links to it."""


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole of fleet.toml."""

    name: str = "fleet"
    ray: str = AUTO
    """Address of Ray's head, host:port; `auto`: of the head that this host's node has joined."""
    state: str = DEFAULT_STATE
    """Folder on each host for the member list and HAProxy's files."""
    ingress: Ingress
    hosts: Hosts = Hosts()


def load_fleet(path: Path) -> FleetConfig:
    """Raises LauncherError."""
    tree = read_tree(path)
    try:
        config = msgspec.convert(tree, FleetConfig, strict=True)
    except msgspec.ValidationError as error:
        raise explain(str(error), tree, str(path), {}, FleetConfig) from None
    if config.ingress.picker_cert and not config.hosts.ca:
        raise LauncherError(
            f"cannot use {path}: ingress.picker_cert is there and hosts.ca is not",
            "set hosts.ca to the authority that signed picker_cert and the daemons' certificates",
        )
    return config
