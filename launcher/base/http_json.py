"""The one fetcher of engines' own pages over HTTP. Each request has a connection of its own, so that nothing of an
ended instance is used again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, assert_never

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

from launcher.base.address import Address, TcpAddress, UnixAddress
from launcher.base.errors import OWN_SHORTAGE

MAX_PAGE_BYTES: Final = 16 << 20  # vLLM's metrics page has about 60 KiB; a page far above that is not one


async def fetch(
    address: Address, path: str, timeout_s: float, body: Mapping[str, object] | None = None
) -> bytes | None:
    """The page, or the answer to a POST of `body`; None unless the engine answers 200 within `timeout_s` with at most
    MAX_PAGE_BYTES.

    Raises OSError when this process lacks file descriptors or memory for the request."""
    method = "GET" if body is None else "POST"
    try:
        async with (
            asyncio.timeout(timeout_s),
            session_to(address) as session,
            session.request(method, url_of(address, path), json=body, allow_redirects=False) as response,
        ):
            return await _read(response) if response.status == 200 else None
    except OSError as error:  # TimeoutError and aiohttp.ClientOSError are among them
        if error.errno in OWN_SHORTAGE:
            raise
    # aiohttp's pure-Python parser raises HttpProcessingError.
    except (aiohttp.ClientError, HttpProcessingError):
        pass
    return None


async def _read(response: aiohttp.ClientResponse) -> bytes | None:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_PAGE_BYTES:
            return None
    return bytes(body)


def session_to(address: Address) -> aiohttp.ClientSession:
    """A client whose connections end with each response. It has no deadline: callers set one with asyncio.timeout."""
    connector: aiohttp.BaseConnector
    match address:
        case UnixAddress(path):
            connector = aiohttp.UnixConnector(path, force_close=True)
        case TcpAddress():
            connector = aiohttp.TCPConnector(force_close=True, ttl_dns_cache=None)
        case _:
            assert_never(address)
    timeout = aiohttp.ClientTimeout(total=None)  # aiohttp's own total of 300 s would cut a long first compile
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout)


def url_of(address: Address, path: str) -> str:
    match address:
        case UnixAddress():
            return f"http://localhost{path}"
        case TcpAddress(host, port):
            return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"
        case _:
            assert_never(address)
