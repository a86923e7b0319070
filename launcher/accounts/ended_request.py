"""One ended request, as everything that keeps or tells requests takes it. No word of its prompt or response. Pure."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class What:
    """Names of steps."""

    RECEIVED: Final = "received"
    QUEUED: Final = "queued"
    SENT: Final = "sent"
    FIRST_TOKEN: Final = "first token"  # noqa: S105  not a password
    FAILED: Final = "attempt failed"
    CONTINUED: Final = "continued"
    OVERFLOWED: Final = "overflowed"
    ENDED: Final = "ended"


class Step(Struct, frozen=True, gc=False):
    """One step of a request."""

    at_s: float
    """Seconds since its arrival."""
    what: str
    """received (its head), queued, sent (to an instance), first token (of a stream), attempt failed, continued (the first
    bytes of the rest of a stream), overflowed (sent to an overflow endpoint) or ended."""
    slot: int | None = None
    """Slot of the instance."""
    generation: int | None = None
    """Its generation; null: it is not known any more."""
    endpoint: str | None = None
    """Name of the overflow endpoint."""
    why: str | None = None
    """Why, where there is more to say."""


class Trace(Struct, gc=False):
    """The trace that a request belongs to."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: int
    """Id of the request's own span; those of its attempts follow it."""
    parent_id: str = ""
    """Id of the client's span, 16 hexadecimal digits."""
    state: str = ""
    """The client's tracestate."""
    sampled: bool = True
    sent: int = 0
    """Attempts so far."""


class EndedRequest(Struct, frozen=True, gc=False):
    """Made once, when a request has ended; also of one in flight that somebody asks about, without an outcome. Texts are ""
    where there is none. The ledger keeps the fields up to `streamed`, as rows (request_rows.py)."""

    ended_at: float  # Unix time, seconds
    request_id: str
    key: str = ""  # name of its API key
    model: str = ""
    adapter: str = ""
    path: str = ""  # its route
    status: int = 0  # of the response; 0: none was sent
    outcome: str = ""
    slot: int | None = None  # of the last instance that worked on it
    duration_s: float = 0.0  # from its arrival to its end
    queued_s: float | None = None  # from its arrival until an instance was asked; None: none was
    first_byte_s: float | None = (
        None  # from its arrival to the response's first byte; for a stream the first token
    )
    prompt_tokens: int = 0  # the cached ones included
    cached_tokens: int = 0
    output_tokens: int = 0
    exact: bool = True  # an upstream counted the tokens; False: they are estimated
    attempts: int = 0
    continued: int = 0
    overflow: str = ""  # name of the overflow endpoint that it was sent to
    overflow_reason: str = ""  # "full" or "predicted"
    predicted_s: float | None = None  # time to the first token that was predicted when it arrived
    picos: int = (
        0  # of the currency: at the overflow endpoint's prices, or for a local request at [cost.price]
    )
    streamed: bool = True  # its first byte came when its first token was there, not all of them
    method: str = ""
    bytes_in: int = 0  # of its body
    bytes_out: int = 0  # of its response's
    reason: str = ""  # of a failure or refusal
    generation: int | None = None  # of the last instance
    admitted_s: float | None = (
        None  # from its arrival until it was complete and could be queued; None: it never was
    )
    steps: list[Step] | None = None  # from the first attempt on; None: nothing but what the other fields say
    trace: Trace | None = None  # of a traced request
