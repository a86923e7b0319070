"""What the supervisor needs of the world, as Protocols; effects implement them, tests fake them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from launcher.address import Address
from launcher.engines.base import Launch
from launcher.telemetry.vllm_metrics import EngineMetrics


@dataclass(frozen=True, slots=True)
class Exit:
    """How an instance's main process ended: exactly one of the two is set."""

    code: int | None
    signal: int | None

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.signal is None else f"signal {self.signal}"


class Process(Protocol):
    """One running instance: the main process and everything it started."""

    @property
    def pid(self) -> int:
        """The engine's main process (numactl has exec'ed into it)."""
        ...

    async def wait(self) -> Exit:
        """Return when the main process has ended and nothing of its tree is left."""
        ...

    def terminate(self) -> None:
        """SIGTERM to the main process. No error when it is gone."""
        ...

    def kill(self) -> None:
        """SIGKILL to the whole tree. No error when it is gone."""
        ...

    def leave(self) -> None:
        """The daemon ends: a child is killed with its tree, a unit of its own goes on for the next daemon."""
        ...


@dataclass(frozen=True, slots=True)
class Adopted:
    """An instance that an earlier daemon started, and that goes on."""

    generation: int
    launch: Launch
    """What it was started with."""
    process: Process
    age_s: float
    """Since it was started."""
    follow: Callable[[Callable[[str, float], None]], None]
    """Hand it `on_line` once: it gets the lines printed before, as far as they are kept, and those that come, each
    with the time when it was printed, in seconds since the epoch."""


class Spawner(Protocol):
    """Starts instances."""

    async def spawn(
        self, slot: int, generation: int, launch: Launch, on_line: Callable[[str], None]
    ) -> Process:
        """Start `launch`; each line it prints goes to `on_line`. Raises LauncherError."""
        ...

    async def adopt(self, slots: Mapping[int, Callable[[int], Launch]]) -> Mapping[int, Adopted]:
        """What an earlier daemon left running, by slot; asked once, before the first spawn.

        `slots`: per slot, what would be started for a generation. An instance that was started with the
        very same is handed over; every other one is stopped, and gone before anything is spawned. Raises LauncherError.
        """
        ...

    async def keeps_instances(self) -> bool:
        """Whether instances are to go on when the daemon ends now: not by itself, but to be replaced."""
        ...

    async def close(self, *, for_good: bool) -> None:
        """The last call. `for_good`: nothing may start the daemon again but an operator."""
        ...


class Prober(Protocol):
    """Asks an instance whether it lives. Each call has its own deadline.

    `healthy` and `counters` raise OSError where the daemon itself lacks what it takes to ask: nothing is known then.
    """

    async def healthy(self, address: Address) -> bool | None:
        """True: the health path answers 200. False: it answers otherwise or refuses. None: nothing is known."""
        ...

    async def completes(self, address: Address, model: str) -> bool:
        """True when one real completion of one token succeeds."""
        ...

    async def canary(self, address: Address, model: str, timeout_s: float) -> bool | None:
        """As `completes`, of an instance that was ready. None: no answer in time."""
        ...

    async def counters(self, address: Address) -> EngineMetrics | None:
        """What the engine counts of its own work. None where it counts nothing, or gives no answer in time."""
        ...


class Traffic(Protocol):
    """What the proxy knows of an instance."""

    def in_flight(self, slot: int, generation: int) -> int:
        """Requests that it has there now, but for those whose clients take nothing: no instance moves for them."""
        ...

    def relayed(self, slot: int, generation: int) -> int:
        """Events, or pieces of answers, relayed from there so far."""
        ...

    def silent(self, slot: int, generation: int) -> bool:
        """Nothing has come of its requests for long (proxy.hung_timeout_s), and it can take one more at once."""
        ...


class Caches(Protocol):
    """The compile caches of the slots. Blocking: called in a thread."""

    def prepare(self, slot: int, launch: Launch) -> None:
        """Before a start: what a sibling has compiled is there, and nothing of another stack."""
        ...

    def purge(self, slot: int, launch: Launch) -> None:
        """Empty a slot's."""
        ...

    def keep(self, slot: int, launch: Launch) -> None:
        """A start with it has gone well: siblings may have a copy."""
        ...


@dataclass(frozen=True, slots=True)
class InstanceReady:
    """The instance may get requests."""

    slot: int
    generation: int
    model: str
    address: Address
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class InstanceDraining:
    """The instance gets no new requests; `idle` is reported back when none is left."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class InstanceGone:
    """Nothing may be sent; what is still in flight is over."""

    slot: int
    generation: int
    reason: str


InstanceEvent = InstanceReady | InstanceDraining | InstanceGone
