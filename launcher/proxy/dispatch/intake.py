"""What a whole request asks, whether its key may have it, and what it will cost: everything before the queue."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from launcher.config.schema import Proxy
from launcher.proxy.balancing.demand import Demand
from launcher.proxy.balancing.prefix_cache import fingerprint
from launcher.proxy.balancing.ticket import Ticket
from launcher.proxy.continuation.eligibility import may_ask_ids
from launcher.proxy.continuation.plan import CHAT, COMPLETIONS
from launcher.proxy.continuation.transcript import Transcript
from launcher.proxy.dispatch.moves import Moves
from launcher.proxy.downstream.uploads import LARGE_BYTES
from launcher.proxy.errors import HttpError, unavailable
from launcher.proxy.openai.body import MAX_PRIORITY, read_body
from launcher.proxy.openai.body_schema import RequestBody
from launcher.proxy.openai.forms import FormReader
from launcher.proxy.openai.json_reader import JsonReader
from launcher.proxy.openai.models import ModelNames
from launcher.proxy.openai.prompts import MEDIA_BYTES, Prompt, read_prompt
from launcher.proxy.routes import GATHERED, Kind, Match

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.proxy.dispatch.fleet import Fleet
    from launcher.proxy.dispatch.relay import Relay
    from launcher.proxy.http1 import RequestHead
    from launcher.proxy.observability.exchange import Exchange
    from launcher.proxy.pages.renderer import PageRenderer

TOOLS_BYTES = 1 << 20  # by so many bytes one list of tools is told from another
LOGGED_BYTES = 1 << 20  # of a body, with `log_prompts`
PRIORITY_HEADER = b"x-vllm-priority"  # vLLM's own (entrypoints/generate/base/serving.py, 0.32)

_NO_PROMPT = Prompt()
_PROMPTS = logging.getLogger("launcher.prompts")


class BodyReader(Protocol):
    """Reads a body as it grows. Both raise HttpError."""

    def feed(self, body: bytes | bytearray) -> bool:
        """Look at the next step of all that has come; True: there is no more to look at."""

    def finish(self, body: bytes | bytearray) -> RequestBody:
        """What the whole of it says."""


class _Unread:
    """For routes whose bodies say nothing that must be known."""

    def feed(self, _body: bytes | bytearray) -> bool:
        return True

    def finish(self, _body: bytes | bytearray) -> RequestBody:
        return RequestBody()


class Intake:
    """Admission."""

    def __init__(
        self, proxy: Proxy, names: ModelNames, adapters: Mapping[str, str], fleet: Fleet, moves: Moves
    ) -> None:
        """`adapters`: models by the names of their LoRA adapters; instances bring them."""
        self._proxy = proxy
        self._names = names
        self._adapters = adapters
        self._fleet = fleet
        self._moves = moves
        self.pages: PageRenderer | None = None
        self._clock = asyncio.get_running_loop().time

    def admit(self, relay: Relay, found: Match) -> None:
        """Find out what is asked, and queue it. Raises HttpError."""
        kind, exchange = found.route.kind, relay.exchange
        if relay.body and relay.head.method in {"GET", "HEAD"}:
            raise HttpError(400, f"{relay.head.method} takes no body here", close=True)
        if kind in GATHERED:
            if self.pages is None:
                raise unavailable("the server is starting", self._fleet.retry_after_s())
            relay.render(self.pages, found)
            return
        peek = self._peek(found, relay)
        if kind in {Kind.JSON, Kind.FORM}:
            self._resolve(exchange, peek.model)
        streamed = peek.stream and found.route.streams
        computes = bool(found.route.prompt) or kind is Kind.FORM
        prompt = read_prompt(peek.prompt, peek.media) if peek.prompt else _NO_PROMPT
        if relay.grant is not None:
            size = 0
            if computes:  # without a prompt that we know: an image alone, or what the instance refuses
                size = prompt.size or min(len(relay.body), MEDIA_BYTES)
            self._take_from_key(relay, peek, size)
        stored = found.item if kind is Kind.STORED else peek.previous_response_id
        demand = self._demand(relay, peek, prompt, stored, computes=computes, streamed=streamed)
        relay.prompt_bytes = 0 if prompt.media else prompt.size + len(peek.tools)
        relay.first_byte_timeout_s = self._first_byte_timeout_s(demand)
        wait = self._proxy.queue_timeout_s
        if not self._fleet.table.ready(exchange.model):
            if not self._fleet.was_ready(exchange.model):
                message = f"no instance of {exchange.model or 'any model'} is ready"
                self._moves.turn_away(relay, unavailable(message, self._fleet.retry_after_s()))
                return
            wait = min(wait, self._proxy.park_timeout_s)
        relay.ticket = Ticket(demand, exchange.started, self._clock() + wait)
        if streamed and exchange.path in {CHAT, COMPLETIONS}:
            relay.transcript = Transcript(token_ids=self._asks_ids(exchange.model, peek, relay.body))
        self._moves.enter(relay, relay.ticket)

    def _asks_ids(self, model: str | None, peek: RequestBody, body: bytes | bytearray) -> bool:
        """Whether the stream's instance is asked for token ids: where it may have to go on elsewhere by them."""
        if model not in self._moves.tells_ids or model in self._moves.ignores_ids:
            return False
        return peek.n == 1 and not peek.tools and may_ask_ids(body)

    def _resolve(self, exchange: Exchange, wanted: str | None) -> None:
        """Which model it goes to. Raises HttpError when we have none of that name."""
        base = None if wanted is None else self._adapters.get(wanted)
        if base is None:
            exchange.model = self._names.resolve(wanted)
        else:
            exchange.model, exchange.adapter = base, wanted

    def _take_from_key(self, relay: Relay, peek: RequestBody, size: int) -> None:
        """Take it from what the API key may have; `size`: bytes of its prompt, 0: none is computed. Raises HttpError."""
        grant, exchange, scheduler = relay.grant, relay.exchange, self._fleet.scheduler
        if grant is None:
            return
        tokens = 0
        if size:
            tokens = scheduler.prompt_tokens(size) + scheduler.output_tokens(peek.max_tokens, peek.n)
        names: tuple[str, ...] = ()
        if exchange.adapter is not None:  # a model of its own, for a key
            names = (exchange.adapter,)
        elif exchange.model is not None:
            names = self._names.all_of(exchange.model)
        grant.charge(names, self._clock(), tokens)

    def _first_byte_timeout_s(self, demand: Demand) -> float:
        """An answer that is not streamed comes whole, so it takes as long as all of it."""
        if not demand.stream:
            return self._proxy.answer_timeout_s
        more = self._proxy.first_token_timeout_per_1k_s * demand.prompt_tokens / 1000
        return self._proxy.first_token_timeout_s + more

    def reader(self, relay: Relay) -> BodyReader:
        """What reads a large body as it comes. Raises HttpError."""
        route = None if relay.found is None else relay.found.route
        if route is not None and route.kind is Kind.JSON:
            return JsonReader(route.prompt)
        if route is not None and route.kind is Kind.FORM:
            # A second field would be another form; joined they are none.
            return FormReader(", ".join(relay.head.all(b"content-type")))
        return _Unread()

    def _peek(self, found: Match, relay: Relay) -> RequestBody:
        kind, body = found.route.kind, relay.body
        if self._proxy.log_prompts and body:
            self._log_prompt(relay)
        if kind is Kind.JSON and len(body) <= LARGE_BYTES:
            return read_body(body, found.route.prompt)
        return (relay.reader or self.reader(relay)).finish(body)

    def _log_prompt(self, relay: Relay) -> None:
        request_id, size = relay.exchange.request_id, len(relay.body)
        text = bytes(relay.body[:LOGGED_BYTES]).decode("utf-8", "backslashreplace")
        more = f" ... ({size} bytes)" if size > LOGGED_BYTES else ""
        _PROMPTS.debug("%s %s%s", request_id, text, more, extra={"request_id": request_id})

    def _demand(
        self,
        relay: Relay,
        peek: RequestBody,
        prompt: Prompt,
        stored: str | None,
        *,
        computes: bool,
        streamed: bool,
    ) -> Demand:
        scheduler = self._fleet.scheduler
        tools, adapter = bytes(peek.tools[:TOOLS_BYTES]), relay.exchange.adapter
        size, salt = prompt.size, hash((tools, adapter)) if tools or adapter else 0
        return Demand(
            model=relay.exchange.model,
            prompt_tokens=scheduler.prompt_tokens(size + len(peek.tools)) if size else 0,
            output_tokens=scheduler.output_tokens(peek.max_tokens, peek.n) if computes else 0,
            max_tokens=peek.max_tokens,
            prefix=fingerprint(prompt.text, salt) if size else (),
            body_bytes=len(relay.body),
            key=relay.exchange.key,
            priority=_priority(relay.head, peek),
            pinned=self._fleet.keeper(stored),
            stream=streamed,
        )


def _priority(head: RequestHead, peek: RequestBody) -> int:
    """The header's before the body's, as vLLM takes them; one that is no integer counts as none."""
    if PRIORITY_HEADER not in head.lowered:
        return peek.priority
    try:
        wanted = int(head.get(PRIORITY_HEADER) or "")
    except ValueError:
        return peek.priority
    return max(-MAX_PRIORITY, min(MAX_PRIORITY, wanted))
