"""Health path, completions and metrics of an instance, over HTTP."""

from __future__ import annotations

import asyncio
import errno
from typing import Final

import aiohttp

from launcher.address import Address
from launcher.errors import OWN_SHORTAGE
from launcher.telemetry.engine_pages import fetch, session_to, url_of
from launcher.telemetry.vllm_metrics import EngineMetrics, parse

# The first completion may wait for a compilation.
COMPLETION_TIMEOUT_S: Final = 600.0
# A UNIX socket with a full backlog: connect(2) returns EAGAIN, which uvloop reports; asyncio takes it for "in progress" and
# then uses a socket that is not connected (ENOTCONN, EINVAL).
BACKLOG_FULL: Final = frozenset({errno.EAGAIN, errno.ENOTCONN, errno.EINVAL})
# Between two tries while the daemon is short of descriptors or memory.
SHORTAGE_S: Final = 1.0
# Tried in this order until the model serves one of them.
_PROBES: Final = (
    ("/v1/completions", {"prompt": "Hello, what is your name?", "max_tokens": 1, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "Hello"}),
)


class HttpProber:
    """One connection per probe: none is reused after the instance has been replaced."""

    def __init__(self, health_path: str) -> None:
        self._health_path = health_path

    async def healthy(self, address: Address, timeout_s: float) -> bool | None:
        """True: answered 200. False: answered otherwise, or connection refused. None: no answer in time, or a full backlog.

        Raises OSError where the daemon itself is short of descriptors, memory or threads.
        """
        try:
            async with (
                asyncio.timeout(timeout_s),
                session_to(address) as session,
                session.get(url_of(address, self._health_path)) as response,
            ):
                return response.status == 200
        except TimeoutError:
            return None
        except OSError as error:  # aiohttp.ClientOSError is one
            if error.errno in OWN_SHORTAGE:
                raise
            return None if error.errno in BACKLOG_FULL else False
        except aiohttp.ClientError:
            return False

    async def completes(self, address: Address, model: str) -> bool:
        """True when one completion of one token (or one embedding) comes back with 200."""
        return await self.canary(address, model, COMPLETION_TIMEOUT_S) is True

    async def canary(self, address: Address, model: str, timeout_s: float) -> bool | None:
        """As `completes`; None: no answer within `timeout_s`, counted from when the daemon has a descriptor for it."""
        while True:
            try:
                return await self._one_token(address, model, timeout_s)
            except OSError as error:
                if error.errno not in OWN_SHORTAGE:
                    return False
            await asyncio.sleep(SHORTAGE_S)

    async def _one_token(self, address: Address, model: str, timeout_s: float) -> bool | None:
        """Raises OSError where the connection fails."""
        try:
            async with asyncio.timeout(timeout_s), session_to(address) as session:
                for path, body in _PROBES:
                    async with session.post(url_of(address, path), json={"model": model, **body}) as response:
                        await response.read()
                        if response.status == 200:
                            return True
        except TimeoutError:
            return None
        except aiohttp.ClientOSError:
            raise
        except aiohttp.ClientError:
            return False
        return False

    async def counters(self, address: Address, timeout_s: float) -> EngineMetrics | None:
        """The engine's own counters; None where it has none or does not answer in time. Raises OSError."""
        page = await fetch(address, "/metrics", timeout_s)
        return None if page is None else parse(page.decode(errors="replace"))
