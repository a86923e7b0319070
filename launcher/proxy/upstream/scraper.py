"""Pages of the instances, fetched all at once with one deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.address import Address
from launcher.errors import reason
from launcher.telemetry.engine_pages import fetch

FETCH_TIMEOUT_S = 2.0  # an instance that is slower is left out of this page

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Instance:
    """A running instance, as far as pages show it."""

    slot: int
    generation: int
    model: str
    address: Address
    ready: bool = True
    """False while it drains: it gets no requests, and its counters still move."""
    numa_node: str = ""
    """NUMA nodes of its cores, a list such as "0"; empty: not known."""


async def fetch_pages(instances: Sequence[Instance], path: str) -> list[bytes | None]:
    """`path` of each instance, in order; None where it does not answer 200 in time."""
    return list(await asyncio.gather(*(_fetch(instance, path) for instance in instances)))


async def _fetch(instance: Instance, path: str) -> bytes | None:
    why = ""
    try:
        page = await fetch(instance.address, path, FETCH_TIMEOUT_S)
    except OSError as error:
        page, why = None, f": {reason(error)}"
    if page is None:
        slot = instance.slot
        _LOG.debug("slot %d: no answer to GET %s%s", slot, path, why, extra={"slot": slot})
    return page
