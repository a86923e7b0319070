"""The record of a request that has ended, and who takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct, field

from launcher.accounts.budgets import Budgets
from launcher.accounts.ended_request import EndedRequest
from launcher.base.clock import Clock
from launcher.base.money import TokenPrices
from launcher.base.money_limits import DailyCap
from launcher.proxy.observability.timelines import RequestTracing
from launcher.proxy.request.actions import Outcome
from launcher.proxy.request.record import Request
from launcher.proxy.routes import Kind


def _nothing(_ended: EndedRequest) -> None:
    """Nobody keeps it."""


class Accounting(Struct, frozen=True):
    """Who is told of ended requests. `record` returns at once and never raises."""

    record: Callable[[EndedRequest], None] = _nothing
    unrecorded: Callable[[], str | None] | None = None
    """Why what is served now would not be recorded, though it must be. None: it need not be."""
    caps: Mapping[str, DailyCap] = field(default_factory=dict)
    """Of overflow endpoints, by name."""
    budgets: Budgets | None = None
    """Of API keys; `record` tells them what was spent."""
    tracing: RequestTracing | None = None
    prices: TokenPrices | None = None
    """What a token served here takes from a budget in money."""
    clock: Clock = field(default_factory=Clock)
    """By which caps and budgets begin their periods."""


class Tokens(NamedTuple):
    prompt: int  # the cached ones included
    cached: int
    output: int
    exact: bool  # as an upstream counted them; False: estimated


NO_TOKENS: Final = Tokens(0, 0, 0, exact=True)
_BYTES_PER_TOKEN: Final = 4  # of text that nobody counted


def tells_cached(request: Request) -> bool:
    """Whether its upstream said how many tokens of its prompt were cached."""
    return request.usage is not None and request.usage[2] is not None


def tokens_of(request: Request, *, cached_known: bool = False) -> Tokens:
    """What an ended request took: of what was served all, of what its client did not wait for the prompt.

    `cached_known`: instances of its model tell the cached tokens of whole responses. A response that was cut did not come
    to that: then they are estimated, so that leaving early costs no more than waiting."""
    if request.match is None or not request.match.route.computes or request.outcome is Outcome.REFUSED:
        return NO_TOKENS
    if request.committed or request.outcome is Outcome.COMPLETED:
        return _served(request, cached_known=cached_known)
    asked = request.bound is not None or request.overflowed
    if asked and request.outcome is Outcome.CLIENT_ABORTED:
        prompt = _prompt(request)
        return Tokens(prompt, _cached(request, prompt) if cached_known else 0, 0, exact=False)
    return NO_TOKENS


def _served(request: Request, *, cached_known: bool) -> Tokens:
    usage, said = request.usage, request.transcript
    if usage is not None and request.outcome is Outcome.COMPLETED:
        return Tokens(usage[0], min(usage[2] or 0, usage[0]), usage[1], request.usage_is_exact)
    counted = None if said is None else said.counted()
    if counted is not None:
        prompt, output = counted
    elif usage is None:
        prompt, output = _prompt(request), _output(request)
    else:
        prompt, output = usage[0], max(usage[1], _output(request))
    if usage is not None and usage[2] is not None:
        return Tokens(prompt, min(usage[2], prompt), output, exact=counted is not None)
    return Tokens(prompt, _cached(request, prompt) if cached_known else 0, output, exact=False)


def _cached(request: Request, prompt: int) -> int:
    """About how many of the prompt's tokens its instance had cached, as the balancer believed when it sent the request."""
    ticket = request.ticket
    if ticket is None or not ticket.uncached or not ticket.demand.prompt_tokens:
        return 0
    share = 1 - ticket.uncached / ticket.demand.prompt_tokens
    return max(0, min(int(prompt * share), prompt - 1))


def _prompt(request: Request) -> int:
    if request.ticket is None:
        return request.prompt_bytes // _BYTES_PER_TOKEN
    return request.ticket.demand.prompt_tokens


def _output(request: Request) -> int:
    """About how many tokens were delivered, where no upstream counted them."""
    said, route = request.transcript, None if request.match is None else request.match.route
    if said is not None and said.odd is None:
        return len(said.pieces())
    if request.tracker is not None:  # vLLM writes one event for a token, seldom for several
        return max(0, request.events - (route.stream.opening if route and route.stream else 0))
    if route is not None and route.kind is Kind.FORM:  # it is the text and little else
        return request.bytes_out // _BYTES_PER_TOKEN
    return request.ticket.demand.output_tokens if request.ticket and route and route.generates else 0


def ended_request(
    request: Request, tokens: Tokens, prices: TokenPrices | None, now: float, ended_at: float
) -> EndedRequest:
    """The record of a request as it is now. `now`: the event loop's time; `ended_at`: Unix time. `prices`: of local
    tokens."""
    started, trace = request.started, request.trace
    # By position: keywords take 0.7 us more, for every request.
    return EndedRequest(
        ended_at,  # ended_at
        request.request_id,  # request_id
        "" if request.key is None else request.key.record.name,  # key
        request.model or "",  # model
        request.adapter or "",  # adapter
        request.path,  # path
        request.status,  # status
        request.outcome or "",  # outcome
        request.slot,  # slot
        now - started,  # duration_s
        None if request.bound is None else request.bound - started,  # queued_s
        None if request.first_byte is None else request.first_byte - started,  # first_byte_s
        tokens.prompt,  # prompt_tokens
        tokens.cached,  # cached_tokens
        tokens.output,  # output_tokens
        tokens.exact,  # exact
        request.attempts,  # attempts
        request.continued,  # continued
        request.overflow,  # overflow
        request.overflow_reason or "",  # overflow_reason
        request.predicted_s,  # predicted_s
        request.picos + (0 if prices is None or request.overflow else prices.amount(*tokens[:3])),  # picos
        request.tracker is not None,  # streamed
        request.method,  # method
        request.bytes_in,  # bytes_in
        request.bytes_out,  # bytes_out
        request.reason or "",  # reason
        request.generation,  # generation
        None if request.admitted is None else request.admitted - started,  # admitted_s
        request.steps,  # steps
        None if trace is None or not trace.sampled else trace,  # trace
    )
