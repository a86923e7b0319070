"""Deployments before and after a change, and probers of their instances."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from support.fakes import FakeClock, FakeProber, FakeProcess, FakeSpawner
from support.synthetic import Machine

from launcher.base.address import Address
from launcher.config.loading import parse_config
from launcher.config.schema import Supervision
from launcher.daemon.deployment import Deployment, build_deployment
from launcher.instances.lifecycle import Limits
from launcher.instances.slot_state import ProbeSettings

LIMITS = replace(Limits.of(Supervision()), backoff_initial_s=0.01, backoff_max_s=0.02, crash_limit=1)
PROBES = ProbeSettings(probe_interval_s=1000.0, tail_lines=9, ready_poll_s=0.001)
CHANGED = {"command": ["serve", "{uds}", "--changed"]}


@dataclass
class TimedProber(FakeProber):
    """Answers canaries in `took_s` on the clock, by slot."""

    clock: FakeClock = field(default_factory=FakeClock)
    took_s: dict[str, float] = field(default_factory=dict)
    failing: str = "never"

    async def canary(self, address: Address, model: str, timeout_s: float) -> bool | None:
        self.canaries += 1
        self.clock.now += next((took for part, took in self.took_s.items() if part in str(address)), 0.1)
        return self.failing not in str(address)


def lame(spawner: FakeSpawner, *slots: int) -> None:
    """The next instances of these slots exit at once."""
    spawn = spawner.spawn

    async def and_end(slot: int, *more: Any) -> FakeProcess:
        process = await spawn(slot, *more)
        if slot in slots:
            asyncio.get_running_loop().call_soon(process.end, 9)
        return process

    spawner.spawn = and_end  # type: ignore[method-assign]


MACHINE = Machine(cores=8).topology()


# An overflow endpoint with a daily cap.
CLOUD = {
    "url": "http://h/v1", "name": "cloud", "models": {"m": "b"}, "max_per_day": 5, "input": 1, "output": 1,
}  # fmt: skip


def made(**more: Any) -> Deployment:
    """Two instances of four cores each, but for `more`."""
    tree: dict[str, Any] = {
        "models": [{"name": "m", "path": "/m"}],
        "layout": {"instances_per_socket": 2, "reserve_cores": 0},
        "engine": {"kind": "command", "command": ["serve", "{uds}"]},
    }
    for section, keys in more.items():
        tree[section] = {**tree.get(section, {}), **keys} if isinstance(keys, dict) else keys
    return build_deployment(parse_config(tree, origin="test"), machine=MACHINE, cpus_only=True)
