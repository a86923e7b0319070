"""Middleware of vLLM: every response says which host's engine answered (`vllm serve --middleware`)."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

HEADER = b"x-engine-host"
_HOST = os.environ.get("FLEET_HOST", "").encode()

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Callable[[], Awaitable[Message]], Send], Awaitable[None]]


class EngineHeader:
    """An ASGI application around another one."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, _HOST)]
            await send(message)

        await self._app(scope, receive, named)
