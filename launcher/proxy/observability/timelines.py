"""The latest requests, for whoever asks what became of one: all for a short time, failed and late ones for longer."""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from launcher.accounts.ended_request import EndedRequest, Trace
from launcher.proxy.http1.requests import RequestHead
from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.record import Request

# About 5 MiB in all: 0.7 KiB each, an unusual one 2 KiB.
RECENT: Final = 4096
UNUSUAL: Final = 1024  # failed, retried, continued, or sent to an overflow endpoint
LATE: Final = 128  # those that waited longest, in each half-hour; two half-hours are kept
LATE_S: Final = 1800.0

_Late = tuple[float, int, EndedRequest]  # seconds waited, a number, the request


class Timelines:
    """A bounded number of ended requests. One event loop, no other owner."""

    def __init__(self) -> None:
        self._recent: deque[EndedRequest] = deque(maxlen=RECENT)
        self._unusual: deque[EndedRequest] = deque(maxlen=UNUSUAL)
        self._late: list[_Late] = []  # a heap, the shortest wait first
        self._late_before: list[_Late] = []  # of the half-hour before
        self._late_from_s = 0.0  # a shorter wait is not among the longest
        self._late_until = 0.0  # loop time at which the half-hour ends
        self._number = 0

    def keep(self, ended: EndedRequest, now: float) -> None:
        """A request has ended. `now`: loop time."""
        self._recent.append(ended)
        if ended.steps is not None or ended.outcome == Outcome.FAILED:
            self._unusual.append(ended)
        # What its client waited for: a stream's first token, and before any other response the queue.
        waited_s = ended.first_byte_s if ended.streamed else ended.queued_s
        if waited_s is not None and (waited_s > self._late_from_s or now >= self._late_until):
            self._keep_late(waited_s, ended, now)

    def _keep_late(self, waited_s: float, ended: EndedRequest, now: float) -> None:
        if now >= self._late_until:
            self._late_before = self._late if now < self._late_until + LATE_S else []
            self._late, self._late_from_s, self._late_until = [], 0.0, now + LATE_S
        self._number += 1
        heapq.heappush(self._late, (waited_s, self._number, ended))
        if len(self._late) > LATE:
            heapq.heappop(self._late)
            self._late_from_s = self._late[0][0]

    def find(self, request_id: str) -> list[EndedRequest]:
        """Every ended request with this id, the latest first."""
        found = {id(ended): ended for ended in self._all() if ended.request_id == request_id}
        return sorted(found.values(), key=lambda ended: ended.ended_at, reverse=True)

    def _all(self) -> Iterator[EndedRequest]:
        yield from self._recent
        yield from self._unusual
        for _, _, ended in self._late:
            yield ended
        for _, _, ended in self._late_before:
            yield ended

    @property
    def complete_since(self) -> float | None:
        """Unix time of the earliest end from which on every request is kept; None: none is missing."""
        return self._recent[0].ended_at if len(self._recent) == RECENT else None

    def __len__(self) -> int:
        """Requests that are kept for a short time."""
        return len(self._recent)


# --- W3C Trace Context: the `traceparent` and `tracestate` of a client. ---

FIELDS: Final = (b"traceparent", b"tracestate")
# Version, trace id, parent id, flags; versions after 00 may have more behind them.
_PARENT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_STATE: Final = re.compile(r"[\x20-\x7e]{1,512}")


class Parent(NamedTuple):
    """Of a request: the caller's span."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str
    """Its tracestate; "" for none."""


def parent_of(head: RequestHead) -> Parent | None:
    """None without a valid one."""
    if b"\r\ntraceparent:" not in head.lowered:
        return None
    values = head.all(b"traceparent")
    found = _PARENT.fullmatch(values[0]) if len(values) == 1 else None
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    state = ",".join(head.all(b"tracestate"))
    sampled = bool(int(found[4], 16) & 1)
    return Parent(found[2], found[3], sampled, state if _STATE.fullmatch(state) else "")


def lines_of(trace_id: str, span_id: str, state: str, *, sampled: bool) -> bytes:
    """The field lines of a context, each ended by CRLF."""
    line = f"traceparent: 00-{trace_id}-{span_id}-{sampled:02x}\r\n"
    return f"{line}tracestate: {state}\r\n".encode() if state else line.encode()


# --- Which requests are traced, and the context that their upstreams get. ---

_SHARE_BITS: Final = 30
_SPAN_BITS: Final = 63
_TRACE_BITS: Final = 128


class RequestTracing:
    """Decides once for each request. A client's `traceparent` decides by its sampled flag, else `share` does."""

    def __init__(
        self, share: float, draw: Callable[[int], int], export: Callable[[EndedRequest], None]
    ) -> None:
        """`draw`: an integer of so many random bits. `export`: takes a traced request that has ended; returns at once and
        never raises."""
        self._below = round(share * (1 << _SHARE_BITS))
        self._draw = draw
        self._export = export
        # Of all requests that are not traced. Without a parent an instance would begin a trace of its own.
        trace_id, span_id = f"{draw(_TRACE_BITS) | 1:032x}", draw(_SPAN_BITS) + 1
        self._untraced = Trace(trace_id, span_id, sampled=False)
        self._untraced_lines = lines_of(trace_id, f"{span_id:016x}", "", sampled=False)

    def lines(self, request: Request) -> bytes:
        """The field lines of its next attempt, in the place of its client's."""
        trace = request.trace
        if trace is None:
            request.trace = trace = self._begin(request)
        if trace is self._untraced:
            return self._untraced_lines
        if not trace.sampled:
            return lines_of(trace.trace_id, trace.parent_id, trace.state, sampled=False)
        trace.sent += 1
        return lines_of(trace.trace_id, f"{trace.span_id + trace.sent:016x}", trace.state, sampled=True)

    def lines_outside(self, request: Request) -> bytes:
        """The same for an overflow endpoint, which gets no context that is neither the client's nor traced."""
        lines = self.lines(request)
        return b"" if request.trace is self._untraced else lines

    def decide(self, request: Request) -> None:
        """Of a request that ends, and may never have been sent."""
        if request.trace is None:
            request.trace = self._begin(request)

    def record(self, ended: EndedRequest) -> None:
        """A request has ended."""
        if ended.trace is not None:
            self._export(ended)

    def _begin(self, request: Request) -> Trace:
        parent = parent_of(request.head)
        if parent is not None:
            span_id = self._draw(_SPAN_BITS) + 1
            return Trace(parent.trace_id, span_id, parent.span_id, parent.state, sampled=parent.sampled)
        if self._draw(_SHARE_BITS) >= self._below:
            return self._untraced
        # An attempt's span has its request's number plus the attempt's: all fit into 64 bits, and none is 0.
        return Trace(f"{self._draw(_TRACE_BITS) | 1:032x}", self._draw(_SPAN_BITS) + 1, sampled=True)
