"""ProxyServer: one OpenAI endpoint over the ready instances.

The daemon tells it which instances are ready, draining or gone; it tells the daemon when a draining one is
idle and when one looks broken.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from launcher.address import Address
from launcher.background import Failures, attempt
from launcher.config.schema import Model, Proxy
from launcher.printable import quoted
from launcher.proxy.auth.api_keys import OPEN_PATHS, ApiKeys
from launcher.proxy.balancing.upstreams import Upstream
from launcher.proxy.dispatch.desk import Desk
from launcher.proxy.dispatch.fleet import OnIdle, OnSuspect
from launcher.proxy.dispatch.relay import Relay
from launcher.proxy.downstream.connection import DownstreamConnection
from launcher.proxy.downstream.cors import Cors
from launcher.proxy.downstream.forwarded import TrustedProxies, appended
from launcher.proxy.downstream.handshakes import Handshakes
from launcher.proxy.downstream.listener import Listener
from launcher.proxy.downstream.tls import ServerTls
from launcher.proxy.downstream.upload_memory import FREE_BYTES, UploadMemory
from launcher.proxy.downstream.uploads import too_large
from launcher.proxy.errors import HttpError, unavailable
from launcher.proxy.http1 import RequestHead
from launcher.proxy.observability import report
from launcher.proxy.observability.exchange import Exchange
from launcher.proxy.pages.renderer import PageRenderer, Sources
from launcher.proxy.routes import GATHERED, REALTIME, Match, NoMethod, match, split_target
from launcher.proxy.upstream.scraper import Instance
from launcher.proxy.upstream.template_probe import TemplateChecks
from launcher.telemetry import metrics
from launcher.telemetry.rolling_quantiles import Quantiles

_LOG = logging.getLogger(__name__)

LAST_WORDS_S = 1.0  # after `stop` has cut what was left: for the error events to be written
RECONCILE_S = 5.0  # one page per instance: under 1 ms each
TICK_MAX_S = 0.25  # deadlines are held this exactly; shorter where one that is set is short
TICK_MIN_S = 0.01
_UNREAD = RequestHead("GET", "/", False, None, False, False, False, None, b"\r\n", b"\r\n", ())


class ProxyServer:
    """The proxy: listeners, clients, clock."""

    def __init__(
        self,
        proxy: Proxy,
        *,
        models: Sequence[Model],
        on_idle: OnIdle,
        on_suspect: OnSuspect,
        chance: random.Random | None = None,
        most_clients: int | None = None,
        more_values: Callable[[], metrics.Values] = dict,
    ) -> None:
        """`most_clients`: fewer than `proxy.max_connections`, where the process may not open files for so many.
        `more_values`: of metrics that others measure, for the metrics page."""
        self._proxy = proxy
        self._more_values = more_values
        self._most_clients = proxy.max_connections if most_clients is None else most_clients
        self._loop = asyncio.get_running_loop()
        pick = (chance or random.Random()).randrange  # noqa: S311
        self.desk = Desk(proxy, models, on_idle, on_suspect, pick)
        self._keys = ApiKeys(proxy.api_keys_file)
        self._pages = PageRenderer(self.desk.names, self.desk.adapters, self._sources())
        self.desk.intake.pages = self._pages
        self._cors = Cors(proxy.cors_origins)
        self._proxies = TrustedProxies(proxy.trusted_proxies) if proxy.trusted_proxies else None
        certificate = proxy.tls_certificate
        self._tls = None if certificate is None else ServerTls(certificate, proxy.tls_key)
        self._handshakes = (
            None
            if self._tls is None
            else Handshakes(self._make_client, self._tls.context, proxy.header_timeout_s, self._has_room)
        )
        self._nodes: dict[int, str] = {}
        self._templates = TemplateChecks(self.desk.moves.unfit_templates)
        self._reconciler: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._clients: set[DownstreamConnection] = set()
        here = uuid.uuid4().hex[:20]
        self._ids = (f"{here}{number:x}" for number in count(1))
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = _tick_interval(proxy)
        self._quiet = asyncio.Event()  # no request is in flight
        self.desk.on_quiet = self._quiet.set
        self.closing = False
        self.header_timeout_s = proxy.header_timeout_s
        self.body_timeout_s = proxy.body_timeout_s
        self.body_min_bytes_per_s = proxy.body_min_bytes_per_s
        self.keepalive_s = proxy.client_keepalive_s
        self.stall_timeout_s = proxy.client_stall_timeout_s
        self.min_bytes_per_s = proxy.client_min_bytes_per_s
        self.max_body_bytes = proxy.max_body_bytes
        self.upload_wait_s = proxy.upload_wait_s
        self.upload_memory = UploadMemory(proxy.upload_max_bytes, proxy.max_body_bytes)

    # --- the daemon's side ---------------------------------------------------------------------

    async def start(self, ready: Sequence[socket.socket] = ()) -> None:
        """Listen on `ready` sockets, which systemd opened and keeps, or else on [proxy] listen.

        Raises LauncherError when an address can't be had; nothing listens then.
        """
        self._listener = Listener(self._make_client, self._handshakes)
        try:
            for sock in ready:
                await self._listener.take(sock)
            for listen in self._proxy.listen if not ready else ():
                await self._listener.open(listen)
        except BaseException:
            self._listener.close()
            raise
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        self._reconciler = self._loop.create_task(self._reconcile(), name="reconcile")

    async def _reconcile(self) -> None:
        """While there is work: compare what we believe of the instances with what they say."""
        failures = Failures(_LOG, "front door: compare load with the instances' own figures")
        while True:
            await asyncio.sleep(RECONCILE_S)
            if self.desk.tally.in_flight:
                await attempt(self._compare, failures)

    async def _compare(self) -> None:
        self.desk.fleet.reconcile(await self._pages.loads())

    @property
    def endpoint(self) -> str:
        """URL of the first listener, with its real port."""
        if self._listener is None or not self._listener.endpoints:
            raise RuntimeError("the front door is not open")
        return self._listener.endpoints[0]

    @property
    def endpoints(self) -> list[str]:
        """URLs of all listeners."""
        return [] if self._listener is None else list(self._listener.endpoints)

    def add_upstream(
        self,
        slot: int,
        generation: int,
        model: str,
        address: Address,
        max_num_seqs: int,
        *,
        numa_node: str = "",
        adapters: Sequence[str] = (),
        ask_template: bool = False,
        token_ids: bool = False,
        sampling_defaults: Mapping[str, float] | None = None,
    ) -> None:
        """The instance may get requests; a drain of this very generation is taken back.

        `numa_node`: the list of nodes that its memory is on, a label of its metrics. `adapters`: names of the LoRA
        adapters that it serves. `ask_template`: find out what its chat template is good for (template_check.py).
        `token_ids`: it tells the ids of its tokens where it is asked to, as vLLM does; without them an event counts
        as one token. `sampling_defaults`: what it applies to requests that name none, by vLLM's names.
        """
        self._nodes[slot] = numa_node
        self.desk.know(adapters, model)
        self.desk.moves.know(model, token_ids=token_ids, sampling_defaults=sampling_defaults or {})
        self.desk.fleet.add(Upstream(slot, generation, model, address, max_num_seqs))
        if ask_template and not self.closing:
            self._templates.begin(slot, generation, model, address)

    def drain_upstream(self, slot: int, generation: int) -> None:
        """No new requests; on_idle once nothing is left on it, from the event loop, never from this call."""
        self.desk.fleet.drain(slot, generation)

    def remove_upstream(self, slot: int, generation: int, reason: str) -> None:
        """The instance is gone; what is in flight on it moves to another or ends honestly."""
        self.desk.fleet.remove(slot, generation, reason)

    def in_flight(self, slot: int, generation: int) -> int:
        """Requests that the instance works on; 0 when it is not known."""
        upstream = self.desk.fleet.table.get(slot, generation)
        return 0 if upstream is None else upstream.in_flight

    def awaited(self, slot: int, generation: int) -> int:
        """Of them, those that wait for the instance and not for their client."""
        return self.desk.fleet.awaited(slot, generation)

    def progress(self, slot: int, generation: int) -> int:
        """Reads relayed from an instance so far; it rises while any of its answers moves."""
        return self.desk.fleet.progress(slot, generation)

    def silent(self, slot: int, generation: int) -> bool:
        """Nothing has come of an instance's requests for `hung_timeout_s`, and it has room for a question."""
        return self.desk.fleet.silent(slot, generation)

    def stats(self) -> dict[str, object]:
        """The sums, for `status --json`."""
        return report.stats(self.desk)

    def first_token(self, slot: int) -> Quantiles | None:
        """How long clients of a slot waited lately for a stream's first token, time in the queue included."""
        return self.desk.timings.first_token.quantiles(slot, self._loop.time())

    async def metrics_page(self) -> str:
        """What `GET /metrics` answers."""
        return (await self._pages.metrics_page()).body.decode()

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, give what is in flight `grace_s`, end the rest honestly, close."""
        self.closing = True
        await self._templates.close()
        if self._listener is None:
            return
        deadline = self._loop.time() + grace_s
        self._listener.close()
        for client in tuple(self._clients):
            client.close_if_idle()
        if not await self._wait_quiet(grace_s):
            self.desk.cut("the server is shutting down")
        await self._wait_closed(deadline)
        if self._timer is not None:
            self._timer.cancel()
        if self._reconciler is not None:
            self._reconciler.cancel()
            await asyncio.wait({self._reconciler})
        self.desk.fleet.close()
        if self.desk.overflow is not None:
            self.desk.overflow.pool.close()
        await self._pages.close()
        self.desk.access_log.flush()

    def _sources(self) -> Sources:
        """What the pages show."""
        fleet = self.desk.fleet
        return Sources(
            instances=lambda: [
                Instance(
                    u.slot, u.generation, u.model, u.address, not u.draining, self._nodes.get(u.slot, "")
                )
                for u in sorted(fleet.table, key=lambda u: u.key)
            ],
            values=lambda: {
                **report.values(self.desk, self._keys, self.upload_memory, self._connections),
                **self._more_values(),
            },
            timings=self.desk.timings,
            stopping=lambda: self.closing,
            retry_after_s=fleet.retry_after_s,
        )

    async def _wait_quiet(self, seconds: float) -> bool:
        """True when no request was left within the time."""
        if self.desk.tally.in_flight == 0:
            return True
        self._quiet.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    async def _wait_closed(self, deadline: float) -> None:
        """Until every client has gone: with its last words, or by the deadline with all of its answer."""
        last_words = self._loop.time() + LAST_WORDS_S
        while self._clients and (now := self._loop.time()) < max(last_words, deadline):
            for client in tuple(self._clients):
                client.close_if_idle()
            if now > last_words and not any(client.unsent for client in self._clients):
                break
            await asyncio.sleep(0.01)
        for client in tuple(self._clients):
            client.give_up()
        await asyncio.sleep(0)

    # --- the clients' side -----------------------------------------------------------------------

    def opened(self, client: DownstreamConnection) -> bool:
        """A client connected; False: there are too many."""
        if self._handshakes is not None:
            self._handshakes.ended(client)
        if not self._has_room():
            return False
        self._clients.add(client)
        return True

    @property
    def _connections(self) -> int:
        """Connections of clients, also before they have shaken hands."""
        return len(self._clients) + (0 if self._handshakes is None else len(self._handshakes))

    def _has_room(self) -> bool:
        """Whether another connection may come; one that may not is counted."""
        if self.closing or self._connections >= self._most_clients:
            self.desk.tally.connections_refused += not self.closing
            return False
        return True

    def _make_client(self) -> DownstreamConnection:
        return DownstreamConnection(self)

    def closed(self, client: DownstreamConnection) -> None:
        """A client has gone."""
        self._clients.discard(client)
        self.desk.slow_clients.remove(client)

    def fell_behind(self, client: DownstreamConnection) -> None:
        """Its buffers are full."""
        self.desk.slow_clients.add(client)

    def caught_up(self, client: DownstreamConnection) -> None:
        """They are not any more."""
        self.desk.slow_clients.remove(client)

    def begin(self, client: DownstreamConnection, head: RequestHead) -> Relay:
        """A request has begun; it may be answered at once."""
        path, _query = split_target(head.target)
        exchange = Exchange(head.sent_id or next(self._ids), head.method, path, self._loop.time())
        found = match(head.method, path)
        well = found if isinstance(found, Match) else None
        relay = Relay(self.desk, client, head, well, exchange)
        if self._proxies is not None and self._proxies.trusts(peer := client.peer):
            relay.forwarded = appended(head, peer)
        try:
            if self._cors.enabled and self._allow_origin(relay, head):
                return relay
            if isinstance(found, NoMethod):
                raise _no_method(path, found)
            if found is None:
                raise _no_route(path)
            self._let_in(relay, head, found)
        except HttpError as refusal:
            relay.refuse(refusal)
        except Exception:
            relay.fault()
        return relay

    def _let_in(self, relay: Relay, head: RequestHead, found: Match) -> None:
        """All that can be judged before the body is read. Raises HttpError."""
        exchange, gathered = relay.exchange, found.route.kind in GATHERED
        if exchange.path not in OPEN_PATHS and self._keys.required:
            key = head.get(b"authorization"), head.get(b"x-api-key")
            relay.key = self._keys.check(*key, exchange.started)
            exchange.key = None if relay.key is None else relay.key.name
        self.desk.accept(relay)
        if self.closing and not gathered:
            raise unavailable("the server is shutting down", self.desk.fleet.retry_after_s(), close=True)
        if head.length is not None and head.length > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        if relay.key is not None and not gathered:
            large = head.chunked or (head.length or 0) > FREE_BYTES
            relay.grant = relay.key.limits.begin(exchange.started, large=large)

    def _allow_origin(self, relay: Relay, head: RequestHead) -> bool:
        """Note what a browser's page is told; True when it only asked, and was answered."""
        origin = head.get(b"origin")
        if head.method == "OPTIONS":
            method = head.get(b"access-control-request-method")
            asked = head.get(b"access-control-request-headers")
            answer = self._cors.preflight(origin, method, asked)
            if answer is not None:
                relay.preflight(*answer)
                return True
        relay.delivery.lines = self._cors.lines(origin)
        return False

    def turn_away(self, client: DownstreamConnection, refusal: HttpError) -> None:
        """A request that could not be read: answer it and close."""
        exchange = Exchange(next(self._ids), "-", "-", self._loop.time())
        refusal.close = True
        Relay(self.desk, client, _UNREAD, None, exchange).refuse(refusal)

    # --- the clock -------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        now = self._loop.time()
        for client in tuple(self._clients):
            try:
                client.tick(now)
            except Exception:  # the clock goes on for the others
                client.fault()
        self.desk.tick(now)


def _tick_interval(proxy: Proxy) -> float:
    shortest = min(
        proxy.header_timeout_s,
        proxy.body_timeout_s,
        proxy.idle_timeout_s,
        proxy.first_token_timeout_s,
        proxy.answer_timeout_s,
        proxy.queue_timeout_s,
        proxy.park_timeout_s,
        proxy.keepalive_comment_s,
        proxy.hung_timeout_s,
        proxy.client_stall_timeout_s,
        proxy.client_grace_s,
        proxy.client_keepalive_s,
    )
    return max(TICK_MIN_S, min(TICK_MAX_S, shortest / 4))


def _no_route(path: str) -> HttpError:
    if path == REALTIME:
        return HttpError(
            501,
            f"cannot open {path}: WebSockets are not served here; POST the audio to /v1/audio/transcriptions",
            type_="not_implemented_error",
            code="websocket_not_served",
            close=True,
        )
    return HttpError(404, f"there is no {quoted(path)} here", type_="NotFoundError", code="not_found")


def _no_method(path: str, found: NoMethod) -> HttpError:
    allow = ", ".join(found.allow)
    return HttpError(
        405, f"{quoted(path)} takes {allow}", code="method_not_allowed", headers={"Allow": allow}
    )
