"""What the proxy tells of a request that has ended, for the usage ledger and the audit trail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from launcher.proxy.errors import CLIENT_ERROR
from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.record import Request
from launcher.usage.budgets import Budgets
from launcher.usage.daily_cap import DailyCap
from launcher.usage.entry import Entry


def _nothing(_entry: Entry) -> None:
    """Nobody keeps the entry."""


@dataclass(frozen=True, slots=True)
class Accounting:
    """Who is told of ended requests. `record` returns at once and never raises."""

    record: Callable[[Entry], None] = _nothing
    caps: Mapping[str, DailyCap] = field(default_factory=dict)
    """Of overflow endpoints, by name."""
    budgets: Budgets | None = None
    """Of API keys; `record` tells them what was spent."""


class Tokens(NamedTuple):
    prompt: int  # the cached ones included
    cached: int
    output: int
    exact: bool  # as an upstream counted them; False: estimated


_NONE = Tokens(0, 0, 0, exact=True)


def tokens_of(request: Request) -> Tokens:
    """What an ended request took: of what was served all, of what its client did not wait for the prompt."""
    outcome, usage, ticket = request.outcome, request.usage, request.ticket
    demand = None if ticket is None else ticket.demand
    if request.committed or (outcome is Outcome.COMPLETED and request.status < CLIENT_ERROR):
        if usage is not None:
            return Tokens(usage[0], usage[2] or 0, usage[1], exact=True)
        if request.overflowed and request.grant is not None:
            return Tokens(request.grant.charged, 0, 0, exact=False)
        if demand is None:
            return Tokens(0, 0, request.events, exact=False)
        output = request.events if demand.stream else demand.output_tokens
        return Tokens(demand.prompt_tokens, 0, output, exact=False)
    if outcome is Outcome.CLIENT_ABORTED and request.bound is not None and demand is not None:
        return Tokens(demand.prompt_tokens, 0, 0, exact=False)
    return _NONE


def entry_of(request: Request, tokens: Tokens, now: float, ended_at: float) -> Entry:
    """The entry of a request that has ended. `now`: the event loop's time; `ended_at`: Unix time."""
    started = request.started
    return Entry(
        ended_at=ended_at,
        request_id=request.request_id,
        key="" if request.key is None else request.key.record.name,
        model=request.model or "",
        adapter=request.adapter or "",
        path=request.path,
        status=request.status,
        outcome=request.outcome or "",
        slot=request.slot,
        duration_s=now - started,
        queued_s=None if request.bound is None else request.bound - started,
        first_byte_s=None if request.first_byte is None else request.first_byte - started,
        prompt_tokens=tokens.prompt,
        cached_tokens=tokens.cached,
        output_tokens=tokens.output,
        exact=tokens.exact,
        attempts=request.attempts,
        continued=request.continued,
        overflow=request.overflow,
        overflow_reason=request.overflow_reason or "",
        picos=request.picos,
    )
