"""W3C Trace Context: the `traceparent` and `tracestate` of a client. Pure."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from launcher.proxy.http1.requests import RequestHead

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
