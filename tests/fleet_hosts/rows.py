"""The failures, one function each: breaks something, waits until the fleet is whole again, notes what was measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from fleet_hosts.fleet import DAEMON_PORT, INGRESS_PORT, Fleet
from fleet_hosts.hosts import Host
from fleet_hosts.load import Load, shares
from fleet_hosts.verdict import Row

# No new request goes to a host later than this after its last health answer.
KNOWN_WITHIN_S: Final = 1.0
# Long enough for every HAProxy to have noticed, and for streams to show whether they live.
DARK_S: Final = 6.0


@dataclass(frozen=True, slots=True)
class Stage:
    """What a failure works on."""

    fleet: Fleet
    load: Load
    row: Row

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.row.broken.append(what)


async def last_new_request(stage: Stage, host: Host, since: float, for_s: float) -> float:
    """Seconds after `since` of the last request that an ingress sent to the host, 0 if there was none."""
    address = f"{host.address}:{DAEMON_PORT}"
    ingresses = [ingress for ingress in stage.fleet.ingresses if ingress.on and ingress is not host]

    def sent() -> int:
        found = (stage.fleet.servers(ingress).get(address) for ingress in ingresses)
        return sum(int(row["stot"]) for row in found if row)

    before, last = await asyncio.to_thread(sent), 0.0
    while time.monotonic() < since + for_s:
        await asyncio.sleep(0.02)
        now = await asyncio.to_thread(sent)
        if now > before:
            last = time.monotonic() - since
        before = max(before, now)
    return last


async def power(stage: Stage) -> None:
    """The power of a host goes, and comes back."""
    fleet, row = stage.fleet, stage.row
    host = fleet.hosts[3]
    await asyncio.to_thread(host.power_off)
    row.begun = host.powered_off_at
    row.victims = frozenset({host.name})
    row.fails_until = row.begun + KNOWN_WITHIN_S
    last = await last_new_request(stage, host, row.begun, DARK_S)
    row.found.append(f"last new request to it after {last:.2f} s")
    stage.expect(last <= KNOWN_WITHIN_S, f"a new request went to it after {last:.2f} s")
    await asyncio.to_thread(host.power_on)
    await asyncio.to_thread(fleet.start_host, host)
    await asyncio.to_thread(fleet.wait_known)


async def restart(stage: Stage) -> None:
    """A daemon is restarted as `systemctl restart numa-launcher` does it: clients wait in the socket of the service."""
    host = stage.fleet.hosts[2]
    before = stage.fleet.daemon(host)
    await asyncio.to_thread(host.do, *stage.fleet.restart_command("daemon"))
    await asyncio.to_thread(stage.fleet.wait_ready, host)
    stage.expect(stage.fleet.daemon(host).pid != before.pid, "the daemon was not restarted")
    await asyncio.to_thread(stage.fleet.wait_known)


async def instance(stage: Stage) -> None:
    """An instance is killed."""
    host = stage.fleet.hosts[2]
    victim = next(stage.fleet.engines(host))
    generations = [slot["generation"] for slot in stage.fleet.status(host)["slots"]]
    stage.fleet.kill(victim)
    await asyncio.sleep(1)
    status = await asyncio.to_thread(stage.fleet.wait_ready, host)
    stage.expect(
        sum(slot["generation"] for slot in status["slots"]) == sum(generations) + 1,
        "no instance was replaced",
    )


async def haproxy(stage: Stage) -> None:
    """HAProxy of one ingress is killed and started again; clients with two addresses use the other."""
    fleet, row = stage.fleet, stage.row
    ingress = fleet.ingresses[1]
    victims = ingress.processes_of("haproxy", "-f")
    stage.expect(bool(victims), "there was no HAProxy")
    row.begun = time.monotonic()
    row.victims = frozenset({f"{ingress.address}:{INGRESS_PORT}"})
    row.fails_until = row.begun
    fleet.kill(*victims)
    await asyncio.to_thread(fleet.wait_known)
    row.found.append(f"back after {time.monotonic() - row.begun:.1f} s")
    await asyncio.sleep(2)


async def slow(stage: Stage) -> None:
    """All engines of a host take six times as long."""
    fleet = stage.fleet
    host = fleet.hosts[2]
    engines = list(fleet.engines(host))
    fleet.slow(engines)
    # The requests that were under way when it became slow say nothing.
    await asyncio.sleep(5)
    since = time.monotonic()
    await asyncio.sleep(8)
    share = shares(one for one in stage.load.outcomes if one.begun > since).get(host.name, 0.0)
    stage.row.found.append(f"{share:.0%} of the requests")
    stage.expect(share < 0.6 / len(fleet.hosts), f"the slow host got {share:.0%} of the requests")
    fleet.slow(engines)


ROWS: Final[dict[str, Callable[[Stage], Awaitable[None]]]] = {
    "instance": instance,
    "restart": restart,
    "haproxy": haproxy,
    "power": power,
    "slow": slow,
}
PLANNED: Final = frozenset({"restart", "upgrade"})
