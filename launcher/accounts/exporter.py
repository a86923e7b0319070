"""Sends the traces of ended requests to a collector, in a thread of its own.

The event loop only appends to a bounded queue. A collector that is slow, refuses or is gone costs traces and no request:
it is said once in the log, shown in `status`, and what was dropped is counted.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.otlp import TIMEOUT_S, Attribute, Collector, Reply, Resource, Scope, Taken, encode
from launcher.accounts.spans import spans_of

log = logging.getLogger("launcher.tracing")

# Requests that wait for the collector: about 4 MiB.
MAX_WAITING: Final = 4096
# Requests of one message to the collector: about 500 KiB.
BATCH: Final = 256
# Of them are made spans of at a time; then the event loop may run. Each takes about 10 us.
SLICE: Final = 8
EVERY_S: Final = 1.0
# After a failure the collector is asked again after this time, then twice as long, up to the longest.
RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0
# For what waits when the daemon exits.
FLUSH_S: Final = 3.0


class Dropped(StrEnum):
    """Why a trace did not reach the collector."""

    QUEUE_FULL = "queue_full"
    REFUSED = "refused"
    STOPPED = "stopped"


class Exporter:
    """Raises LauncherError for unusable headers in the environment; nothing else of it raises."""

    def __init__(
        self,
        endpoint: str,
        version: str,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoint = endpoint
        self._collector = Collector(endpoint, environ)
        self._clock = clock
        self._resource = Resource(
            [
                Attribute.text("service.name", environ.get("OTEL_SERVICE_NAME") or "numa-launcher"),
                Attribute.text("service.version", version),
                Attribute.text("host.name", socket.gethostname()),
                Attribute.number("process.pid", os.getpid()),
            ]
        )
        self._scope = Scope("launcher.tracing", version)
        self._waiting: deque[EndedRequest] = deque()
        self._unsent: tuple[bytes, int] | None = None
        """A message that the collector did not take yet, and its number of traces."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._retry_s = 0.0
        self._flush_until = 0.0
        self.problem = ""
        """Why the collector does not take traces; "" while it does."""
        self.exported = 0
        self.dropped: Counter[Dropped] = Counter()
        """Traces by reason. The event loop counts QUEUE_FULL, the thread the others."""

    def export(self, ended: EndedRequest) -> None:
        """From the event loop: returns at once."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped[Dropped.QUEUE_FULL] += 1
        else:
            self._waiting.append(ended)

    @property
    def waiting(self) -> int:
        """Traces that the collector does not have yet."""
        return len(self._waiting) + (0 if self._unsent is None else self._unsent[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Send what waits, within FLUSH_S. Blocks; also without `start`."""
        if not self._thread.is_alive():
            return
        self._flush_until = self._clock() + FLUSH_S
        self._stopping.set()
        self._thread.join(FLUSH_S + 1)
        lost = self.waiting
        if lost:
            self.dropped[Dropped.STOPPED] += lost
            log.warning("traces: %d were not sent to '%s' before the daemon's exit", lost, self._endpoint)

    def _run(self) -> None:
        while not self._stopping.wait(self._retry_s or EVERY_S):
            self._send_all(TIMEOUT_S)
        while self._has_more() and (left_s := self._flush_until - self._clock()) > 0:
            if not self._send_batch(min(TIMEOUT_S, left_s)):
                break
        self._collector.close()

    def _has_more(self) -> bool:
        return self._unsent is not None or bool(self._waiting)

    def _send_all(self, timeout_s: float) -> None:
        """What waits now, or as much as the collector takes. Later traces are for the next time: a message for each of them
        would cost more than all else."""
        due = len(self._waiting)
        while (due > 0 or self._unsent is not None) and not self._stopping.is_set():
            if not self._send_batch(timeout_s):
                return
            due -= BATCH

    def _send_batch(self, timeout_s: float) -> bool:
        """False: the collector is to be left alone for a while."""
        body, traces = self._unsent or self._encoded()
        reply = self._collector.send(body, timeout_s)
        self._unsent = (body, traces) if reply.taken is Taken.LATER else None
        if reply.taken is not Taken.YES:
            if reply.taken is Taken.NO:
                self.dropped[Dropped.REFUSED] += traces
            self._failed(reply)
            return False
        refused = min(traces, reply.rejected)
        self.exported += traces - refused
        self.dropped[Dropped.REFUSED] += refused
        self._worked(reply)
        return True

    def _encoded(self) -> tuple[bytes, int]:
        spans, traces = [], 0
        while self._waiting and traces < BATCH:
            for _ in range(min(SLICE, len(self._waiting))):
                spans += spans_of(self._waiting.popleft())
                traces += 1
            time.sleep(0)  # the event loop takes its turn
        return encode(self._resource, self._scope, spans), traces

    def _failed(self, reply: Reply) -> None:
        self._retry_s = min(MAX_RETRY_S, self._retry_s * 2 or RETRY_S)
        self._tell(reply.why)

    def _worked(self, reply: Reply) -> None:
        self._retry_s = 0.0
        if reply.rejected:
            self._tell(f"it rejected {reply.rejected} spans: {reply.why}")
        elif self.problem:
            self.problem = ""
            log.info(
                "traces are sent again to '%s'; dropped so far: %d", self._endpoint, self.dropped.total()
            )

    def _tell(self, problem: str) -> None:
        """Once, until traces are sent again."""
        if not self.problem:
            log.warning(
                "cannot send traces to '%s': %s; tried again at least every %g s, and %d wait meanwhile",
                self._endpoint, problem, MAX_RETRY_S, MAX_WAITING,
            )  # fmt: skip
        self.problem = problem
