"""The Engine protocol: what to start, and how to reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from launcher.address import Address
from launcher.plan import Slot

MARK: Final = "NUMA_LAUNCHER_INSTANCE"
"""Environment variable with a unique value per generation, by which leftover processes are found."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container started by a client such as podman, outside of the client's process tree."""

    name: str
    command: tuple[str, ...]
    """Command inside the container."""
    folders: tuple[str, ...]
    """Mounted; created on the host if missing."""
    last_word: tuple[str, ...]
    """Command that prints why a container exited, if it has something to report."""
    remove: tuple[str, ...]
    """Command that kills and removes the container; a missing one is not an error."""
    left_over: tuple[str, ...]
    """Command that prints the ids of this daemon's containers, one per line."""
    remove_ids: tuple[str, ...]
    """Command that kills and removes the containers whose ids are appended."""


@dataclass(frozen=True, slots=True)
class Launch:
    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the daemon's environment. Values of `secrets` are never printed."""
    secrets: frozenset[str]
    """Names in `env` whose values are secret."""
    address: Address
    container: Container | None = None
    """Set when `argv` starts a container instead of the engine itself."""
    scratch: str | None = None
    """Folder for the engine's internal sockets, created and emptied before each start."""

    @property
    def own_env(self) -> Mapping[str, str]:
        """Environment of `argv`: a container's client gets only the secrets, its arguments contain the rest."""
        if self.container is None:
            return self.env
        return {name: value for name, value in self.env.items() if name in self.secrets}


class Engine(Protocol):
    @property
    def wants_completion_probe(self) -> bool:
        """Whether readiness needs one real completion after the health path answers 200."""

    @property
    def health_path(self) -> str:
        """Path that answers 200 while the engine is healthy."""

    def launch(self, slot: Slot, generation: int) -> Launch:
        """What to start for a generation of a slot. Creates no files."""
