"""The engine's side of an instance: what to start, how to reach it, what its words mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from launcher.address import Address

if TYPE_CHECKING:
    from launcher.planning.plan import Slot


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything needed to start one instance."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """Added to the daemon's environment. Values of `secrets` are never printed."""
    secrets: frozenset[str]
    """Names in `env` whose values are secret."""
    address: Address


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
