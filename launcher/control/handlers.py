"""What each request of the protocol's table is answered: Operations asked, and its reply on the wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final, Protocol

import msgspec
from aiohttp import web
from msgspec import Struct
from msgspec.structs import replace

from launcher.base.errors import BusyError, LauncherError, NotFoundError
from launcher.base.redaction import Redactor
from launcher.base.text import quoted
from launcher.control.connections import Bound, Peer, Shares
from launcher.control.messages import ENDPOINTS, REDACT, Endpoint, Request, SlotCommand

# --- What an operator may ask of a daemon, as the control socket needs it; daemon and tests implement it.


class Operations(Protocol):
    """What the daemon does for an operator."""

    def status(self) -> Any:
        """The whole state."""

    def act(self, slot: int, request: Request) -> None:
        """Ask for a change. Returns at once; raises NotFoundError for an unknown slot, RefusedError."""

    async def reload(
        self, overrides: Sequence[str], *, dry_run: bool = False, force: bool = False
    ) -> dict[str, Any]:
        """Re-read the configuration and begin to go there. Raises LauncherError; nothing has changed then."""

    async def history(self, span: str, after: int, slots: str) -> bytes:
        """The rows of a span after a time, as JSON. Raises LauncherError."""

    def reloading(self) -> dict[str, Any]:
        """How far the last reload has come."""

    def events(self, count: int, after: int) -> list[dict[str, Any]]:
        """The last events with a number above `after`, oldest first."""

    def plan(self) -> dict[str, Any]:
        """The plan that is running, as `plan --json` prints it."""

    def topology(self) -> dict[str, Any]:
        """The machine that the running plan was made for."""

    async def machine(self) -> Any:
        """The load of the machine."""

    async def measurements(self) -> Any:
        """The newest results of bench and tune."""

    def config(self) -> dict[str, Any]:
        """The configuration that is in force, secrets masked."""

    async def metrics(self) -> str:
        """The metrics page. Raises LauncherError."""

    async def usage_today(self) -> Any:
        """What was served since midnight; None without a ledger that can be read at once."""

    def budgets(self) -> Any:
        """The budgets of API keys, by name."""

    def spent_elsewhere(self, body: bytes) -> Any:
        """What API keys spent on other hosts. Raises LauncherError."""

    async def usage(self, asked: Mapping[str, str]) -> Any:
        """A report of the usage ledger. `asked`: the options of the request. Raises LauncherError."""

    async def usage_requests(self, asked: Mapping[str, str], limit: int) -> Any:
        """The latest single requests of the usage ledger. Raises LauncherError."""

    async def request(self, request_id: str) -> Any:
        """What became of one request. Raises NotFoundError for an unknown one."""

    async def cost(self, since: str) -> Any:
        """What tokens cost since a time. Raises LauncherError."""

    async def redactor(self) -> Redactor:
        """What masks every secret that the daemon knows."""

    def log_tail(self, slot: int, lines: int) -> list[dict[str, Any]]:
        """The last lines of a slot, oldest first. Raises LauncherError for an unknown slot."""

    def log_follow(self, slot: int, lines: int) -> AsyncGenerator[dict[str, Any], None]:
        """The last lines and then those that come, none lost between, until the caller closes it. Raises LauncherError for
        an unknown slot."""

    async def verify(self, slot: int) -> None:
        """Compare a slot's threads and pages with the plan now; the result is in `status`."""


# --- A change that a peer of the control socket asked for, as the audit trail records it. ---


class ControlAction(Struct, frozen=True):
    """Texts are those of the peer, masked, and of any length."""

    verb: str
    arguments: str  # path and query of the request
    slot: str
    peer: Peer
    status: int
    reason: str = ""  # why it was refused

    @property
    def result(self) -> str:
        return "refused" if self.status >= 400 else "done"


def unrecorded(_action: ControlAction) -> None:
    """Nobody keeps it."""


# --- Path and query parameters of a request, checked. ---

MAX_TAIL_LINES: Final = 100_000
HISTORY_SPANS: Final = ("1h", "1d", "90d")
MAX_DEADLINE_S: Final = 86_400.0
# Characters of an X-Request-Id that the proxy takes, and of the longest prefix that an engine puts before it.
MAX_REQUEST_ID: Final = 128 + 16
# Characters of a value that an error quotes.
MAX_SHOWN: Final = 80


def command_of(request: web.Request) -> str:
    return request.path.rpartition("/")[2]


def slot_of(request: web.Request) -> int:
    text = request.match_info["slot"]
    if not (text.isascii() and text.isdecimal()) or len(text) > 6:
        raise LauncherError(
            f"cannot use slot '{quoted(text, MAX_SHOWN)}': not a number",
            "give a slot number from `numa-launcher status`",
        )
    return int(text)


def request_id_of(request: web.Request) -> str:
    text = request.match_info["request"]
    if len(text) > MAX_REQUEST_ID:
        raise LauncherError(
            f"cannot use request id '{quoted(text, MAX_SHOWN)}': more than {MAX_REQUEST_ID} characters",
            "give the X-Request-Id of a response",
        )
    return text


def number(request: web.Request, name: str, default: str, digits: int = 6) -> int:
    text = request.query.get(name, default)
    if (
        not (text.isascii() and text.isdecimal())
        or len(text) > digits
        or (digits == 6 and int(text) > MAX_TAIL_LINES)
    ):
        raise LauncherError(
            f"cannot use {name}='{quoted(text, MAX_SHOWN)}': not a whole number of at most "
            + (f"{MAX_TAIL_LINES}" if digits == 6 else f"{digits} digits"),
            f"give {name}={default}",
        )
    return int(text)


def span_of(request: web.Request) -> str:
    text = request.query.get("span", HISTORY_SPANS[0])
    if text not in HISTORY_SPANS:
        raise LauncherError(
            f"cannot show the history of '{quoted(text, MAX_SHOWN)}': no such span",
            f"spans are {', '.join(HISTORY_SPANS)}",
        )
    return text


def slots_of(request: web.Request) -> str:
    text = request.query.get("slots", "all")
    if text not in {"all", "none"} and (not (text.isascii() and text.isdecimal()) or len(text) > 6):
        raise LauncherError(
            f"cannot show the history of slots '{quoted(text, MAX_SHOWN)}'",
            "give slots=all, slots=none or the number of one slot",
        )
    return text if text in {"all", "none"} else str(int(text))


def flag(request: web.Request, name: str) -> bool:
    """A switch in the query. Raises LauncherError: what is meant to be one must not be taken for none."""
    text = request.query.get(name, "0")
    if text not in {"0", "1", "false", "true"}:
        raise LauncherError(
            f"cannot use {name}='{quoted(text, MAX_SHOWN)}': it is a switch", f"give {name}=1, or omit it"
        )
    return text in {"1", "true"}


def follows(request: web.Request) -> bool:
    return request.method == "GET" and flag(request, "follow")


def deadline(request: web.Request) -> float | None:
    text = request.query.get("deadline")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DEADLINE_S:  # nan is neither
        raise LauncherError(
            f"cannot drain with deadline '{quoted(text, MAX_SHOWN)}': not seconds from 0 to {MAX_DEADLINE_S:.0f}",
            "give deadline=30",
        )
    return seconds


class Asking(Struct, frozen=True):
    """The user of a request."""

    uid: int
    reads_only: bool
    """He may read, and nothing else."""


ASKING: Final[ContextVar[Asking]] = ContextVar("asking")
"""Of the request that is being answered."""
# Shown to operators unmasked: the instances' output, counters, and usage by names of keys and models. The rest
# is masked for everybody: it is pasted into tickets.
_AS_IT_IS: Final = frozenset(
    {"status", "logs", "metrics", "usage", "usage_requests", "budgets", "cost", "request"}
)
# Never masked: numbers and names of states, by the megabyte.
_NO_SECRETS: Final = frozenset({"history"})
MAX_OVERRIDES: Final = 64
# Followers of logs at once.
FOLLOWERS: Final = Bound(16, 64)
# Lines that one follower is sent in one turn of the event loop: at most 5 ms of CPU.
LINES_A_TURN: Final = 64

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class NotYet:
    """Instead of Answers, while a daemon waits for what it lacks: to every question, that and why."""

    def __init__(self, why: Callable[[], LauncherError]) -> None:
        self._why = why

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {endpoint.name: self.act for endpoint in ENDPOINTS}

    async def act(self, _request: web.Request) -> web.StreamResponse:
        """Raises BusyError."""
        why = self._why()
        raise BusyError(f"cannot answer yet, the daemon waits: {why.message}", why.remedy)

    async def redacted(
        self, _request: web.Request, response: web.StreamResponse, _endpoint: Endpoint | None
    ) -> web.StreamResponse:
        return response


class Answers:
    """A handler for each name in the protocol's table. They raise LauncherError, which the server turns into a reply."""

    def __init__(self, operations: Operations, followers: Bound = FOLLOWERS) -> None:
        self._operations = operations
        self._followers = Shares(followers)
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
        wanted = ASKING.get().reads_only or flag(request, REDACT.name)
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
        for status in self._operations.status().slots:
            if status.slot == slot:
                return status
        raise NotFoundError(
            f"cannot show slot '{slot}': a reload has removed it meanwhile",
            "`numa-launcher status` shows the slots that there are",
        )

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        slot = slot_of(request)
        tail = number(request, "tail", "100")
        if not follows(request):
            return json_answer({"lines": self._operations.log_tail(slot, tail)})
        asking = ASKING.get()
        feed = self._operations.log_follow(slot, tail)
        if not asking.reads_only:
            async with contextlib.aclosing(feed):
                return await self._follow(request, feed)
        if not self._followers.take(asking.uid):
            raise BusyError(
                f"cannot follow slot '{slot}': too many clients who may only read follow a slot",
                "end one of them",
            )
        try:
            async with contextlib.aclosing(feed), contextlib.aclosing(self._masked(feed)) as masked:
                return await self._follow(request, masked)
        finally:
            self._followers.give(asking.uid)

    async def _masked(self, feed: AsyncIterator[dict[str, Any]]) -> AsyncGenerator[dict[str, Any], None]:
        redactor = await self._operations.redactor()
        async for line in feed:
            async with self._masking:  # a line of 8 KiB takes 9 ms
                shown = await asyncio.to_thread(redactor.tree, line)
            yield shown

    async def _follow(self, request: web.Request, feed: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        count = 0
        with contextlib.suppress(ConnectionError):  # the client has left
            async for line in feed:
                await response.write(msgspec.json.encode(line) + b"\n")
                count += 1
                if count % LINES_A_TURN == 0:  # lines that are there already come without a turn of the loop
                    await asyncio.sleep(0)
        return response


def _redacted(redactor: Redactor, body: bytes, content_type: str) -> bytes:
    if content_type != "application/json":
        return redactor.text(body.decode()).encode()
    return msgspec.json.encode(redactor.tree(msgspec.json.decode(body))) + b"\n"


def json_answer(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value) + b"\n", status=status, content_type="application/json"
    )
