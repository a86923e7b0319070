"""Reads the status of this host's ingress, once for all pages. Nothing of Ray is asked."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final
from urllib.parse import quote

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launcher.base.errors import LauncherError, reason
from launcher.base.text import printable_tree, quoted
from launcher.base.watched_file import FileState
from launcher.control.client import UnreachableError
from launcher.control.verdict import (
    Host,
    IngressState,
    Level,
    Problem,
    Verdict,
    judge_fleet,
    late_hosts,
    no_answer,
    of_ingress,
)
from launcher.dashboard.api import Shared
from launcher.dashboard.poll import POLL_S, Packed, shown_verdict

# --- What `GET /api/fleet` answers, from what the ingress of this host said last. ---


class Member(msgspec.Struct, frozen=True):
    """A host of the member list."""

    host: str
    address: str
    state: str


class Members(msgspec.Struct, frozen=True):
    epoch: int
    version: int
    members: tuple[Member, ...]


class Load(msgspec.Struct, frozen=True):
    """What the ingress knows of a host."""

    lost: bool = True
    """Its daemon does not answer the ingress."""
    ready: int = 0
    instances: int = 0
    running: int = 0
    waiting: int = 0
    predicted_ttft_s: float | None = None
    kv_usage: float | None = None
    stragglers: tuple[int, ...] = ()


class Status(msgspec.Struct, frozen=True):
    """The object that the ingress writes to who connects to its socket (launcher/fleet/ingress.py)."""

    members: Members
    hosts: dict[str, Load]
    servers: dict[str, Any] | None
    """None: HAProxy does not answer."""
    decides: bool
    """Its picker was asked in the last seconds."""
    asked: int
    held: int
    shares: dict[str, float] = {}
    """Of the new requests of about the last minute, by host."""
    addresses: tuple[str, ...] = ()
    """Addresses on which the ingress of this host is asked."""
    files: tuple[FileState, ...] = ()
    """Its certificates."""
    troubles: tuple[str, ...] = ()
    """Reasons why it does not do as the member list and fleet.toml say."""


class FleetAt(Struct, frozen=True, kw_only=True):
    """Where the ingress of this host shows its status, and what else fleet.toml says."""

    status: str
    """Path of a UNIX socket."""
    endpoints: tuple[str, ...] = ()
    dashboard: str | None = None
    """Address of each host's own dashboard, with `{host}` for its name."""


class FleetSeen(Struct, frozen=True, kw_only=True):
    """The last answer of the ingress; it is kept when there is no newer one."""

    at: float | None = None
    """Seconds since 1970; None: it has not answered yet."""
    status: Status | None = None
    trouble: tuple[str, str] | None = None
    """Why there is no newer answer, and the remedy."""


def status_of(text: bytes) -> Status:
    """Raises LauncherError."""
    try:
        return msgspec.convert(printable_tree(json.loads(text)), Status)
    except (ValueError, RecursionError) as error:
        raise LauncherError(
            f"cannot read the status of the ingress: {quoted(str(error), 200)}",
            "ingress and dashboard may be of different versions: `systemctl restart numa-launcher-ingress "
            "numa-launcher-dashboard`",
        ) from None


def fleet_frame(seen: FleetSeen, fleet: FleetAt, now: float) -> dict[str, Any]:
    status = seen.status
    hosts = [] if status is None else _hosts(status)
    return {
        "time": seen.at,
        "age_s": None if seen.at is None else max(0.0, now - seen.at),
        "answers": seen.trouble is None and status is not None,
        "verdict": shown_verdict(_verdict(seen, hosts, now)),
        "endpoints": fleet.endpoints,
        "ingress": None if status is None else {
            "decides": status.decides, "asked": status.asked, "held": status.held,
            "members": f"{status.members.epoch}.{status.members.version}",
        },
        "hosts": [] if status is None else _rows(status, hosts, fleet),
    }  # fmt: skip


def _verdict(seen: FleetSeen, hosts: list[Host], now: float) -> Verdict:
    if seen.trouble is not None or seen.status is None:
        trouble = seen.trouble or ("the ingress has not answered yet", "")
        return no_answer(*trouble, None if seen.at is None else now - seen.at)
    others = []
    if seen.status.servers is None:
        others.append(
            Problem(
                what="HAProxy of this host does not answer", level=Level.BAD,
                remedy="journalctl -u numa-launcher-ingress",
            )
        )  # fmt: skip
    state = IngressState(files=seen.status.files, troubles=seen.status.troubles)
    others += of_ingress(", ".join(seen.status.addresses), state, now)
    return judge_fleet(hosts, others)


def _hosts(status: Status) -> list[Host]:
    found = []
    for member in status.members.members:
        load = status.hosts.get(member.host, Load())
        if load.lost:
            found.append(Host(name=member.host, state="down", troubles=("its daemon does not answer",)))
            continue
        found.append(
            Host(
                name=member.host, state=member.state, ready=load.ready, instances=load.instances, running=load.running,
                waiting=load.waiting, predicted_ttft_s=load.predicted_ttft_s,
                # As for `fleet status`: the other picker sees no answers.
                stragglers=load.stragglers if status.decides else (),
            )
        )  # fmt: skip
    return found


def _rows(status: Status, hosts: list[Host], fleet: FleetAt) -> list[dict[str, Any]]:
    """None is what is not known."""
    late = late_hosts(hosts)
    rows = []
    for member, host in zip(status.members.members, hosts, strict=True):
        answers = host.state != "down"
        slots = ", ".join(map(str, host.stragglers))
        rows.append(
            {
                "name": host.name,
                "state": host.state,
                "address": member.address,
                "ready": host.ready if answers else None,
                "instances": host.instances if answers else None,
                "running": host.running if answers else None,
                "waiting": host.waiting if answers else None,
                "predicted_ttft_s": host.predicted_ttft_s,
                "kv_usage": status.hosts[host.name].kv_usage if answers else None,
                "share": status.shares.get(host.name),
                "slow": f"slot {slots}" if slots else "late" if host.name in late else "",
                "link": None
                if fleet.dashboard is None
                else fleet.dashboard.replace("{host}", quote(host.name, safe="")),
            }
        )
    return rows


# Of one question, connecting included. The ingress answers in milliseconds.
ANSWER_S: Final = 3.0
_LOOK: Final = "`systemctl status numa-launcher-ingress`; HAProxy goes on without it"
_GROUP: Final = "set read_group in [ingress] of fleet.toml to the dashboard's group, and restart the ingress"


async def read_status(path: str) -> bytes:
    """All that the ingress writes. Raises LauncherError."""
    what = f"cannot reach the ingress on '{path}'"
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                return await reader.read()
            finally:
                writer.close()
    except TimeoutError:
        raise UnreachableError(f"{what}: no answer within {ANSWER_S:g} s", _LOOK) from None
    except OSError as error:
        remedy = _GROUP if isinstance(error, PermissionError) else _LOOK
        raise UnreachableError(f"{what}: {reason(error)}", remedy) from None


class Fleet:
    """The state of all hosts, for all pages."""

    def __init__(
        self,
        at: FleetAt,
        *,
        read: Callable[[str], Awaitable[bytes]] = read_status,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._at, self._read, self._clock = at, read, clock
        self._shared: Shared[Packed] = Shared(monotonic)
        self._seen = FleetSeen()

    async def frame(self) -> Packed:
        """The newest frame; the ingress is asked at most each POLL_S, and only when a page asks."""
        return await self._shared.get("fleet", POLL_S, self._ask)

    async def _ask(self) -> Packed:
        try:
            status = status_of(await self._read(self._at.status))
            self._seen = FleetSeen(at=self._clock(), status=status)
        except LauncherError as error:
            self._seen = replace(self._seen, trouble=(error.message, error.remedy))
        return Packed.of(msgspec.json.encode(fleet_frame(self._seen, self._at, self._clock())))
