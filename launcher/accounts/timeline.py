"""What became of one request, step by step, from its arrival to its end. No word of its prompt or response. Pure.

Made of the record of a request (`EndedRequest`) when somebody asks.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from launcher.accounts.ended_request import EndedRequest, Step, What

# A wait that is not worth a step of its own: a request that is sent at once takes less.
MIN_WAIT_S: Final = 0.001


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


def timeline_of(request: EndedRequest, *, source: str = "memory", same_id: int = 0) -> Timeline:
    """`source`: the place where it was found; `same_id`: other requests there with its id."""
    ended = bool(request.outcome)
    tokens = TimelineTokens(
        prompt=request.prompt_tokens,
        cached=request.cached_tokens,
        output=request.output_tokens,
        estimated=not request.exact,
    )
    return Timeline(
        id=request.request_id,
        source=source,
        same_id=same_id,
        route=request.path,
        model=request.model or None,
        key=request.key or None,
        stream=request.streamed,
        began=round(request.ended_at - request.duration_s, 6),
        ended=round(request.ended_at, 6) if ended else None,
        outcome=request.outcome or None,
        status=request.status or None,
        reason=request.reason or None,
        tokens=tokens if ended else None,
        predicted_s=None if request.predicted_s is None else round(request.predicted_s, 6),
        attempts=request.attempts,
        trace_id=None if request.trace is None else request.trace.trace_id,
        steps=tuple(map(_to_tell, steps_of(request))),
    )


def steps_of(request: EndedRequest) -> list[Step]:
    """All steps, in order."""
    noted = _usual(request) if request.steps is None else request.steps
    found = [Step(0.0, What.RECEIVED)]
    until = noted[0].at_s if noted else request.duration_s
    admitted_s = (0.0 if noted else until) if request.admitted_s is None else request.admitted_s
    if until - admitted_s >= MIN_WAIT_S:
        found.append(Step(admitted_s, What.QUEUED))
    found += noted
    if request.outcome:
        found.append(Step(request.duration_s, What.ENDED, why=request.reason or None))
    return found


def _usual(request: EndedRequest) -> list[Step]:
    """The steps of a request that was sent once, or never."""
    found = []
    if request.queued_s is not None and request.attempts <= 1:
        found.append(Step(request.queued_s, What.SENT, request.slot, request.generation))
    elif request.queued_s is not None:  # a row of the usage ledger: its slot is that of the last attempt
        why = f"attempt 1 of {request.attempts}, the last one on slot {request.slot}"
        found.append(Step(request.queued_s, What.SENT, why=why))
    if request.overflow:
        at_s = request.queued_s or 0.0
        found.append(Step(at_s, What.OVERFLOWED, endpoint=request.overflow, why=request.overflow_reason))
    if request.streamed and request.first_byte_s is not None and request.outcome != "refused":
        found.append(
            Step(request.first_byte_s, What.FIRST_TOKEN, None if request.attempts > 1 else request.slot)
        )
    return found


def _to_tell(step: Step) -> Step:
    return Step(
        round(step.at_s, 6), step.what, step.slot, step.generation, step.endpoint or None, step.why or None
    )
