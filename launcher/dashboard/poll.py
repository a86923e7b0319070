"""Asks the daemon once for all pages, and packs the answer once."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from launcher.base.errors import LauncherError
from launcher.control.verdict import Verdict, judge, no_answer
from launcher.dashboard.changes import Changes

# --- What `GET /api/now` answers, from what the daemon said last. ---


class Seen(Struct, frozen=True, kw_only=True):
    """The daemon's last answers. `status` is the last known one when it does not answer now."""

    at: float | None = None
    """Time of `status`; None: the daemon has not answered yet."""
    status: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    figures: dict[str, Any] | None = None
    verdict: Verdict | None = None
    """On `status` and `machine`."""
    trouble: tuple[str, str] | None = None
    """Why there is no newer answer, and the remedy."""


def frame(seen: Seen, changes: Changes, after: int, now: float, *, has_fleet: bool = False) -> dict[str, Any]:
    """`after`: changes of earlier events are left out."""
    return {
        "time": seen.at,
        "age_s": None if seen.at is None else max(0.0, now - seen.at),
        "version": None if seen.status is None else seen.status["version"],
        "answers": seen.trouble is None and seen.status is not None,
        "trouble": "" if seen.trouble is None else "; ".join(seen.trouble),
        "verdict": shown_verdict(_verdict(seen, now)),
        "status": seen.status,
        "machine": seen.machine,
        "figures": seen.figures,
        "changes": changes.since(after),
        "newest_event": changes.newest,
        "has_fleet": has_fleet,
    }


def shown_verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "level": verdict.level,
        "line": verdict.line,
        "problems": [
            {
                "what": problem.what, "remedy": problem.remedy, "slot": problem.slot, "host": problem.host,
                "level": problem.level, "evidence": problem.evidence,
            }
            for problem in verdict.problems
        ],
    }  # fmt: skip


def _verdict(seen: Seen, now: float) -> Verdict:
    if seen.trouble is not None:
        return no_answer(*seen.trouble, None if seen.at is None else now - seen.at)
    return seen.verdict or no_answer("the daemon has not answered yet", "", None)


# The daemon is asked at most this often, and only when a page asks.
POLL_S: Final = 2.0
# A page waits this long for a slow daemon; then it gets the last frame.
PATIENCE_S: Final = 1.0
# Packed frames kept of one poll: pages differ in the events that they have.
_KEPT: Final = 16
_COMPRESSION: Final = 6
_OTHER_VERSION: Final = (
    "daemon and dashboard may be of different versions: restart both (systemctl restart numa-launcher)"
)
# The newest row of the history is at most this old.
_FIGURES_S: Final = 10.0


class Reads(Protocol):
    """The control socket."""

    async def get(self, path: str, within_s: float = ...) -> dict[str, Any]: ...


class Packed(Struct, frozen=True):
    """A JSON text, plain and compressed."""

    body: bytes
    compressed: bytes
    made: float
    """Monotonic time."""

    @classmethod
    def of(cls, body: bytes) -> Packed:
        return cls(body, gzip.compress(body, _COMPRESSION, mtime=0), time.monotonic())

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.made


class Poll:
    """The daemon's state for all pages."""

    def __init__(
        self,
        control: Reads,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        has_fleet: bool = False,
    ) -> None:
        self._control = control
        self._has_fleet = has_fleet
        self._clock, self._monotonic = clock, monotonic
        self._seen = Seen()
        self._changes = Changes()
        self._packed: dict[int, Packed] = {}
        self._asked: float | None = None
        self._look: asyncio.Task[None] | None = None

    async def frame(self, after: int) -> Packed:
        """The newest frame for a page that has the events up to `after`."""
        now = self._monotonic()
        if (self._look is None or self._look.done()) and (self._asked is None or now - self._asked >= POLL_S):
            self._asked = now
            self._look = asyncio.create_task(self._ask(), name="ask the daemon")
        if self._look is not None and not self._look.done():
            await asyncio.wait({self._look}, timeout=PATIENCE_S)
        if after not in self._packed:
            if len(self._packed) >= _KEPT:
                self._packed.clear()
            made = frame(self._seen, self._changes, after, self._clock(), has_fleet=self._has_fleet)
            self._packed[after] = Packed.of(msgspec.json.encode(made))
        return self._packed[after]

    async def close(self) -> None:
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait({self._look})

    async def _ask(self) -> None:
        recent = int((self._clock() - _FIGURES_S) * 1000)
        try:
            status, machine, events, history = await asyncio.gather(
                self._control.get("/status?redact=1"),
                or_none(self._control.get("/machine")),
                or_none(self._control.get(f"/events?tail=1000&after={self._changes.newest}")),
                or_none(self._control.get(f"/history?span=1h&slots=none&after={recent}")),
            )
            at = self._clock()
            found = judge(status, at, machine)
            self._changes.add([] if events is None else events["events"])
            self._seen = Seen(at=at, status=status, machine=machine, figures=_newest(history), verdict=found)
        except LauncherError as error:
            self._seen = replace(self._seen, trouble=(error.message, error.remedy))
        except (LookupError, TypeError, ValueError) as error:
            self._seen = replace(
                self._seen, trouble=(f"cannot read the daemon's answer: {error!r}", _OTHER_VERSION)
            )
        self._packed = {}


def _newest(history: dict[str, Any] | None) -> dict[str, Any] | None:
    """The newest row by column."""
    if not history or not history["rows"]:
        return None
    row = history["rows"][-1]
    return {"time": row[0] / 1000, **dict(zip(history["columns"], row[1:], strict=False))}


async def or_none(answer: Awaitable[dict[str, Any]]) -> dict[str, Any] | None:
    """None where the daemon has no such answer, or none in time: the frame goes without."""
    try:
        return await answer
    except LauncherError:
        return None
