"""Asks every member's daemon for its load each second, whatever becomes of Ray."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable
from typing import Final, Protocol

import aiohttp
import msgspec

from launcher.base.errors import LauncherError, reason
from launcher.fleet.members import Member

PERIOD_S: Final = 1.0
LOST_S: Final = 3.0  # without an answer
_LOG = logging.getLogger(__name__)


class InstanceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """One instance; of these and other fields see launcher/proxy/pages/host_load.py."""

    slot: int
    generation: int
    model: str
    ready: bool
    running: int
    waiting: int
    concurrency_limit: int
    kv_usage: float | None = None
    kv_tokens: int | None = None


class ModelNames(msgspec.Struct, frozen=True):
    """The other names that requests may use for a model."""

    aliases: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()


class HostLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A host, as its daemon's `GET /load` shows it; `waiting` counts its daemon's queue, too."""

    running: int
    waiting: int
    predicted_ttft_s: float | None = None
    models: dict[str, ModelNames] = {}
    instances: tuple[InstanceLoad, ...]


class Listener(Protocol):
    def report(self, host: str, load: HostLoad, now: float) -> None: ...
    def lost(self, host: str) -> None: ...


def trust(ca: str | None) -> ssl.SSLContext | None:
    """How daemons are asked over TLS. `ca`: PEM file with the authority of their certificates; None: plain HTTP. A
    certificate of the fleet's own authority is enough, whatever name it has, as for HAProxy. Raises LauncherError."""
    if ca is None:
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise LauncherError(
            f"cannot read '{ca}': {reason(error)}", "correct [hosts] ca in fleet.toml"
        ) from None
    context.check_hostname = False
    return context


class Loads:
    """One task per member, so that none waits for another. `now` is the event loop's time."""

    def __init__(self, listener: Listener, ca: str | None) -> None:
        """`ca`: as `trust` takes it. Raises LauncherError."""
        self._listener = listener
        self._scheme = "https" if ca else "http"
        self.tls: ssl.SSLContext | bool = trust(ca) or True
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}

    def watch(self, members: Iterable[Member]) -> None:
        """Ask these and no others. To be called again and again: a task that failed is begun again."""
        wanted = {(member.host, member.address) for member in members}
        for failed in [key for key, task in self._tasks.items() if task.done()]:
            task = self._tasks.pop(failed)
            _LOG.error("host %s: asking for its load failed", failed[0], exc_info=task.exception())
        for gone in self._tasks.keys() - wanted:
            self._tasks.pop(gone).cancel()
        for new in wanted - self._tasks.keys():
            self._tasks[new] = asyncio.create_task(self._ask(*new), name=f"load of {new[0]}")

    def believe(self, context: ssl.SSLContext) -> None:
        """Another authority of the daemons' certificates: they are asked again by it at the next `watch`."""
        if context is not self.tls:
            self.tls = context
            self.watch(())

    async def close(self) -> None:
        tasks = tuple(self._tasks.values())
        self.watch(())
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, host: str, address: str) -> None:
        clock, url = asyncio.get_running_loop().time, f"{self._scheme}://{address}/load"
        answered, lost = clock(), False
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self.tls)) as session:
            while True:
                begun = clock()
                try:
                    async with asyncio.timeout_at(max(answered + LOST_S, begun + PERIOD_S)):
                        async with session.get(url, raise_for_status=True) as response:
                            load = msgspec.json.decode(await response.read(), type=HostLoad)
                except (aiohttp.ClientError, ValueError, OSError) as error:
                    # Nobody listens there, or it has been silent for too long.
                    refused = isinstance(error, aiohttp.ClientConnectorError)
                    if not lost and (refused or clock() - answered >= LOST_S):
                        lost = True
                        why = str(error) or f"no answer in {LOST_S:g} s"
                        _LOG.warning("host %s: lost (%s)", host, why, extra={"host": host})
                        self._listener.lost(host)
                else:
                    if lost:
                        _LOG.info("host %s: answers again", host, extra={"host": host})
                    answered, lost = clock(), False
                    self._listener.report(host, load, answered)
                await asyncio.sleep(max(0.0, begun + PERIOD_S - clock()))
