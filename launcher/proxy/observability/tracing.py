"""Which requests are traced, and the context that their upstreams get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from launcher.proxy.observability.trace_context import lines_of, parent_of
from launcher.proxy.request.record import Request
from launcher.timeline import Ended, Trace

_SHARE_BITS: Final = 30
_SPAN_BITS: Final = 63
_TRACE_BITS: Final = 128


class RequestTracing:
    """Decides once for each request. A client's `traceparent` decides by its sampled flag, else `share` does."""

    def __init__(self, share: float, draw: Callable[[int], int], export: Callable[[Ended], None]) -> None:
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

    def record(self, ended: Ended) -> None:
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
