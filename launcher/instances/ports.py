"""What supervision needs from outside, as Protocols, and the events that it announces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from launcher.base.address import Address
from launcher.engines.base import Launch
from launcher.telemetry.engine_metrics import EngineMetrics


class Exit(Struct, frozen=True):
    """How an instance's main process ended: exactly one of the two is set."""

    code: int | None
    signal: int | None

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"


class Process(Protocol):
    """One running instance: the main process and everything it started."""

    @property
    def pid(self) -> int | None:
        """The engine's main process (numactl has exec'ed into it). None until a container's is found."""

    async def wait(self) -> Exit:
        """Return when the main process has ended and its process tree is gone."""

    def terminate(self) -> None:
        """SIGTERM to the main process; no error when it has ended."""

    def kill(self) -> None:
        """SIGKILL to the process tree; no error when it has ended."""

    def leave(self) -> None:
        """The daemon exits: a child process is killed with its tree, a systemd unit keeps running."""


class Adopted(Struct, frozen=True):
    """A running instance that an earlier daemon started."""

    generation: int
    launch: Launch
    process: Process
    follow: Callable[[Callable[[str, float], None]], None]
    """Called once with `on_line(text, time)`, which gets the earlier lines that are still kept and then the new ones, each
    with its time in seconds since the epoch."""


class Spawner(Protocol):
    """Starts and adopts instances."""

    async def spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> Process:
        """Start `launch`; `on_line` gets each line of its output. Raises LauncherError."""

    async def adopt(self, slots: Mapping[int, Callable[[int], Launch]]) -> Mapping[int, Adopted]:
        """The running instances of an earlier daemon, by slot; called once, before the first spawn.

        `slots`: for each slot, the launch of a generation. An instance with the same launch is adopted; every other
        one is stopped, and no spawn begins before it has ended. Raises LauncherError."""

    async def keeps_instances(self) -> bool:
        """Whether the instances keep running when the daemon exits now, because another daemon will follow."""

    async def close(self, *, for_good: bool) -> None:
        """The last call. `for_good`: only an operator may start the daemon again."""


class Prober(Protocol):
    """Probes an instance. Each call has a deadline.

    `healthy` and `counters` raise OSError where the daemon itself is short of descriptors, memory or threads."""

    async def healthy(self, address: Address, timeout_s: float) -> bool | None:
        """True: the health path answers 200. False: another status, or connection refused. None: no answer in time."""

    async def completes(self, address: Address, model: str) -> bool:
        """True when one real completion of one token succeeds."""

    async def canary(self, address: Address, model: str, timeout_s: float) -> bool | None:
        """As `completes`, with a time limit; None: no answer in time."""

    async def counters(self, address: Address, timeout_s: float) -> EngineMetrics | None:
        """The engine's own counters; None where it has none, or does not answer in time."""


class Traffic(Protocol):
    """What the proxy knows about an instance."""

    def in_flight(self, slot: int, generation: int) -> int:
        """Its requests now, without those whose clients do not read: these make no progress on any instance."""

    def relayed(self, slot: int, generation: int) -> int:
        """Events, or pieces of answers, relayed from it so far."""

    def silent(self, slot: int, generation: int) -> bool:
        """Its requests got no answers for proxy.hung_timeout_s, and it is below its concurrency limit."""


class Caches(Protocol):
    """The compile caches of the slots. Blocking."""

    def prepare(self, slot: int, launch: Launch) -> None:
        """Before a start: provide what a sibling has compiled, remove what was compiled for other versions or settings."""

    def purge(self, slot: int, launch: Launch) -> None:
        """Empty the cache of a slot."""

    def keep(self, slot: int, launch: Launch) -> None:
        """A start with it has succeeded: siblings may copy it."""


class InstanceReady(Struct, frozen=True):
    """The instance may get requests."""

    slot: int
    generation: int
    model: str
    address: Address
    max_num_seqs: int


class InstanceDraining(Struct, frozen=True):
    """The instance gets no new requests; the proxy reports when the last one has ended."""

    slot: int
    generation: int


class InstanceGone(Struct, frozen=True):
    """The instance gets no requests; those in flight end now."""

    slot: int
    generation: int
    reason: str
    crashed: bool
    """It failed; False: a stop, or a drain deadline."""


InstanceEvent = InstanceReady | InstanceDraining | InstanceGone


# --- Null objects for the optional Protocols of ports.py. ---


class NoCaches:
    """For engines that compile nothing."""

    def prepare(self, slot: int, launch: Launch) -> None: ...

    def purge(self, slot: int, launch: Launch) -> None: ...

    def keep(self, slot: int, launch: Launch) -> None: ...


class NoTraffic:
    """For a supervisor without a proxy."""

    def in_flight(self, slot: int, generation: int) -> int:  # noqa: ARG002
        return 0

    def relayed(self, slot: int, generation: int) -> int:  # noqa: ARG002
        return 0

    def silent(self, slot: int, generation: int) -> bool:  # noqa: ARG002
        return False
