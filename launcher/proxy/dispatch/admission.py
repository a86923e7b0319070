"""Admission: what a request asks, whether its key may have it, what it will cost; its way into the queue and out of it."""

from __future__ import annotations

import asyncio
import logging
from typing import assert_never

from launcher.accounts.budgets import Budgets
from launcher.accounts.ended_request import What
from launcher.accounts.spending import NOTHING, Spent
from launcher.balancing.prefix_cache import fingerprint
from launcher.balancing.upstreams import Demand, InstanceId, Ticket
from launcher.base.api_errors import HttpError, unavailable
from launcher.config.schema import Proxy
from launcher.proxy.continuation.next_request import CHAT, COMPLETIONS, may_ask_ids
from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.dispatch.executor import Responder
from launcher.proxy.dispatch.instances import Instances
from launcher.proxy.downstream.uploads import LARGE_BYTES
from launcher.proxy.http1.requests import RequestHead
from launcher.proxy.openai.body import MAX_PRIORITY, read_body
from launcher.proxy.openai.body_schema import RequestBody
from launcher.proxy.openai.forms import FormReader
from launcher.proxy.openai.json_reader import JsonReader
from launcher.proxy.openai.models import ModelTraits
from launcher.proxy.openai.prompts import MEDIA_BYTES, Prompt, read_prompt
from launcher.proxy.openai.stream_options import UsageAsk, usage_ask
from launcher.proxy.request.decisions import MAX_REWRITTEN_BYTES
from launcher.proxy.request.events import BackoffOver, BodyGrew, Event, NoCapacity
from launcher.proxy.request.most_tokens import (
    most_tokens,
    prompt_within_context,
    prompts_of,
    within_context,
)
from launcher.proxy.request.record import BodyReader, Post, Request
from launcher.proxy.routes import Kind, Match, Stream, UsageBy
from launcher.proxy.upstream.overflow import Overflow

TOOLS_BYTES = 1 << 20  # by so many bytes one list of tools is told from another
LOGGED_BYTES = 1 << 20  # of a body, with `log_prompts`
PRIORITY_HEADER = b"x-vllm-priority"  # vLLM's own (entrypoints/generate/base/serving.py, 0.32)

_NO_PROMPT = Prompt()
_PROMPTS = logging.getLogger("launcher.prompts")


class _Unread:
    """For routes whose bodies say nothing that must be known."""

    def feed(self, _body: bytes | bytearray) -> bool:
        return True

    def finish(self, _body: bytes | bytearray) -> RequestBody:
        return RequestBody()


class Admission:
    def __init__(
        self,
        proxy: Proxy,
        traits: ModelTraits,
        instances: Instances,
        responder: Responder,
        *,
        budgets: Budgets | None,
        overflow: Overflow | None,
        post: Post,
    ) -> None:
        self._proxy = proxy
        self._traits = traits
        self._balancer = instances.balancer
        self._instances = instances
        self._responder = responder
        self._budgets = budgets
        self._overflow = overflow
        self._post = post
        self._loop = asyncio.get_running_loop()

    # --- actions -----------------------------------------------------------------------------------

    def look(self, request: Request, event: BodyGrew, _now: float) -> None:
        """Read the next step of a large body. Raises HttpError."""
        try:
            if request.body_reader is None:
                request.body_reader = self._reader(request)
            request.looked = request.body_reader.feed(event.body)
        except HttpError as error:
            raise error.closing() from None

    def admit(self, request: Request, _event: Event, now: float) -> None:
        """Queue it, or bind it to an instance at once. Raises HttpError."""
        found = request.match
        if found is None:
            raise AssertionError("only a request on a route is admitted")
        request.admitted = now
        said = self._read(request, found)
        stored = found.item if found.route.kind is Kind.STORED else said.previous_response_id
        pinned = None if stored is None else self._instances.holder(stored)
        demand = self._demand(request, found, said, pinned, now)
        if demand.stream:
            request.usage_ask = self._usage_ask(request, found.route.stream, said)
        ready = bool(self._balancer.table.of(request.model))
        if not ready and not self._instances.was_ready(request.model):
            message = f"no instance of {request.model or 'any model'} is ready"
            self._post(request, NoCapacity(unavailable(message, self._balancer.retry_after_s(now))))
            return
        if demand.stream:
            request.transcript = self._transcript(request, said)
            request.choices = said.n * prompts_of(said)
        request.ticket = ticket = Ticket(demand, request.started, now)
        if self._overflow is not None:
            record = None if request.key is None else request.key.record
            ticket.limit_s = self._overflow.limit_s(request.path, request.model, record)
        self._enqueue(request, ticket, now, ready=ready)

    def enqueue(self, request: Request, _event: Event, now: float) -> None:
        """Again, at the place of its arrival; it may wait there as long as any other, over all its attempts."""
        ticket = request.ticket
        if ticket is None:
            raise AssertionError("no instance is asked without a ticket")
        self._enqueue(request, ticket, now, ready=bool(self._balancer.table.of(ticket.demand.model)))

    def _enqueue(self, request: Request, ticket: Ticket, now: float, *, ready: bool) -> None:
        proxy = self._proxy
        wait_s = proxy.queue_timeout_s if ready else min(proxy.queue_timeout_s, proxy.park_timeout_s)
        if (failures := request.failures) is not None:
            wait_s = min(wait_s, proxy.queue_timeout_s - failures.queued_s)
            failures.queued_since = now
        ticket.deadline = now + wait_s
        if not self._instances.enqueue(request, ticket, now):
            self._responder.plan_comment(request, now)
            if request.steps is not None:
                request.note(What.QUEUED, now)

    def set_timer(self, request: Request, _event: Event, now: float) -> None:
        pause_s = 0.0 if request.failures is None else request.failures.pause_s
        request.note(What.QUEUED, now, why=f"every instance was tried; next attempt in {pause_s:g} s")
        request.pending = self._loop.call_later(pause_s, self._post, request, BackoffOver())

    def withdraw(self, request: Request, _event: Event, now: float) -> None:
        """Out of the queue; no timer, no page."""
        if request.pending is not None:
            request.pending.cancel()
        if request.ticket is not None and request.attempt is None:
            self._instances.withdraw(request.ticket, now)

    # --- what a body says --------------------------------------------------------------------------

    def _reader(self, request: Request) -> BodyReader:
        """What reads a large body as it comes. Raises HttpError."""
        route = None if request.match is None else request.match.route
        if route is not None and route.kind is Kind.JSON:
            return JsonReader(route.prompt, route.path)
        if route is not None and route.kind is Kind.FORM:
            # A second field would be another form; joined they are none.
            return FormReader(", ".join(request.head.all(b"content-type")))
        return _Unread()

    def _read(self, request: Request, found: Match) -> RequestBody:
        """What the body says; the request's model is known then. Raises HttpError."""
        kind, body = found.route.kind, request.body
        if self._proxy.log_prompts and body:
            _log_prompt(request)
        if kind is Kind.JSON and len(body) <= LARGE_BYTES:
            said = read_body(body, found.route.prompt, found.route.path)
        else:
            said = (request.body_reader or self._reader(request)).finish(body)
            if kind is not Kind.FORM and kind is not Kind.JSON:
                return said
        request.model, request.adapter = self._traits.resolve(said.model)
        said.max_tokens = within_context(said.max_tokens, self._traits.context_tokens(request.model))
        return said

    def _demand(
        self, request: Request, found: Match, said: RequestBody, pinned: InstanceId | None, now: float
    ) -> Demand:
        """What it costs, taken from what its key may have. Raises HttpError."""
        route, balancer = found.route, self._balancer
        streamed = said.stream and route.stream is not None
        computes = route.computes
        prompt = read_prompt(said.prompt, said.media) if said.prompt else _NO_PROMPT
        size, adapter = prompt.size, request.adapter
        if request.grant is not None:
            # Without a prompt that is known: an image alone, or what the instance refuses.
            charged = (size or min(len(request.body), MEDIA_BYTES)) if computes else 0
            self._charge(request, said, charged, now)
        tools = bytes(said.tools[:TOOLS_BYTES])
        salt = hash((tools, adapter)) if tools or adapter else 0
        tokens = balancer.prompt_tokens(size + len(said.tools)) if size else 0
        request.prompt_bytes = 0 if prompt.media else size + len(said.tools)
        proxy = self._proxy
        # A response that is not streamed comes whole, so it takes as long as all of it.
        request.first_byte_timeout_s = (
            proxy.first_token_timeout_s + proxy.first_token_timeout_per_1k_s * tokens / 1000
            if streamed
            else proxy.answer_timeout_s
        )
        return Demand(
            request.model,
            # The engine refuses what is beyond its context.
            prompt_within_context(tokens, request.path, said, self._traits.context_tokens(request.model)),
            balancer.output_tokens(said.max_tokens, said.n) if computes else 0,
            fingerprint(prompt.text, salt) if size else (),
            len(request.body),
            max_tokens=said.max_tokens,
            key=None if request.key is None else request.key.record.name,
            priority=_priority(request.head, said)
            if PRIORITY_HEADER in request.head.lowered
            else said.priority,
            pinned=pinned,
            stream=streamed,
            wished=request.wished,
            takes_place=computes,
        )

    def _transcript(self, request: Request, said: RequestBody) -> Transcript | None:
        """Of a stream that could be continued on another instance."""
        if request.path not in {CHAT, COMPLETIONS}:
            return None
        asks_ids = self._traits.asks_ids(request.model) and said.n == 1 and not said.tools
        return Transcript(token_ids=asks_ids and may_ask_ids(request.body))

    def _usage_ask(self, request: Request, stream: Stream | None, said: RequestBody) -> UsageAsk:
        """How the usage of a stream is asked for, whether its client wants it or not."""
        if stream is None or not self._traits.asks_usage(request.model):
            return UsageAsk.NO
        match stream.usage:
            case UsageBy.ENGINE:
                return UsageAsk.NO
            case UsageBy.FORM_FIELD:
                return UsageAsk.NO if said.stream_options else UsageAsk.FORM_FIELD
            case UsageBy.STREAM_OPTIONS:
                ask = usage_ask(said.stream_options)
                too_large = ask is UsageAsk.CHANGED and len(request.body) > MAX_REWRITTEN_BYTES
                return UsageAsk.NO if too_large else ask
        assert_never(stream.usage)

    def _charge(self, request: Request, said: RequestBody, size: int, now: float) -> None:
        """Take it from what the API key may have; `size`: bytes of its prompt, 0: none is computed."""
        tokens = 0
        if size:
            tokens = self._balancer.prompt_tokens(size)
            tokens += self._balancer.output_tokens(said.max_tokens, said.n)
        names: tuple[str, ...] = ()
        if request.adapter is not None:  # a model of its own, for a key
            names = (request.adapter,)
        elif request.model is not None:
            names = self._traits.names.all_of(request.model)
        if request.grant is not None:
            request.grant.charge(names, now, tokens)
        if size and self._budgets is not None and request.key is not None and request.key.record.budget:
            self._reserve(request, request.key.record.name, said, self._budgets, now)

    def _reserve(self, request: Request, name: str, said: RequestBody, budgets: Budgets, now: float) -> None:
        """The most that it can spend of its key's budget. Raises HttpError."""
        traits, model = self._traits, request.model
        most = most_tokens(
            request.path,
            request.body,
            said,
            context=traits.context_tokens(model),
            defaults=traits.sampling_defaults(model),
        )
        price = budgets.rules.price
        here = Spent(
            most.prompt + most.output, 0 if price is None else price.amount(most.prompt, 0, most.output)
        )
        away = NOTHING if self._overflow is None else self._overflow.most_spent(request, most)
        if request.grant is not None:
            request.grant.reserve(budgets, name, Spent(*map(max, here, away)), now)


def _log_prompt(request: Request) -> None:
    request_id, size = request.request_id, len(request.body)
    text = bytes(request.body[:LOGGED_BYTES]).decode("utf-8", "backslashreplace")
    more = f" ... ({size} bytes)" if size > LOGGED_BYTES else ""
    _PROMPTS.debug("%s %s%s", request_id, text, more, extra={"request_id": request_id})


def _priority(head: RequestHead, said: RequestBody) -> int:
    """The header's before the body's, as vLLM takes them; one that is no integer counts as none."""
    try:
        wanted = int(head.get(PRIORITY_HEADER) or "")
    except ValueError:
        return said.priority
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, wanted))
