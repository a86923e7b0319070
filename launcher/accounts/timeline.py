"""What became of one request, step by step, from its arrival to its end. No word of its prompt or response. Pure.

The proxy keeps `Ended` for each request, which costs it one object; a `Timeline` is made of it when somebody asks.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from launcher.accounts.entry import Entry

# A wait that is not worth a step of its own: a request that is sent at once takes less.
MIN_WAIT_S: Final = 0.001


class What:
    """What happened in a step."""

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


class TimelineTokens(Struct, frozen=True, kw_only=True):
    """Tokens of an ended request."""

    prompt: int
    """Tokens of its prompt, the cached ones included."""
    cached: int
    """Prompt tokens found in a prefix cache."""
    output: int
    """Generated tokens."""
    estimated: bool
    """Whether they are estimated, because no upstream counted them."""


class Timeline(Struct, frozen=True, kw_only=True):
    """`GET /v1/requests/ID`. Times are Unix seconds."""

    id: str
    """Its X-Request-Id."""
    source: str
    """memory, or usage ledger: of attempts before the last one it knows their number only."""
    same_id: int
    """Other requests in memory with this id; the latest is shown."""
    route: str
    """Its path."""
    model: str | None
    """The model that it named."""
    key: str | None
    """Name of its API key."""
    stream: bool
    """Whether its response is an event stream."""
    began: float
    """Its arrival."""
    ended: float | None
    """Its end; null: it is in flight."""
    outcome: str | None
    """completed, refused, client_aborted, rejected or failed; null: it is in flight."""
    status: int | None
    """Status of the response; null: none was sent."""
    reason: str | None
    """Why it failed."""
    tokens: TimelineTokens | None
    """Its tokens; null: it is in flight."""
    predicted_s: float | None
    """Time to the first token that was predicted at its arrival; null: not predicted."""
    attempts: int
    """Attempts on instances."""
    trace_id: str | None
    """Trace that [telemetry] otlp_endpoint gets of it; null: it is not traced."""
    steps: tuple[Step, ...]
    """What happened, in order."""


class Trace(Struct, gc=False):
    """The trace that a request belongs to."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: int
    """Of the request's own span; those of its attempts follow it."""
    parent_id: str = ""
    """Of the client's span, 16 hexadecimal digits."""
    state: str = ""
    """The client's tracestate."""
    sampled: bool = True
    sent: int = 0
    """Attempts so far."""


class Ended(Struct, gc=False):
    """A request as the proxy keeps it; also one in flight, with an entry that has no outcome."""

    entry: Entry
    reason: str | None = None
    generation: int | None = None
    """Of the last instance that it was sent to."""
    admitted_s: float | None = None
    """From its arrival until it was complete and could be queued; None: it never was."""
    steps: list[Step] | None = None
    """What happened from the first attempt on; None: nothing but what the entry says."""
    trace: Trace | None = None
    """Of a traced request."""

    def timeline(self, *, source: str = "memory", same_id: int = 0) -> Timeline:
        """The whole of it."""
        entry = self.entry
        ended = bool(entry.outcome)
        tokens = TimelineTokens(
            prompt=entry.prompt_tokens,
            cached=entry.cached_tokens,
            output=entry.output_tokens,
            estimated=not entry.exact,
        )
        return Timeline(
            id=entry.request_id,
            source=source,
            same_id=same_id,
            route=entry.path,
            model=entry.model or None,
            key=entry.key or None,
            stream=entry.streamed,
            began=round(entry.ended_at - entry.duration_s, 6),
            ended=round(entry.ended_at, 6) if ended else None,
            outcome=entry.outcome or None,
            status=entry.status or None,
            reason=self.reason or None,
            tokens=tokens if ended else None,
            predicted_s=None if entry.predicted_s is None else round(entry.predicted_s, 6),
            attempts=entry.attempts,
            trace_id=None if self.trace is None else self.trace.trace_id,
            steps=tuple(map(_to_tell, self.steps_told())),
        )

    def steps_told(self) -> list[Step]:
        """All steps, in order."""
        entry = self.entry
        noted = self._usual() if self.steps is None else self.steps
        found = [Step(0.0, What.RECEIVED)]
        until = noted[0].at_s if noted else entry.duration_s
        admitted_s = (0.0 if noted else until) if self.admitted_s is None else self.admitted_s
        if until - admitted_s >= MIN_WAIT_S:
            found.append(Step(admitted_s, What.QUEUED))
        found += noted
        if entry.outcome:
            found.append(Step(entry.duration_s, What.ENDED, why=self.reason or None))
        return found

    def _usual(self) -> list[Step]:
        """The steps of a request that was sent once, or never."""
        entry = self.entry
        found = []
        if entry.queued_s is not None and entry.attempts <= 1:
            found.append(Step(entry.queued_s, What.SENT, entry.slot, self.generation))
        elif entry.queued_s is not None:  # an entry of the usage ledger: its slot is that of the last attempt
            why = f"attempt 1 of {entry.attempts}, the last one on slot {entry.slot}"
            found.append(Step(entry.queued_s, What.SENT, why=why))
        if entry.overflow:
            at_s = entry.queued_s or 0.0
            found.append(Step(at_s, What.OVERFLOWED, endpoint=entry.overflow, why=entry.overflow_reason))
        if entry.streamed and entry.first_byte_s is not None and entry.outcome != "refused":
            found.append(
                Step(entry.first_byte_s, What.FIRST_TOKEN, None if entry.attempts > 1 else entry.slot)
            )
        return found


def _to_tell(step: Step) -> Step:
    return Step(
        round(step.at_s, 6), step.what, step.slot, step.generation, step.endpoint or None, step.why or None
    )
