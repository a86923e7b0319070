"""Asking an instance whether it lives, and whether it really answers."""

from __future__ import annotations

import asyncio
import errno
from typing import Final

import aiohttp

from launcher.address import Address
from launcher.errors import OWN_SHORTAGE
from launcher.telemetry.engine_pages import fetch, session_to, url_of
from launcher.telemetry.vllm_metrics import EngineMetrics, parse

# A first completion may have to wait for a compile.
COMPLETION_TIMEOUT_S: Final = 600.0

# What a UNIX socket with a full backlog gives: EAGAIN of connect(2). asyncio takes that for "in progress" and goes
# on with a socket that is not connected (ENOTCONN, EINVAL); uvloop reports it.
BACKLOG_FULL: Final = frozenset({errno.EAGAIN, errno.ENOTCONN, errno.EINVAL})

# Before a completion is tried again that the daemon itself had no descriptor or memory for.
SHORTAGE_S: Final = 1.0

# One token from whichever of these the model serves, tried in this order.
_PROBES: Final = (
    ("/v1/completions", {"prompt": "Hello, what is your name?", "max_tokens": 1, "temperature": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}),
    ("/v1/embeddings", {"input": "Hello"}),
)


class HttpProber:
    """Probes over HTTP; one short connection per question, so that nothing of an old life is re-used."""

    def __init__(self, health_path: str, timeout_s: float) -> None:
        self._health_path = health_path
        self.timeout_s = timeout_s

    async def healthy(self, address: Address) -> bool | None:
        """True: answers 200. False: answers otherwise, or nobody listens. None: no answer in time, or too busy for it.

        Raises OSError where the daemon lacks what it takes to ask.
        """
        try:
            async with (
                asyncio.timeout(self.timeout_s),
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
        """As `completes`; None when no answer came in time, which begins when we have what it takes to ask."""
        while True:
            try:
                return await self._one_token(address, model, timeout_s)
            except OSError as error:
                if error.errno not in OWN_SHORTAGE:
                    return False
            await asyncio.sleep(SHORTAGE_S)

    async def _one_token(self, address: Address, model: str, timeout_s: float) -> bool | None:
        """One try. Raises OSError where the connection fails."""
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

    async def counters(self, address: Address) -> EngineMetrics | None:
        """The engine's own counters; None where it has none or does not answer in time. Raises OSError."""
        page = await fetch(address, "/metrics", self.timeout_s)
        return None if page is None else parse(page.decode(errors="replace"))
