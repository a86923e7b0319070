"""Null objects for the optional Protocols of ports.py."""

from __future__ import annotations

from launcher.engines.base import Launch


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
