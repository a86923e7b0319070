"""What each request below /api is answered: read from the daemon, shared by all pages for a short time."""

from __future__ import annotations

import asyncio
import http
import json
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Generic, Protocol, TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from launcher.base.errors import BusyError, LauncherError, NotFoundError
from launcher.base.text import printable_tree, quoted
from launcher.control.client import UnreachableError, no_answer, refusal, unreachable, unreadable
from launcher.control.messages import PREFIX
from launcher.dashboard.poll import Packed, Reads, or_none

# --- Answers of the daemon that several pages share for a short time: each is asked for once. ---

T = TypeVar("T")
# Kept at once: what is asked for is chosen by pages.
MAX_KEPT: Final = 64


class Shared(Generic[T]):
    """Results by key. A failed one is kept for nobody, but those who wait for it get its error."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, asyncio.Task[T]]] = OrderedDict()

    async def get(self, key: str, keep_s: float, ask: Callable[[], Awaitable[T]]) -> T:
        """The result of `ask` that is at most `keep_s` seconds old. Raises what `ask` raises."""
        until, task = self._kept.get(key, (0.0, None))
        if task is None or (task.done() and (self._clock() >= until or _failed(task))):
            task = asyncio.ensure_future(ask())
            task.add_done_callback(_failed)  # looks at the error, also when nobody waits for it
            self._kept[key] = (self._clock() + keep_s, task)
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        # A page that leaves ends only its own wait.
        return await asyncio.shield(task)


def _failed(task: asyncio.Task[T]) -> bool:
    return task.cancelled() or task.exception() is not None


# Span -> milliseconds of a row.
SPANS: Final = {"1h": 2_000, "1d": 60_000, "90d": 600_000}
# Seconds for which pages share an answer.
_KEEP_S: Final = {"topology": 30.0, "measurements": 30.0, "usage": 10.0, "slot": 4.0, "request": 1.0}
_KEEP_HISTORY_S: Final = {"1h": 1.0, "1d": 15.0, "90d": 60.0}
# Longer ids of requests are refused by the proxy, too.
_MAX_ID: Final = 200
_LINES: Final = 200
# Lines searched for those of the failed generation, as `numa-launcher why` does.
_TAIL: Final = 2000
_WHY_LINES: Final = 20
_LATEST: Final = "/usage/requests?since=1h&limit=30&redact=1"


_NO_TOPOLOGY: Final[Mapping[str, Any]] = {
    "name": "", "cpu_count": 0, "sockets": [], "nodes": [], "cores": [], "reserved": "", "allowed": "",
}  # fmt: skip


class Control(Reads, Protocol):
    """The control socket, and its replies as they come."""

    async def read(self, path: str, within_s: float = ...) -> bytes: ...


class Answers:
    def __init__(self, control: Control, clock: Callable[[], float] = time.monotonic) -> None:
        self._control = control
        self._shared: Shared[Packed] = Shared(clock)
        self._failed: dict[int, tuple[tuple[int, float], list[dict[str, Any]]]] = {}
        """By slot: generation and end of the instance that failed last, and its last lines."""

    async def topology(self) -> Packed:
        return await self._shown("/topology", "topology", _NO_TOPOLOGY)

    async def measurements(self) -> Packed:
        return await self._shown("/measurements", "measurements", {"measurements": []})

    async def _shown(self, path: str, kind: str, empty: Mapping[str, Any]) -> Packed:
        async def ask() -> Packed:
            return _packed(await _or_empty(self._control.get(path), empty))

        return await self._shared.get(path, _KEEP_S[kind], ask)

    async def request(self, name: str) -> Packed:
        """The timeline of one request. Raises LauncherError."""
        if not 0 < len(name) <= _MAX_ID:
            raise LauncherError(
                f"cannot show request '{quoted(name, 80)}': its id has {len(name)} characters, not 1 to {_MAX_ID}",
                "give the id from the response's header X-Request-Id",
            )
        path = f"/requests/{quote(name, safe='')}"

        async def ask() -> Packed:
            return _packed(await self._control.get(path))

        return await self._shared.get(path, _KEEP_S["request"], ask)

    async def history(self, span: str, after: str, slots: str) -> Packed:
        """`slots`: `none`, or the number of one, whose columns are added. Raises LauncherError."""
        if span not in SPANS:
            raise LauncherError(
                f"cannot show the history of '{quoted(span, 80)}': no such span",
                f"spans are {', '.join(SPANS)}",
            )
        if not _is_number(after, 15):
            raise LauncherError(
                f"cannot show the history after '{quoted(after, 80)}': not milliseconds since the epoch",
                "give after=0",
            )
        if slots != "none" and not _is_number(slots, 6):
            raise LauncherError(
                f"cannot show the history of slot '{quoted(slots, 80)}': not a number",
                "give slots=none or slots=0",
            )
        path = f"/history?{urlencode({'span': span, 'after': int(after), 'slots': slots})}"

        async def read() -> dict[str, Any]:
            return rounded(msgspec.json.decode(await self._control.read(path)))

        async def ask() -> Packed:
            none = {"span": span, "step_ms": SPANS[span], "columns": [], "rows": [], "newest": int(after)}
            return _packed(await _or_empty(read(), none, raised=()))

        return await self._shared.get(path, _KEEP_HISTORY_S[span], ask)

    async def slot(self, text: str) -> Packed:
        """All about one slot. Raises LauncherError."""
        if not _is_number(text, 6):
            raise LauncherError(
                f"cannot show slot '{quoted(text, 80)}': not a number", "give a slot number from `status`"
            )
        number = int(text)

        async def ask() -> Packed:
            return _packed(await self._slot(number))

        return await self._shared.get(f"slot {number}", _KEEP_S["slot"], ask)

    async def _slot(self, number: int) -> dict[str, Any]:
        status = await self._control.get("/status?redact=1")
        slot = next((found for found in status["slots"] if found["slot"] == number), None)
        if slot is None:
            known = ", ".join(str(found["slot"]) for found in status["slots"])
            raise NotFoundError(f"cannot show slot '{number}': no such slot", f"slots are {known}")
        lines = await self._log(number, _LINES)
        plan = await self._control.get("/plan")
        verified = slot["verified"] or {}
        return {
            "slot": slot,
            "why": {
                "cause": slot["last_cause"], "at": slot["last_cause_at"],
                "of_generation": slot["last_cause_generation"], "lines": await self._last_words(slot),
            },
            "differences": verified.get("differences", []),
            "foreign": verified.get("foreign", []),
            "argv": next((planned.get("argv") for planned in plan["slots"] if planned["slot"] == number), None),
            "logs": lines,
        }  # fmt: skip

    async def _log(self, slot: int, count: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._control.get(f"/slots/{slot}/logs?tail={count}&redact=1"))[
            "lines"
        ]
        return found

    async def _last_words(self, slot: dict[str, Any]) -> list[dict[str, Any]]:
        """Last lines of the instance that failed last: they do not change, and masking so many takes the daemon 0.1 s."""
        number, generation = slot["slot"], slot["last_cause_generation"]
        if generation is None:
            return []
        known = self._failed.get(number)
        if known is None or known[0] != (generation, slot["last_cause_at"]):
            lines = [line for line in await self._log(number, _TAIL) if line["generation"] == generation]
            known = self._failed[number] = ((generation, slot["last_cause_at"]), lines[-_WHY_LINES:])
        return known[1]

    async def usage(self) -> Packed:
        async def ask() -> Packed:
            return _packed(
                {
                    "keys": await self._maybe("/usage?since=today&by=key&redact=1"),
                    "models": await self._maybe("/usage?since=today&by=model&redact=1"),
                    "cost": await self._maybe("/cost?since=today&redact=1"),
                    "budgets": (await self._maybe("/budgets?redact=1") or {}).get("budgets"),
                    "latest": (await self._maybe(_LATEST) or {}).get("requests"),
                }
            )

        return await self._shared.get("usage", _KEEP_S["usage"], ask)

    async def _maybe(self, path: str) -> dict[str, Any] | None:
        """None also where the ledger is off."""
        return await or_none(self._control.get(path))


async def _or_empty(
    answer: Awaitable[dict[str, Any]],
    empty: Mapping[str, Any],
    raised: tuple[type[LauncherError], ...] = (UnreachableError, BusyError),
) -> dict[str, Any]:
    """`empty` and `trouble` where the daemon has no such answer: the page shows the rest. `raised` errors are raised."""
    try:
        return await answer
    except LauncherError as error:
        if isinstance(error, raised):
            raise
        return {**empty, "trouble": f"{error.message}; {error.remedy}"}


def rounded(history: dict[str, Any]) -> dict[str, Any]:
    """With three significant digits, which is what a chart shows: half the bytes."""
    return history | {"rows": [[row[0], *map(_three_digits, row[1:])] for row in history["rows"]]}


def _three_digits(value: Any) -> Any:
    if not isinstance(value, float | int) or isinstance(value, bool):
        return value
    short = float(f"{value:.3g}")
    return int(short) if short.is_integer() else short


def _is_number(text: str, digits: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= digits


def _packed(value: Any) -> Packed:
    return Packed.of(msgspec.json.encode(value))


# --- Reads from the daemon's control socket without blocking. Each request has a deadline. ---

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
