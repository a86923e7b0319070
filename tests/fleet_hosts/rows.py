"""The failures, one function each: breaks something, waits until the fleet is whole again, notes what was measured."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psutil

from fleet_hosts.fleet import DAEMON_PORT, INGRESS_PORT, Fleet, eventually
from fleet_hosts.hosts import Host, join, part
from fleet_hosts.load import End, Load, shares
from fleet_hosts.verdict import Row

# No new request goes to a host later than this after its last health answer.
KNOWN_WITHIN_S: Final = 1.0
# What clients need to give up an ingress without power (TCP_LIMITS of fleet_hosts.load), and to notice it.
CLIENTS_KNOW_S: Final = 5.0
# Long enough for every HAProxy to have noticed, and for streams to show whether they live.
DARK_S: Final = 6.0
# Ray declares a node dead after 3 s + 5 x 3 s without an answer (health_check_* in ray_config_def.h).
PARTED_S: Final = 25.0
# A picker judges an instance by 20 first tokens (balancing/outlier_detection.py), and sends few requests to a slow one.
NAMED_WITHIN_S: Final = 75.0


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
    before, last = (await asyncio.to_thread(sent, stage.fleet)).get(address, 0), 0.0
    while time.monotonic() < since + for_s:
        await asyncio.sleep(0.02)
        now = (await asyncio.to_thread(sent, stage.fleet)).get(address, 0)
        if now > before:
            last = time.monotonic() - since
        before = max(before, now)
    return last


def sent(fleet: Fleet) -> Counter[str]:
    """Requests that the ingresses have sent to each address so far."""
    found: Counter[str] = Counter()
    for ingress in fleet.ingresses:
        if ingress.on:
            found.update({address: int(row["stot"]) for address, row in fleet.servers(ingress).items()})
    return found


def _come_back(stage: Stage, host: Host) -> None:
    """The host's power is there again."""
    fleet, row = stage.fleet, stage.row
    host.power_on()
    fleet.start_host(host)
    fleet.wait_known()
    if fleet.with_ray:
        fleet.wait_well()
    row.found.append(f"all is as before {time.monotonic() - row.begun:.1f} s after")


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
    await asyncio.to_thread(_come_back, stage, host)


async def ingress(stage: Stage) -> None:
    """The power of a host with everything goes: the picker that decides, HAProxy, a daemon, Ray's head."""
    fleet, row = stage.fleet, stage.row
    host, other = fleet.ingresses
    before = fleet.asked(other)
    await asyncio.to_thread(host.power_off)
    row.begun = host.powered_off_at
    row.victims = frozenset({host.name, f"{host.address}:{INGRESS_PORT}"})
    row.fails_until = row.begun + CLIENTS_KNOW_S
    await asyncio.to_thread(eventually, lambda: fleet.asked(other) > before, "the other picker decides")
    took = time.monotonic() - row.begun
    row.found.append(f"the other picker decides after {took:.1f} s")
    stage.expect(took <= DARK_S, f"the other picker decided after {took:.1f} s")
    await asyncio.sleep(max(0.0, row.begun + 2 * DARK_S - time.monotonic()))
    through = [
        one for one in stage.load.outcomes
        if one.begun > row.begun + KNOWN_WITHIN_S and one.ingress == f"{other.address}:{INGRESS_PORT}"
    ]  # fmt: skip
    harmed = [one.detail for one in through if one.end not in {End.WHOLE, End.LEFT}]
    row.found.append(f"{len(through)} new requests by the other ingress, {len(harmed)} harmed")
    stage.expect(bool(through) and not harmed, f"new requests by the other ingress: {harmed}")
    row.found.append(f"slowest first token {slowest(stage, row.begun):.2f} s")
    await asyncio.to_thread(_come_back, stage, host)


async def restart(stage: Stage) -> None:
    """A daemon is restarted as `systemctl restart numa-launcher` does it: clients wait in the socket of the service."""
    fleet = stage.fleet
    host = fleet.hosts[2]
    before = fleet.daemon(host)
    await asyncio.to_thread(host.do, *fleet.restart_command("daemon"))
    for each in fleet.hosts:  # another one's vLLM may still load since the last row
        await asyncio.to_thread(fleet.wait_ready, each)
    stage.expect(fleet.daemon(host).pid != before.pid, "the daemon was not restarted")
    await asyncio.to_thread(fleet.wait_known)


async def instance(stage: Stage) -> None:
    """An instance of two is killed on one host; on another one the only one, which is vLLM and loads on in the next row."""
    fleet, row = stage.fleet, stage.row
    hosts = fleet.hosts[1], fleet.hosts[3]
    before = [_generations(fleet.status(host)) for host in hosts]
    for host in hosts:
        stage.expect(fleet.kill(*list(fleet.engines(host))[:1]) == 1, f"no instance on {host.name}")
    await asyncio.sleep(1)
    for host, count in zip(hosts, before, strict=True):
        await asyncio.to_thread(
            eventually,
            lambda host=host, count=count: _generations(fleet.status(host)) == count + 1,
            f"a new instance on {host.name}",
        )
    await asyncio.to_thread(fleet.wait_ready, hosts[0])
    row.found.append(f"{hosts[0].name} is whole again after {time.monotonic() - row.begun:.1f} s")


def _generations(status: dict[str, Any]) -> int:
    return sum(int(slot["generation"]) for slot in status["slots"])


async def haproxy(stage: Stage) -> None:
    """HAProxy of one ingress is killed and started again; clients with two addresses use the other."""
    fleet, row = stage.fleet, stage.row
    ingress = fleet.ingresses[1]
    victims = ingress.processes_of("haproxy", "-f")
    stage.expect(bool(victims), "there was no HAProxy")
    row.begun = time.monotonic()
    row.victims = frozenset({f"{ingress.address}:{INGRESS_PORT}"})
    fleet.kill(*victims)
    # Until the kernel has closed its sockets it accepts connections.
    await asyncio.to_thread(psutil.wait_procs, victims, timeout=10)
    row.fails_until = time.monotonic()
    await asyncio.to_thread(fleet.wait_known)
    row.found.append(f"back after {time.monotonic() - row.begun:.1f} s")
    await asyncio.sleep(2)


async def slow(stage: Stage) -> None:
    """All engines of a host take ten times as long."""
    fleet, row = stage.fleet, stage.row
    host = fleet.hosts[1]
    engines = list(fleet.engines(host))
    fleet.slow(engines)
    row.begun = time.monotonic()
    # Time to learn of it.
    await asyncio.sleep(5)
    before = await asyncio.to_thread(sent, fleet)
    await asyncio.sleep(8)
    after = await asyncio.to_thread(sent, fleet)
    new = {address: count - before.get(address, 0) for address, count in after.items()}
    share = new[f"{host.address}:{DAEMON_PORT}"] / max(sum(new.values()), 1)
    row.found.append(f"{share:.0%} of the new requests")
    stage.expect(share < 0.6 / len(fleet.hosts), f"the slow host got {share:.0%} of the new requests")
    told, named = "", f"{host.name}: slow"
    while named not in told and time.monotonic() < row.begun + NAMED_WITHIN_S:
        told = await asyncio.to_thread(fleet.try_status)
    row.found.append(f"named after {time.monotonic() - row.begun:.0f} s")
    stage.expect(named in told, f"fleet status does not name it: {told}")
    fleet.slow(engines)


async def picker(stage: Stage) -> None:
    """The picker that decides is killed and stays away, then the other one as well."""
    fleet, row = stage.fleet, stage.row
    one, other = fleet.ingresses
    with fleet.stopped(one, "ingress"):
        stage.expect(fleet.kill(*fleet.picker(one)) == 1, "there was no picker")
        await asyncio.sleep(4)
        with fleet.stopped(other, "ingress"):
            stage.expect(fleet.kill(*fleet.picker(other)) == 1, "there was no second picker")
            await asyncio.sleep(4)
    row.found.append(f"slowest first token {slowest(stage, row.begun):.2f} s")
    await asyncio.to_thread(fleet.wait_known)


async def agent(stage: Stage) -> None:
    """The agent of a host is killed."""
    host = stage.fleet.hosts[2]
    await _actor(stage, host, "ray::Agent", [host])


async def director(stage: Stage) -> None:
    """The director is killed."""
    found = [host for host in stage.fleet.hosts if host.processes_of("ray::DirectorActor")]
    stage.expect(len(found) == 1, f"there are {len(found)} directors")
    await _actor(stage, found[0], "ray::DirectorActor", stage.fleet.hosts)


async def _actor(stage: Stage, host: Host, name: str, where: Sequence[Host]) -> None:
    fleet, row = stage.fleet, stage.row
    before = {process.pid for process in host.processes_of(name)}
    stage.expect(fleet.kill(*host.processes_of(name)) > 0, f"there is no {name} on {host.name}")

    def again() -> bool:
        return any(one.pid not in before for each in where for one in each.processes_of(name))

    await asyncio.to_thread(eventually, again, f"{name} runs again")
    row.found.append(f"runs again after {time.monotonic() - row.begun:.1f} s")
    await asyncio.to_thread(fleet.wait_well)
    row.found.append(f"fleet status is well after {time.monotonic() - row.begun:.1f} s")


async def head(stage: Stage) -> None:
    """Everything of Ray on the head's host is killed, and comes back after a while."""
    fleet, row = stage.fleet, stage.row
    host = fleet.hosts[0]
    lists = [fleet.members(one).members for one in fleet.ingresses]
    with fleet.stopped(host, "ray"):
        everything = fleet.unit_of(host, "ray").children(recursive=True)
        stage.expect(fleet.kill(*everything) > 2, "there was no Ray")
        await asyncio.sleep(8)
        status = await asyncio.to_thread(fleet.try_status)
        stage.expect("Ray:" in status and "Ray: answers" not in status, f"status without Ray: {status}")
        now = [fleet.members(one).members for one in fleet.ingresses]
        stage.expect(lists == now, f"the member lists changed: {lists} {now}")
    back = time.monotonic()
    await asyncio.to_thread(fleet.wait_well)
    row.found.append(f"fleet status is well {time.monotonic() - back:.1f} s after its return")


async def partition(stage: Stage) -> None:
    """The first host, with an ingress and Ray's head, cannot reach hosts 3 and 4, longer than Ray waits."""
    fleet, row = stage.fleet, stage.row
    alone, others = fleet.hosts[0], fleet.hosts[2:]
    before = [fleet.daemon(host).pid for host in fleet.hosts]
    row.begun = time.monotonic()
    row.victims = frozenset(host.name for host in others)
    row.fails_until = row.begun + KNOWN_WITHIN_S
    for host in others:
        await asyncio.to_thread(part, alone, host)
    await asyncio.sleep(PARTED_S)
    for ingress in fleet.ingresses:
        served = [
            one for one in stage.load.outcomes
            if one.end is End.WHOLE and one.begun > row.fails_until and one.ingress.startswith(f"{ingress.address}:")
        ]  # fmt: skip
        reached = shares(served)
        row.found.append(f"{ingress.name}: {len(served)} whole by {', '.join(reached)}")
        stage.expect(bool(served), f"{ingress.name} served nobody")
    for host in others:
        await asyncio.to_thread(join, alone, host)
    healed = time.monotonic()
    await asyncio.to_thread(fleet.wait_known)
    row.found.append(f"both ingresses send to all after {time.monotonic() - healed:.1f} s")
    if fleet.with_ray:
        await asyncio.to_thread(fleet.wait_well)
        row.found.append(f"fleet status is well after {time.monotonic() - healed:.1f} s")
    stage.expect(before == [fleet.daemon(host).pid for host in fleet.hosts], "a daemon was started again")


async def upgrade(stage: Stage) -> None:
    """`fleet upgrade` restarts the daemons of all hosts, one after the other."""
    fleet, row = stage.fleet, stage.row
    before = [fleet.daemon(host).pid for host in fleet.hosts]
    await asyncio.to_thread(fleet.cli, "upgrade")
    after = [fleet.daemon(host).pid for host in fleet.hosts]
    stage.expect(not set(before) & set(after), "a daemon was not restarted")
    row.found.append(f"{len(after)} daemons restarted")
    await asyncio.to_thread(fleet.wait_known)


async def down(stage: Stage) -> None:
    """`fleet up` once more changes nothing; `fleet down` removes agents and director, and requests go on."""
    fleet, row = stage.fleet, stage.row
    before = fleet.members(fleet.hosts[0]).members
    await asyncio.to_thread(fleet.cli, "up")
    stage.expect(fleet.members(fleet.hosts[0]).members == before, "fleet up changed the list")
    said = await asyncio.to_thread(fleet.cli, "down")
    stage.expect(f"{len(fleet.hosts) + 1} actors removed" in said, said)
    row.found.append(said.splitlines()[0])
    await asyncio.sleep(DARK_S)
    stage.expect(fleet.members(fleet.hosts[0]).members == before, "fleet down changed the list")


def slowest(stage: Stage, since: float) -> float:
    """Seconds to the first event of the slowest stream that began since then."""
    return max(
        (one.first_s for one in stage.load.outcomes if one.begun > since and one.first_s is not None),
        default=0.0,
    )


ROWS: Final[dict[str, Callable[[Stage], Awaitable[None]]]] = {
    "instance": instance,
    "restart": restart,
    "picker": picker,
    "haproxy": haproxy,
    "agent": agent,
    "director": director,
    "head": head,
    "slow": slow,
    "partition": partition,
    "power": power,
    "ingress": ingress,
    "upgrade": upgrade,
    "down": down,
}
OF_RAY: Final = frozenset({"agent", "director", "head", "upgrade", "down"})
PLANNED: Final = frozenset({"restart", "upgrade", "down"})
