"""ProxyServer: one OpenAI endpoint over the ready instances.

The daemon tells it which instances are ready, draining or gone; it tells the daemon when a draining one is
idle and when one looks broken.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from launcher.balancing.balancer import Balancer
from launcher.balancing.upstreams import Upstream
from launcher.base.address import Address
from launcher.base.background import Failures, RunningClock, attempt
from launcher.base.watched_file import WatchedFiles
from launcher.config.schema import Model, Proxy
from launcher.keys.api_keys import ApiKeys
from launcher.proxy.continuation.template_probe import TemplateChecks
from launcher.proxy.dispatch.admission import Admission
from launcher.proxy.dispatch.attempts import Attempts
from launcher.proxy.dispatch.authorize import Authorizer
from launcher.proxy.dispatch.executor import Executor, Responder
from launcher.proxy.dispatch.instances import Instances, OnIdle, OnSuspect
from launcher.proxy.dispatch.registry import RequestRegistry, tick_interval_s
from launcher.proxy.dispatch.streaming import Streaming
from launcher.proxy.downstream import response
from launcher.proxy.downstream.clients import Clients
from launcher.proxy.downstream.listener import Listener
from launcher.proxy.downstream.origin import Cors
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.downstream.uploads import UploadMemory
from launcher.proxy.ended import Accounting
from launcher.proxy.observability.access_log import AccessLog
from launcher.proxy.observability.stats import Counters
from launcher.proxy.observability.timelines import Timelines
from launcher.proxy.openai.models import ModelNames, ModelTraits
from launcher.proxy.pages.host_load import HostLoad
from launcher.proxy.pages.renderer import Instance, PageRenderer, Sources
from launcher.proxy.readings import Parts, Readings
from launcher.proxy.request.actions import Action
from launcher.proxy.request.decisions import Decisions
from launcher.proxy.request.retry_policy import RetryPolicy
from launcher.proxy.upstream.overflow import Overflow
from launcher.telemetry.machine_metrics import Values
from launcher.telemetry.timings import Timings

_LOG = logging.getLogger(__name__)

# After the last accept: for the first request of a connection.
FIRST_REQUEST_S = 1.0
RECONCILE_S = 5.0  # one page per instance: under 1 ms each


class ProxyServer:
    """Makes the parts of the proxy, and is what the daemon sees of them."""

    def __init__(
        self,
        proxy: Proxy,
        *,
        models: Sequence[Model],
        on_idle: OnIdle,
        on_suspect: OnSuspect,
        chance: random.Random | None = None,
        most_clients: int | None = None,
        more_values: Callable[[], Values] = dict,
        accounting: Accounting | None = None,
        running: RunningClock | None = None,
    ) -> None:
        """`most_clients`: fewer than `proxy.max_connections`, where the process may not open files for so many.
        `more_values`: of metrics that others measure, for the metrics page. `accounting`: who is told of ended requests.
        `running`: when the event loop ran."""
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()
        self.counters = Counters()
        self.slow_clients = SlowClients(proxy, self._loop.time)
        self.upload_memory = UploadMemory(proxy.upload_max_bytes, proxy.max_body_bytes)
        self.balancer = balancer = Balancer(
            proxy.policy,
            (chance or random.Random()).randrange,  # noqa: S311
            max_requests=proxy.queue_max_requests,
            max_bytes=proxy.queue_max_bytes,
            eject_failures=proxy.eject_failures,
            eject_s=proxy.eject_s,
        )
        self._timings = Timings()
        accounting = accounting or Accounting()
        budgets = accounting.budgets
        self._keys = ApiKeys(proxy.api_keys_file, budgets)
        self._overflow = (
            Overflow(proxy.overflow, proxy.connect_timeout_s, accounting.caps, accounting.clock)
            if proxy.overflow
            else None
        )
        self._traits = ModelTraits(_names_of(models))
        decisions = Decisions(RetryPolicy(proxy.park_timeout_s), balancer, self._traits, self._overflow)
        self._executor = Executor(decisions, self._loop.time)
        self.post = post = self._executor.post
        self._instances = Instances(
            proxy, balancer, self.counters, post, on_idle=on_idle, on_suspect=on_suspect
        )
        self._pages = PageRenderer(self._traits, self._sources(), post)
        self.requests = RequestRegistry(
            proxy,
            self.counters,
            self._timings,
            balancer,
            accounting=accounting,
            timelines=Timelines(),
            post=post,
        )
        self._authorizer = Authorizer(
            self._keys,
            Cors(proxy.cors_origins),
            self.requests,
            proxy.max_body_bytes,
            self._instances.retry_after_s,
            budgets=budgets,
            unrecorded=accounting.unrecorded,
            post=post,
        )
        responder = Responder(self.slow_clients, proxy.keepalive_comment_s)
        streaming = Streaming(balancer, self._traits, self._timings, post)
        admission = Admission(
            proxy,
            self._traits,
            self._instances,
            responder,
            budgets=budgets,
            overflow=self._overflow,
            post=post,
        )
        tracing = accounting.tracing
        attempts = Attempts(self._instances, self._overflow, streaming, responder, tracing, post=post)
        self._access_log = AccessLog(proxy.access_log, self._loop.call_soon)
        self._executor.start(
            {
                Action.AUTHORIZE: self._authorizer.authorize,
                Action.LOOK: admission.look,
                Action.ADMIT: admission.admit,
                Action.ENQUEUE: admission.enqueue,
                Action.SET_TIMER: admission.set_timer,
                Action.WITHDRAW: admission.withdraw,
                Action.SEND: attempts.send,
                Action.SEND_OVERFLOW: attempts.send_overflow,
                Action.READ: attempts.read,
                Action.LEAVE: attempts.leave,
                Action.START: streaming.start,
                Action.FIRST_TOKEN: self._instances.first_token,
                Action.SETTLE: self._instances.settle,
                Action.RENDER_PAGE: self._pages.render,
                Action.COMMENT: responder.comment,
                Action.CHECK_CLIENT: responder.check_client,
                Action.PAUSE: responder.pause,
                Action.RESUME: responder.resume,
                Action.DELIVER: response.deliver,
                Action.FINISH: response.finish,
                Action.REFUSE: response.refuse,
                Action.BREAK_OFF: response.break_off,
                Action.ABORT: response.abort,
                Action.COUNT_RETRY: self.counters.retry,
                Action.COUNT: self.requests.count,
                Action.LOG: self._access_log.add,
            }
        )
        self._clients = Clients(
            proxy,
            proxy.max_connections if most_clients is None else most_clients,
            counters=self.counters,
            slow_clients=self.slow_clients,
            upload_memory=self.upload_memory,
            post=post,
        )
        self._files = WatchedFiles(
            (
                *self._clients.files,
                *self._keys.files,
                *(file for endpoint in self._overflow or () for file in endpoint.files),
            )
        )
        self.readings = Readings(
            Parts(
                proxy=proxy,
                balancer=balancer,
                instances=self._instances,
                clients=self._clients,
                slow_clients=self.slow_clients,
                upload_memory=self.upload_memory,
                counters=self.counters,
                timings=self._timings,
                keys=self._keys,
                budgets=budgets,
                overflow=self._overflow,
                files=self._files,
            ),
            self._traits.names.names,
            more_values,
            self._loop.time,
        )
        self._nodes: dict[int, str] = {}
        self._templates = TemplateChecks(self._traits)
        self._reconciler: asyncio.Task[None] | None = None
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._interval_s = tick_interval_s(proxy)
        self._running = running or RunningClock()
        self._skipped = self._running.skipped()

    # --- the daemon's side ---------------------------------------------------------------------

    async def start(self, ready: Sequence[socket.socket] = (), *, listens: bool = True) -> None:
        """Listen on `ready` sockets, which systemd opened and keeps, or else on [proxy] listen; nowhere unless `listens`.

        Raises LauncherError when an address can't be had; nothing listens then.
        """
        self._files.look(self._loop.time())
        self._listener = Listener(self._clients.make, self._clients.handshakes)
        try:
            for sock in ready:
                await self._listener.take(sock)
            for listen in self._proxy.listen if listens and not ready else ():
                await self._listener.open(listen, self._proxy.listen)
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

    @property
    def absent_endpoints(self) -> list[str]:
        """Those of them whose address no interface of this host has now."""
        return [] if self._listener is None else self._listener.absent

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
        context_tokens: int | None = None,
    ) -> None:
        """The instance may get requests; a drain of this very generation is taken back.

        `numa_node`: the list of nodes that its memory is on, a label of its metrics. `adapters`: names of the LoRA
        adapters that it serves. `ask_template`: find out what its chat template is good for (template_probe.py).
        `token_ids`: it tells the ids of its tokens where it is asked to, as vLLM does; without them an event counts
        as one token. `sampling_defaults`: what it applies to requests that name none, by vLLM's names. `context_tokens`:
        the longest prompt and response together, where that is known.
        """
        self._nodes[slot] = numa_node
        self._traits.learn(
            model,
            adapters=adapters,
            token_ids=token_ids,
            sampling_defaults=sampling_defaults or {},
            context_tokens=context_tokens,
        )
        self._instances.add(Upstream(slot, generation, model, address, max_num_seqs))
        if ask_template and not self._clients.closing:
            self._templates.begin(slot, generation, model, address)

    def drain_upstream(self, slot: int, generation: int) -> None:
        """No new requests; on_idle once nothing is left on it, from the event loop, never from this call."""
        self._instances.drain(slot, generation)

    def remove_upstream(self, slot: int, generation: int, reason: str, *, crashed: bool = False) -> None:
        """The instance is gone; a request on it is sent to another one, or ends in an honest error. `crashed`: it failed,
        so a request on it may be the cause."""
        self._templates.end(slot, generation)
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

    async def metrics_page(self) -> str:
        return (await self._pages.metrics_page()).body.decode()

    async def stop(self, grace_s: float) -> None:
        """Stop accepting, give what is in flight `grace_s`, end the rest honestly, close."""
        if self._listener is not None:
            self._listener.close()  # before anything is awaited: what it has accepted is served
        self._clients.stop()
        await self._templates.close()
        deadline = self._loop.time() + grace_s
        await self._clients.first_requests(min(FIRST_REQUEST_S, grace_s))
        self._authorizer.close()
        if not await self.requests.idle(max(0.0, deadline - self._loop.time())):
            self._instances.stop()
            self.requests.stop("the server is shutting down")
        await self._clients.wait_closed(deadline)
        if self._timer is not None:
            self._timer.cancel()
        if self._reconciler is not None:
            self._reconciler.cancel()
            await asyncio.wait({self._reconciler})
        self._access_log.flush()
        await self._instances.close()
        if self._overflow is not None:
            self._overflow.close()
        await self._pages.close()

    def _sources(self) -> Sources:
        return Sources(
            instances=lambda: [
                Instance(
                    u.slot, u.generation, u.model, u.address, not u.draining, self._nodes.get(u.slot, "")
                )
                for u in sorted(self.balancer.table, key=lambda u: u.key)
            ],
            values=lambda: self.readings.values(),  # noqa: PLW0108  made later
            timings=self._timings,
            load=HostLoad(self.balancer, self._traits, self._instances.adapters, time.time()),
            stopping=lambda: self._clients.closing,
            retry_after_s=self._instances.retry_after_s,
        )

    # --- the clock -------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        now = self._loop.time()
        skipped = self._running.skipped()
        if skipped > self._skipped:
            self._excuse(skipped - self._skipped, now)
            self._skipped = skipped
        self._files.look(now)
        self._clients.tick(now)
        self.requests.tick(now)
        self.slow_clients.tick(now, self._instances.models_waited_for)
        self._instances.tick(now)
        if self._overflow is not None:
            self._overflow.tick(now)

    def _excuse(self, seconds: float, now: float) -> None:
        """The event loop did not run: nobody's silence counts that time."""
        self._clients.excuse(seconds)
        self.requests.excuse(seconds, now)
        self.slow_clients.excuse(seconds)
        self._instances.excuse(seconds, now)


def _names_of(models: Sequence[Model]) -> ModelNames:
    names = tuple(dict.fromkeys(model.name for model in models))
    return ModelNames(names, {alias: model.name for model in models for alias in model.aliases})
