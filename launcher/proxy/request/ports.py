"""What a request's decisions and its executor need of the two connections that serve it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from launcher.proxy.balancing.upstreams import Upstream
from launcher.proxy.sse.tracker import EventTracker


class Downstream(Protocol):
    """The client's connection."""

    paused: bool  # its write buffers are full

    @property
    def body_missing(self) -> bool:
        """The request's body has not been read to its end."""

    @property
    def buffered(self) -> int:
        """Bytes that wait in this process."""

    @property
    def unsent(self) -> int:
        """Bytes that wait in this process and in the kernel."""

    @property
    def write(self) -> Callable[[bytes], None]:
        """Send; never blocks."""

    def answered(self, *, keep: bool) -> None:
        """The response is complete; `keep`: the connection may carry another request."""

    def abort(self) -> None:
        """Close without a clean end: the client sees that the response is not whole."""

    def drop(self, why: str) -> None:
        """Give the client up; the rest of its response is lost."""


class UpstreamCall(Protocol):
    """One attempt: a request on one upstream."""

    @property
    def upstream(self) -> Upstream | None:
        """The instance; None is the overflow endpoint."""

    @property
    def tracker(self) -> EventTracker | None:
        """Of an event stream."""

    @property
    def reached(self) -> bool:
        """The upstream may have begun with the request: no connect that failed."""

    @property
    def events(self) -> int:
        """Whole events so far."""

    @property
    def bytes(self) -> int:
        """Bytes that the hot path passed to the client."""


class Cancellable(Protocol):
    """A timer or a task."""

    def cancel(self) -> object:
        """It does nothing from here on."""
