"""The engine's side of an instance: what to start, how to reach it, what its words mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from launcher.address import Address

if TYPE_CHECKING:
    from launcher.plan import Slot


MARK: Final = "NUMA_LAUNCHER_INSTANCE"
"""Set to a value of its own in the environment of each life: what is left of it is found by that."""


@dataclass(frozen=True, slots=True)
class Container:
    """What a client such as podman leaves outside the tree of processes that it is started as."""

    name: str
    command: tuple[str, ...]
    """What runs inside."""
    folders: tuple[str, ...]
    """Mounted, and made on the host when they are missing."""
    last_word: tuple[str, ...]
    """Prints what is worth knowing of a container that has ended; nothing mostly."""
    remove: tuple[str, ...]
    """Kills and removes the container; one that is not there is no error."""
    left_over: tuple[str, ...]
    """Prints the ids of all containers of this daemon, one a line."""
    remove_ids: tuple[str, ...]
    """Kills and removes the containers whose ids follow."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start one instance."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """The engine's, added to the daemon's environment. Values of `secrets` are never printed."""
    secrets: frozenset[str]
    """Names in `env` whose values are secret."""
    address: Address
    container: Container | None = None
    """Set where `argv` starts a container, and does not exec into the engine."""
    scratch: str | None = None
    """A folder for sockets of the engine's own, made and emptied before each start."""

    @property
    def own_env(self) -> Mapping[str, str]:
        """What `argv` itself gets: a container's client only the secrets, the rest is in its arguments."""
        if self.container is None:
            return self.env
        return {name: value for name, value in self.env.items() if name in self.secrets}


class Engine(Protocol):
    """One kind of engine, configured."""

    @property
    def wants_completion_probe(self) -> bool:
        """Whether readiness needs one real completion after the health path answers 200."""
        ...

    @property
    def health_path(self) -> str:
        """Path that answers 200 when the engine lives."""
        ...

    def launch(self, slot: Slot, generation: int) -> Launch:
        """What to start for the given life of a slot. Pure: creates no files."""
        ...
