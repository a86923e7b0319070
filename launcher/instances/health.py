"""Asking an instance whether it lives, and whether it really answers."""

from __future__ import annotations

import asyncio
import errno
from typing import Final

import aiohttp

from launcher.address import Address, UnixAddress
from launcher.errors import OWN_SHORTAGE
from launcher.instances.progress import Counters

# A first completion may have to wait for a compile.
COMPLETION_TIMEOUT_S: Final = 600.0

# vLLM's page has about 60 KiB; what is far above is none.
MAX_METRICS_BYTES: Final = 8 * 1024 * 1024

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
                _session(address) as session,
                session.get(_url(address, self._health_path)) as response,
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
            async with asyncio.timeout(timeout_s), _session(address) as session:
                for path, body in _PROBES:
                    async with session.post(_url(address, path), json={"model": model, **body}) as response:
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

    async def counters(self, address: Address) -> Counters | None:
        """vLLM's counters, from its /metrics; None where there are none, or no answer comes in time. Raises OSError."""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                _session(address) as session,
                session.get(_url(address, "/metrics")) as response,
            ):
                if response.status != 200:
                    return None
                page = bytearray()
                async for piece in response.content.iter_any():
                    page += piece
                    if len(page) > MAX_METRICS_BYTES:
                        return None
        except TimeoutError:
            return None
        except OSError as error:
            if error.errno in OWN_SHORTAGE:
                raise
            return None
        except aiohttp.ClientError:
            return None
        return Counters.parse(page.decode(errors="replace"))


def _session(address: Address) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector
    if isinstance(address, UnixAddress):
        connector = aiohttp.UnixConnector(address.path, force_close=True)
    else:
        connector = aiohttp.TCPConnector(force_close=True)
    # The deadline is asyncio.timeout's; aiohttp's own total of 300 s would cut a long first compile.
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))


def _url(address: Address, path: str) -> str:
    host = "localhost" if isinstance(address, UnixAddress) else str(address)
    return f"http://{host}{path}"
