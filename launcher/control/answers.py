"""What each request of the protocol's table is answered: Operations asked, and its reply on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Final

import msgspec
from aiohttp import web

from launcher.control.arguments import (
    MAX_SHOWN,
    command_of,
    deadline,
    flag,
    follows,
    number,
    request_id_of,
    slot_of,
    slots_of,
    span_of,
)
from launcher.control.messages import REDACT, Endpoint, Request, SlotCommand
from launcher.control.operations import Operations
from launcher.errors import BusyError, LauncherError, NotFoundError
from launcher.printable import quoted
from launcher.redaction import Redactor

READS_ONLY: Final = ContextVar("reads_only", default=True)
"""Of the request that is being answered: whether its peer may read, and nothing else."""
# Shown to operators unmasked: the instances' output, counters, and usage by names of keys and models. The rest
# is masked for everybody: it is pasted into tickets.
_AS_IT_IS: Final = frozenset(
    {"status", "logs", "metrics", "usage", "usage_requests", "budgets", "cost", "request"}
)
# Never masked: numbers and names of states, by the megabyte.
_NO_SECRETS: Final = frozenset({"history"})
MAX_OVERRIDES: Final = 64
# Followers of logs at once.
MAX_FOLLOWERS: Final = 64

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Answers:
    """A handler for each name in the protocol's table. They raise LauncherError, which the server turns into a reply."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations
        self._followers = 0
        # One at a time: each such thread may keep the event loop from running for 5 ms (sys.setswitchinterval).
        self._masking = asyncio.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "status": self._status, "plan": self._plan, "config": self._config, "events": self._events,
            "topology": self._topology, "machine": self._machine, "measurements": self._measurements,
            "metrics": self._metrics, "logs": self._logs, "reloading": self._reloading, "reload": self._reload,
            "verify": self._verify, "act": self.act, "budgets": self._budgets,
            "spent_elsewhere": self._spent_elsewhere, "cost": self._cost,
            "usage": self._usage, "usage_requests": self._usage_requests, "request": self._request, "history": self._history,
        }  # fmt: skip

    async def redacted(
        self, request: web.Request, response: web.StreamResponse, endpoint: Endpoint | None
    ) -> web.StreamResponse:
        """With secrets masked: for those who may only read, where the request asks for it, and what is masked always."""
        wanted = READS_ONLY.get() or flag(request, REDACT.name)
        wanted = wanted or (
            endpoint is not None and endpoint.method == "GET" and endpoint.name not in _AS_IT_IS
        )
        if endpoint is not None and endpoint.name in _NO_SECRETS:
            wanted = False
        if wanted and isinstance(response, web.Response):
            redactor = await self._operations.redactor()
            body = response.body
            assert isinstance(body, bytes)  # noqa: S101  ours are
            async with self._masking:
                response.body = await asyncio.to_thread(_redacted, redactor, body, response.content_type)
        return response

    async def _status(self, _request: web.Request) -> web.Response:
        usage = await self._operations.usage_today()
        return json_answer(replace(self._operations.status(), usage=usage))

    async def _budgets(self, _request: web.Request) -> web.Response:
        return json_answer({"budgets": self._operations.budgets()})

    async def _spent_elsewhere(self, request: web.Request) -> web.Response:
        return json_answer(self._operations.spent_elsewhere(await request.read()))

    async def _usage(self, request: web.Request) -> web.Response:
        return json_answer(await self._operations.usage(dict(request.query)))

    async def _usage_requests(self, request: web.Request) -> web.Response:
        limit = number(request, "limit", "50")
        return json_answer(await self._operations.usage_requests(dict(request.query), limit))

    async def _request(self, request: web.Request) -> web.Response:
        return json_answer(await self._operations.request(request_id_of(request)))

    async def _cost(self, request: web.Request) -> web.Response:
        return json_answer(await self._operations.cost(request.query.get("since", "30d")))

    async def _plan(self, _request: web.Request) -> web.Response:
        return json_answer(self._operations.plan())

    async def _topology(self, _request: web.Request) -> web.Response:
        return json_answer(self._operations.topology())

    async def _machine(self, _request: web.Request) -> web.Response:
        return json_answer(await self._operations.machine())

    async def _measurements(self, _request: web.Request) -> web.Response:
        return json_answer({"measurements": await self._operations.measurements()})

    async def _config(self, _request: web.Request) -> web.Response:
        return json_answer(self._operations.config())

    async def _metrics(self, _request: web.Request) -> web.Response:
        page = await self._operations.metrics()
        return web.Response(text=page, content_type="text/plain")

    async def _events(self, request: web.Request) -> web.Response:
        count, after = number(request, "tail", "100"), number(request, "after", "0", digits=15)
        return json_answer({"events": self._operations.events(count, after)})

    async def _history(self, request: web.Request) -> web.Response:
        after = number(request, "after", "0", digits=15)
        body = await self._operations.history(span_of(request), after, slots_of(request))
        return web.Response(body=body, content_type="application/json")

    async def _reloading(self, _request: web.Request) -> web.Response:
        return json_answer(self._operations.reloading())

    async def _reload(self, request: web.Request) -> web.Response:
        overrides = request.query.getall("set", [])
        if len(overrides) > MAX_OVERRIDES:
            raise LauncherError(
                f"cannot reload with {len(overrides)} overrides: too many",
                f"put them into the configuration file (at most {MAX_OVERRIDES})",
            )
        begun = await self._operations.reload(
            overrides, dry_run=flag(request, "dry_run"), force=flag(request, "force")
        )
        return json_answer(begun)

    async def act(self, request: web.Request) -> web.Response:
        slot = slot_of(request)
        word = command_of(request)
        try:
            command = SlotCommand(word)
        except ValueError:
            raise NotFoundError(
                f"cannot '{quoted(word, MAX_SHOWN)}' a slot: no such command",
                f"commands are {', '.join(SlotCommand)}",
            ) from None
        asked = Request(command, force=flag(request, "force"), deadline_s=deadline(request))
        self._operations.act(slot, asked)
        await asyncio.sleep(0)  # the slot's owner takes the event before we report
        return json_answer(self._slot_status(slot))

    async def _verify(self, request: web.Request) -> web.Response:
        slot = slot_of(request)
        await self._operations.verify(slot)
        return json_answer(self._slot_status(slot))

    def _slot_status(self, slot: int) -> Any:
        return next(status for status in self._operations.status().slots if status.slot == slot)

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        slot = slot_of(request)
        tail = number(request, "tail", "100")
        if not follows(request):
            return json_answer({"lines": self._operations.log_tail(slot, tail)})
        if self._followers >= MAX_FOLLOWERS:
            raise BusyError(
                f"cannot follow slot '{slot}': {self._followers} clients already follow a slot",
                "end one of them",
            )
        redactor = await self._operations.redactor() if READS_ONLY.get() else None
        feed = self._operations.log_follow(slot, tail)
        self._followers += 1
        try:
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            async for line in feed:
                shown = line if redactor is None else redactor.tree(line)
                await response.write(msgspec.json.encode(shown) + b"\n")
        finally:
            self._followers -= 1
        return response


def _redacted(redactor: Redactor, body: bytes, content_type: str) -> bytes:
    if content_type != "application/json":
        return redactor.text(body.decode()).encode()
    return msgspec.json.encode(redactor.tree(msgspec.json.decode(body))) + b"\n"


def json_answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value) + b"\n", status=status, content_type="application/json"
    )
