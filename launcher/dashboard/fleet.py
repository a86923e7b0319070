"""Reads the status of this host's ingress, once for all pages. Nothing of Ray is asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import msgspec

from launcher.control.client import UnreachableError
from launcher.dashboard.fleet_frame import FleetAt, FleetSeen, fleet_frame, status_of
from launcher.dashboard.poll import POLL_S, Packed
from launcher.dashboard.shared import Shared
from launcher.errors import LauncherError, reason

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
