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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from launcher.address import Address
from launcher.background import Failures, attempt
from launcher.config.schema import Model, Proxy
from launcher.proxy.auth.api_keys import ApiKeys
from launcher.proxy.balancing.balancer import Balancer
from launcher.proxy.balancing.upstreams import Upstream
from launcher.proxy.dispatch.executor import Executor
from launcher.proxy.dispatch.instances import OnIdle, OnSuspect
from launcher.proxy.downstream.connection import DownstreamConnection
from launcher.proxy.downstream.forwarded import TrustedProxies, appended
from launcher.proxy.downstream.handshakes import Handshakes
from launcher.proxy.downstream.listener import Listener
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.downstream.tls import ServerTls
from launcher.proxy.downstream.upload_memory import UploadMemory
from launcher.proxy.errors import HttpError
from launcher.proxy.http1.requests import RequestHead
from launcher.proxy.observability import stats
from launcher.proxy.observability.counters import Counters
from launcher.proxy.openai.models import ModelNames
from launcher.proxy.pages.renderer import PageRenderer, Sources
from launcher.proxy.request.events import ConnectionDue, HeadReceived, Refused
from launcher.proxy.request.model_traits import ModelTraits
from launcher.proxy.request.record import Request
from launcher.proxy.routes import Match, match, split_target
from launcher.proxy.upstream.overflow import Overflow
from launcher.proxy.upstream.scraper import Instance
from launcher.proxy.upstream.template_probe import TemplateChecks
from launcher.telemetry import metrics
from launcher.telemetry.rolling_quantiles import Quantiles

_LOG = logging.getLogger(__name__)

FLUSH_S = 1.0  # after `stop` has cut what was left: for the error events to be written
# After the last accept: for the first request of a connection.
FIRST_REQUEST_S = 1.0
RECONCILE_S = 5.0  # one page per instance: under 1 ms each
TICK_MAX_S = 0.25  # deadlines are held this exactly; shorter where one that is set is short
TICK_MIN_S = 0.01
_UNREAD = RequestHead("-", "/", False, None, False, False, False, None, b"\r\n", b"\r\n", ())


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
        self.counters = Counters()
        self.slow_clients = SlowClients(proxy, self._loop.time)
        self.balancer = Balancer(
            proxy.policy,
            (chance or random.Random()).randrange,  # noqa: S311
            max_requests=proxy.queue_max_requests,
            max_bytes=proxy.queue_max_bytes,
            eject_failures=proxy.eject_failures,
            eject_s=proxy.eject_s,
        )
        self._timings = metrics.Timings()
        self._keys = ApiKeys(proxy.api_keys_file)
        self._overflow = None if proxy.overflow is None else Overflow(proxy.overflow, proxy.connect_timeout_s)
        self._traits = ModelTraits(_names_of(models))
        self._pages = PageRenderer(self._traits, self._sources())
        self._executor = Executor(
            proxy,
            traits=self._traits,
            keys=self._keys,
            balancer=self.balancer,
            pages=self._pages,
            overflow=self._overflow,
            counters=self.counters,
            timings=self._timings,
            slow_clients=self.slow_clients,
            on_idle=on_idle,
            on_suspect=on_suspect,
        )
        self._instances = self._executor.instances
        self.post = self._executor.post
        self._proxies = TrustedProxies(proxy.trusted_proxies) if proxy.trusted_proxies else None
        certificate = proxy.tls_certificate
        self._tls = None if certificate is None else ServerTls(certificate, proxy.tls_key)
        self._handshakes = (
            None
            if self._tls is None
            else Handshakes(self._make_client, self._tls.context, proxy.header_timeout_s, self._below_limit)
        )
        self._nodes: dict[int, str] = {}
        self._templates = TemplateChecks(self._traits)
        self._reconciler: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._clients: set[DownstreamConnection] = set()
        here = uuid.uuid4().hex[:20]
        self._ids = (f"{here}{number:x}" for number in count(1))
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = _tick_interval(proxy)
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
        failures = Failures(_LOG, "proxy: compare load with the instances' own figures")
        while True:
            await asyncio.sleep(RECONCILE_S)
            if self.counters.in_flight:
                await attempt(self._compare, failures)

    async def _compare(self) -> None:
        self._instances.reconcile(await self._pages.loads())

    @property
    def endpoint(self) -> str:
        """URL of the first listener, with its real port."""
        if self._listener is None or not self._listener.endpoints:
            raise RuntimeError("the proxy has not started")
        return self._listener.endpoints[0]

    @property
    def endpoints(self) -> list[str]:
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
        adapters that it serves. `ask_template`: find out what its chat template is good for (template_probe.py).
        `token_ids`: it tells the ids of its tokens where it is asked to, as vLLM does; without them an event counts
        as one token. `sampling_defaults`: what it applies to requests that name none, by vLLM's names.
        """
        self._nodes[slot] = numa_node
        self._traits.learn(
            model, adapters=adapters, token_ids=token_ids, sampling_defaults=sampling_defaults or {}
        )
        self._instances.add(Upstream(slot, generation, model, address, max_num_seqs))
        if ask_template and not self.closing:
            self._templates.begin(slot, generation, model, address)

    def drain_upstream(self, slot: int, generation: int) -> None:
        """No new requests; on_idle once nothing is left on it, from the event loop, never from this call."""
        self._instances.drain(slot, generation)

    def remove_upstream(self, slot: int, generation: int, reason: str, *, crashed: bool = False) -> None:
        """The instance is gone; a request on it is sent to another one, or ends in an honest error. `crashed`: it failed,
        so a request on it may be the cause."""
        self._instances.remove(slot, generation, reason, crashed=crashed)

    def in_flight(self, slot: int, generation: int) -> int:
        """Requests that the instance works on; 0 when it is not known."""
        upstream = self.balancer.table.get(slot, generation)
        return 0 if upstream is None else upstream.in_flight

    def awaited(self, slot: int, generation: int) -> int:
        """Of them, those that wait for the instance and not for their client."""
        return self._instances.awaited(slot, generation)

    def progress(self, slot: int, generation: int) -> int:
        """Reads relayed from an instance so far; it rises while any of its answers moves."""
        return self._instances.progress(slot, generation)

    def silent(self, slot: int, generation: int) -> bool:
        """Nothing has come of an instance's requests for `hung_timeout_s`, and it can run a probe beside them."""
        return self._instances.silent(slot, generation)

    def stats(self) -> dict[str, object]:
        """The sums, for `status --json`."""
        waiting = sum(1 for _ in self._instances.waiting)
        return stats.stats(self.counters, self.balancer.table, waiting)

    def first_token(self, slot: int) -> Quantiles | None:
        """How long clients of a slot waited lately for a stream's first token, time in the queue included."""
        return self._timings.first_token.quantiles(slot, self._loop.time())

    async def metrics_page(self) -> str:
        return (await self._pages.metrics_page()).body.decode()

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, give what is in flight `grace_s`, end the rest honestly, close."""
        self.closing = True
        await self._templates.close()
        if self._listener is None:
            self._executor.authorizer.close()
            return
        deadline = self._loop.time() + grace_s
        self._listener.close()
        await self._first_requests(min(FIRST_REQUEST_S, grace_s))
        self._executor.authorizer.close()
        if not await self._executor.registry.idle(max(0.0, deadline - self._loop.time())):
            self._executor.stop("the server is shutting down")
        await self._wait_closed(deadline)
        if self._timer is not None:
            self._timer.cancel()
        if self._reconciler is not None:
            self._reconciler.cancel()
            await asyncio.wait({self._reconciler})
        self._executor.close()
        await self._pages.close()

    def _sources(self) -> Sources:
        return Sources(
            instances=lambda: [
                Instance(
                    u.slot, u.generation, u.model, u.address, not u.draining, self._nodes.get(u.slot, "")
                )
                for u in sorted(self.balancer.table, key=lambda u: u.key)
            ],
            values=self._values,
            timings=self._timings,
            stopping=lambda: self.closing,
            retry_after_s=lambda: self._instances.retry_after_s(),  # noqa: PLW0108  made later
        )

    def _values(self) -> metrics.Values:
        own = stats.values(
            self.counters,
            upstreams=list(self.balancer.table),
            names=self._traits.names.names,
            waiting=Counter(request.model for request in self._instances.waiting if request.model),
            queued_bytes=self.balancer.queue.bytes,
            uploads=self.upload_memory,
            connections=self._connections,
            slow_clients=self.slow_clients,
            keys=self._keys,
            overflow=self._overflow,
        )
        return {**own, **self._more_values()}

    async def _first_requests(self, wait_s: float) -> None:
        """Close idle connections; one that was accepted just now has a request on its way, which is served."""
        for client in tuple(self._clients):
            if not client.unused:
                client.close_if_idle()
        deadline = self._loop.time() + wait_s
        while self._loop.time() < deadline and any(client.unused for client in self._clients):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for client in tuple(self._clients):
            client.close_if_idle()

    async def _wait_closed(self, deadline: float) -> None:
        """Until every client has gone: with its error event written, or by the deadline with all of its answer."""
        flushed_by = self._loop.time() + FLUSH_S
        while self._clients and (now := self._loop.time()) < max(flushed_by, deadline):
            for client in tuple(self._clients):
                client.close_if_idle()
            if now > flushed_by and not any(client.unsent for client in self._clients):
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
        if not self._below_limit():
            return False
        self._clients.add(client)
        return True

    @property
    def _connections(self) -> int:
        """Connections of clients, also before they have shaken hands."""
        return len(self._clients) + (0 if self._handshakes is None else len(self._handshakes))

    def _below_limit(self) -> bool:
        """Whether another connection may come; one that may not is counted."""
        if self.closing or self._connections >= self._most_clients:
            if not self.closing:
                self.counters.refuse_connection()
            return False
        return True

    def _make_client(self) -> DownstreamConnection:
        return DownstreamConnection(self)

    def closed(self, client: DownstreamConnection) -> None:
        self._clients.discard(client)
        self.slow_clients.remove(client)

    def fell_behind(self, client: DownstreamConnection) -> None:
        self.slow_clients.add(client)

    def caught_up(self, client: DownstreamConnection) -> None:
        self.slow_clients.remove(client)

    def begin(self, client: DownstreamConnection, head: RequestHead) -> Request:
        """A request's head has come; the request may be answered before this returns."""
        path, _query = split_target(head.target)
        found = match(head.method, path)
        request = Request(
            client, head, found if isinstance(found, Match) else None,
            path=path, request_id=head.sent_id or next(self._ids), started=self._loop.time(),
        )  # fmt: skip
        if self._proxies is not None and self._proxies.trusts(peer := client.peer):
            request.forwarded = appended(head, peer)
        self.post(request, HeadReceived())
        return request

    def turn_away(self, client: DownstreamConnection, refusal: HttpError) -> None:
        """Answer a request that could not be read, and close."""
        self.post(self._unread(client), Refused(refusal.closing()))

    def _unread(self, client: DownstreamConnection) -> Request:
        """In the place of a request of which nothing is known."""
        return Request(client, _UNREAD, None, path="-", request_id=next(self._ids), started=self._loop.time())

    # --- the clock -------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        now = self._loop.time()
        for client in tuple(self._clients):
            if client.due(now):
                self.post(client.answering or self._unread(client), ConnectionDue())
        self._executor.tick(now)


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


def _names_of(models: Sequence[Model]) -> ModelNames:
    names = tuple(dict.fromkeys(model.name for model in models))
    return ModelNames(names, {alias: model.name for model in models for alias in model.aliases})
