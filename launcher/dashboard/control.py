"""Reads from the daemon's control socket without blocking. Each request has a deadline."""

from __future__ import annotations

import asyncio
import http
import json
from typing import Any, Final

import aiohttp

from launcher.control.client import no_answer, refusal, unreachable, unreadable
from launcher.control.messages import PREFIX
from launcher.printable import printable_tree

# Of one request, connecting included. The daemon answers in milliseconds.
ANSWER_S: Final = 5.0
# At once; the others wait.
MAX_CONNECTIONS: Final = 8


class ControlReader:
    """Asks the daemon behind one control socket, over kept connections. Made inside an event loop."""

    def __init__(self, path: str) -> None:
        self._path = path
        connector = aiohttp.UnixConnector(path, limit=MAX_CONNECTIONS)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout())

    async def read(self, path: str, within_s: float = ANSWER_S) -> bytes:
        """The reply's body. Raises LauncherError."""
        try:
            async with (
                asyncio.timeout(within_s),
                self._session.get(f"http://localhost{PREFIX}{path}") as response,
            ):
                status, body = response.status, await response.read()
        except TimeoutError:
            raise no_answer(self._path, within_s) from None
        except aiohttp.ClientConnectorError as error:
            raise unreachable(self._path, error.os_error, within_s) from None
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._path, error, within_s) from None
        if status != http.HTTPStatus.OK:
            raise refusal(f"GET {path}", status, body)
        return body

    async def get(self, path: str, within_s: float = ANSWER_S) -> dict[str, Any]:
        """The reply's object, its texts printable. Raises LauncherError."""
        try:
            found: dict[str, Any] = printable_tree(json.loads(await self.read(path, within_s)))
        except ValueError as error:
            raise unreadable(self._path, error) from None
        return found

    async def close(self) -> None:
        await self._session.close()
