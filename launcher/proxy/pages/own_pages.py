"""Our own pages on their way to clients: rendered here, without a connection of their own.

A page that must ask instances first is rendered in a task of its request. It ends with its client, or after
PAGE_TIMEOUT_S; a thousand clients that want one at once cost no file descriptor beside their own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from launcher.proxy.errors import HttpError, unavailable
from launcher.proxy.routes import Kind, Match

if TYPE_CHECKING:
    from collections.abc import Callable

    from launcher.proxy.dispatch.relay import Relay
    from launcher.proxy.pages.application import Application

PAGE_TIMEOUT_S: Final = 30.0


class OwnPages:
    """Owner of the tasks that render. `close` ends them."""

    def __init__(self, application: Application, retry_after_s: Callable[[], int]) -> None:
        self._application = application
        self._retry_after_s = retry_after_s
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, relay: Relay, found: Match) -> None:
        """Answer a request for a page, now or later. Raises HttpError."""
        if found.route.kind is Kind.HEALTH:
            relay.show(self._application.health())
            return
        task = asyncio.get_running_loop().create_task(self._render(relay, found), name="page")
        relay.page = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _render(self, relay: Relay, found: Match) -> None:
        try:
            async with asyncio.timeout(PAGE_TIMEOUT_S):
                page = await self._application.page(found, None if relay.key is None else relay.key.record.id)
            if not relay.done:
                relay.show(page)
        except HttpError as refusal:
            relay.refuse(refusal)
        except TimeoutError:
            relay.refuse(
                unavailable("the page was not ready in time: instances do not answer", self._retry_after_s())
            )
        except Exception:
            relay.fault()

    async def close(self) -> None:
        """Nobody waits for a page any more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
