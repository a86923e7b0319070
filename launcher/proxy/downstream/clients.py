"""The open connections of clients: how many there may be, the requests that come on them, their deadlines, their end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Any

from launcher.base.api_errors import HttpError
from launcher.base.watched_file import WatchedFile
from launcher.config.schema import Proxy
from launcher.proxy.downstream.connection import DownstreamConnection
from launcher.proxy.downstream.origin import TrustedProxies, appended, wished_slot
from launcher.proxy.downstream.slow_clients import SlowClients
from launcher.proxy.downstream.tls import Handshakes, ServerTls
from launcher.proxy.downstream.uploads import UploadMemory
from launcher.proxy.http1.requests import RequestHead
from launcher.proxy.observability.stats import Counters
from launcher.proxy.request.events import ConnectionDue, HeadReceived, Refused, RequestReceived
from launcher.proxy.request.record import Post, Request
from launcher.proxy.routes import Match, match, split_target

_TURNS = 3  # of the event loop, from the accept of a connection until it is made
FLUSH_S = 1.0  # for the error events of requests that were cut to be written

_UNREAD = RequestHead("-", "/", False, None, False, False, False, None, b"\r\n", b"\r\n", ())


class Clients:
    def __init__(
        self,
        proxy: Proxy,
        most: int,
        *,
        counters: Counters,
        slow_clients: SlowClients,
        upload_memory: UploadMemory,
        post: Post,
    ) -> None:
        """`most`: connections at a time."""
        self._most = most
        self._counters = counters
        self._slow_clients = slow_clients
        self._loop = asyncio.get_running_loop()
        self._open: set[DownstreamConnection] = set()
        self._proxies = TrustedProxies(proxy.trusted_proxies) if proxy.trusted_proxies else None
        self.handshakes: Handshakes | None = None
        self._tls: ServerTls | None = None
        if proxy.tls_certificate is not None:
            self._tls = ServerTls(proxy.tls_certificate, proxy.tls_key)
            self.handshakes = Handshakes(
                self.make, self._tls.context, proxy.header_timeout_s, self._below_limit
            )
        self._id_prefix = uuid.uuid4().hex[:20]
        self._ids = count(1)
        self.post = post
        self.closing = False
        self.header_timeout_s = proxy.header_timeout_s
        self.body_timeout_s = proxy.body_timeout_s
        self.body_min_bytes_per_s = proxy.body_min_bytes_per_s
        self.keepalive_s = proxy.client_keepalive_s
        self.stall_timeout_s = proxy.client_stall_timeout_s
        self.min_bytes_per_s = proxy.client_min_bytes_per_s
        self.max_body_bytes = proxy.max_body_bytes
        self.upload_wait_s = proxy.upload_wait_s
        self.upload_memory = upload_memory

    def __iter__(self) -> Iterator[DownstreamConnection]:
        return iter(self._open)

    def __len__(self) -> int:
        """Connections, also before they have shaken hands."""
        return len(self._open) + (0 if self.handshakes is None else len(self.handshakes))

    @property
    def certificate_end(self) -> float | None:
        """Of the TLS certificate in force, seconds since the epoch; None without one."""
        return None if self._tls is None else self._tls.end

    @property
    def files(self) -> tuple[WatchedFile[Any], ...]:
        """Of the TLS certificate."""
        return () if self._tls is None else self._tls.files

    def make(self) -> DownstreamConnection:
        return DownstreamConnection(self)

    # --- what a connection tells (connection.Owner) -------------------------------------------------

    def opened(self, client: DownstreamConnection) -> bool:
        if self.handshakes is not None:
            self.handshakes.ended(client)
        if not self._below_limit():
            return False
        self._open.add(client)
        return True

    def _below_limit(self) -> bool:
        """Whether another connection may come; one that may not is counted."""
        if len(self) >= self._most:
            self._counters.refuse_connection()
            return False
        return True

    def closed(self, client: DownstreamConnection) -> None:
        self._open.discard(client)
        self._slow_clients.remove(client)

    def fell_behind(self, client: DownstreamConnection) -> None:
        self._slow_clients.add(client)

    def caught_up(self, client: DownstreamConnection) -> None:
        self._slow_clients.remove(client)

    def begin(self, client: DownstreamConnection, head: RequestHead, body: bytes | None) -> Request:
        path, _query = split_target(head.target)
        found = match(head.method, path)
        request = Request(
            client, head, found if found.__class__ is Match else None,
            path=path, request_id=head.sent_id or f"{self._id_prefix}{next(self._ids):x}", started=self._loop.time(),
        )  # fmt: skip
        if self._proxies is not None and self._proxies.trusts(peer := client.peer):
            request.forwarded, request.wished = appended(head, peer), wished_slot(head)
        self.post(request, HeadReceived() if body is None else RequestReceived(body))
        return request

    def turn_away(self, client: DownstreamConnection, refusal: HttpError, target: str | None) -> None:
        path = "-" if target is None else split_target(target)[0]
        self.post(self._unread(client, path), Refused(refusal.closing()))

    def _unread(self, client: DownstreamConnection, path: str = "-") -> Request:
        """In the place of a request of which no more than its path is known."""
        request_id = f"{self._id_prefix}{next(self._ids):x}"
        return Request(client, _UNREAD, None, path=path, request_id=request_id, started=self._loop.time())

    # --- time, and the end -------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        for client in tuple(self._open):
            if client.due(now):
                self.post(client.answering or self._unread(client), ConnectionDue())

    def excuse(self, seconds: float) -> None:
        """This process could not read for so long."""
        for client in self._open:
            client.excuse(seconds)

    def stop(self) -> None:
        """No connection is accepted any more. From here on one that has been answered is closed."""
        self.closing = True

    async def first_requests(self, wait_s: float) -> None:
        """Close idle connections; one that was accepted just now has a request on its way, which is served."""
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        for client in tuple(self._open):
            if not client.unused:
                client.close_if_idle()
        deadline = self._loop.time() + wait_s
        while self._loop.time() < deadline and any(client.unused for client in self._open):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for client in tuple(self._open):
            client.close_if_idle()

    async def wait_closed(self, deadline: float) -> None:
        """Until every client has gone: with its error event written, or by the deadline with all of its answer."""
        flushed_by = self._loop.time() + FLUSH_S
        while self._open and (now := self._loop.time()) < max(flushed_by, deadline):
            for client in tuple(self._open):
                client.close_if_idle()
            if now > flushed_by and not any(client.unsent for client in self._open):
                break
            await asyncio.sleep(0.01)
        for client in tuple(self._open):
            client.give_up()
        await asyncio.sleep(0)
