"""Pages of the instances, fetched over HTTP: each with a deadline, all at once, none kept open after its instance."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from launcher.address import Address, TcpAddress, UnixAddress
from launcher.printable import quoted

FETCH_TIMEOUT_S = 2.0  # an instance that is slower is left out of this page
MAX_PAGE_BYTES = 16 << 20

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance that lives: what the front door knows of it."""

    slot: int
    generation: int
    model: str
    address: Address
    ready: bool = True
    """False while it drains: it gets no requests, and its counters still move."""
    numa_node: str = ""
    """NUMA nodes of its cores, a list such as "0"; empty: not known."""


class PageFetcher:
    """Owner of one HTTP client per address. `close` ends them all."""

    def __init__(self) -> None:
        self._sessions: dict[Address, aiohttp.ClientSession] = {}

    async def fetch(self, instances: Sequence[Instance], path: str) -> list[bytes | None]:
        """`path` of each instance, in order; None where it does not answer 200 in time."""
        return list(await asyncio.gather(*(self._fetch(instance, path) for instance in instances)))

    async def keep_only(self, instances: Sequence[Instance]) -> None:
        """Close what talks to addresses that are no instance's any more."""
        living = {instance.address for instance in instances}
        for address in self._sessions.keys() - living:
            await self._sessions.pop(address).close()

    async def close(self) -> None:
        """Close every client."""
        await self.keep_only(())

    async def _fetch(self, instance: Instance, path: str) -> bytes | None:
        try:
            async with (
                asyncio.timeout(FETCH_TIMEOUT_S),
                self._session(instance.address).get(
                    base_url(instance.address) + path, allow_redirects=False
                ) as answer,
            ):
                body = await _read(answer) if answer.status == 200 else None
        # aiohttp's pure-Python parser raises HttpProcessingError; a closed session raises RuntimeError.
        except (aiohttp.ClientError, HttpProcessingError, OSError, TimeoutError, RuntimeError) as error:
            slot = instance.slot
            _LOG.debug("slot %d gave no %s: %s", slot, path, quoted(str(error)), extra={"slot": slot})
            return None
        return body

    def _session(self, address: Address) -> aiohttp.ClientSession:
        found = self._sessions.get(address)
        if found is None:
            found = self._sessions[address] = aiohttp.ClientSession(
                connector=connector_to(address),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S),
            )
        return found


async def _read(answer: aiohttp.ClientResponse) -> bytes | None:
    """The body; None when it is too large."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > MAX_PAGE_BYTES:
            return None
    return bytes(body)


def connector_to(address: Address) -> aiohttp.BaseConnector:
    """What connects there. No connection is kept: the next fetch may be a minute away, and an end is seen at once."""
    match address:
        case UnixAddress(path):
            return aiohttp.UnixConnector(path, force_close=True)
        case TcpAddress():
            return aiohttp.TCPConnector(force_close=True, ttl_dns_cache=None)
        case _:
            assert_never(address)


def base_url(address: Address) -> str:
    """What a path is put behind."""
    match address:
        case UnixAddress():
            return "http://localhost"
        case TcpAddress(host, port):
            return f"http://{f'[{host}]' if ':' in host else host}:{port}"
        case _:
            assert_never(address)
