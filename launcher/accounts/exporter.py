"""Sends the traces of ended requests to a collector, in a thread of its own.

A collector that is slow, refuses or is gone costs traces and no request: launcher.base.writer.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from launcher.accounts.ended_request import EndedRequest
from launcher.accounts.otlp import TIMEOUT_S, Attribute, Collector, Resource, Scope, Taken, encode
from launcher.accounts.spans import spans_of
from launcher.base.errors import LauncherError
from launcher.base.writer import Problem, Sink

log = logging.getLogger("launcher.tracing")

# Requests that wait for the collector: about 4 MiB.
MAX_WAITING: Final = 4096
# Requests of one message to the collector: about 500 KiB.
BATCH: Final = 256
# Of them are made spans of at a time; then the event loop may run. Each takes about 10 us.
SLICE: Final = 8
EVERY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0
# For what waits when the daemon exits.
FLUSH_S: Final = 3.0


class Dropped(StrEnum):
    """Why a trace did not reach the collector."""

    QUEUE_FULL = "queue_full"
    REFUSED = "refused"
    STOPPED = "stopped"


class Exporter(Sink[EndedRequest]):
    """Traces for the collector at `endpoint`. Raises LauncherError for unusable headers in the environment."""

    level = logging.WARNING

    def __init__(self, endpoint: str, version: str, environ: Mapping[str, str] = os.environ) -> None:
        super().__init__(
            log, f"traces to '{endpoint}'", most=MAX_WAITING, every_s=EVERY_S, longest_retry_s=MAX_RETRY_S,
            meanwhile=f"tried again at least every {MAX_RETRY_S:g} s, and {MAX_WAITING} wait meanwhile",
        )  # fmt: skip
        self._collector = Collector(endpoint, environ)
        self._resource = Resource(
            [
                Attribute.text("service.name", environ.get("OTEL_SERVICE_NAME") or "numa-launcher"),
                Attribute.text("service.version", version),
                Attribute.text("host.name", socket.gethostname()),
                Attribute.number("process.pid", os.getpid()),
            ]
        )
        self._scope = Scope("launcher.tracing", version)
        self._message = b""
        """All that was taken, encoded, as long as the collector did not take it."""
        self._unfit = 0
        """Traces among them that could not be encoded."""
        self._stopped = 0
        self._not_taken = 0
        self.exported = 0

    @property
    def dropped(self) -> Mapping[Dropped, int]:
        """Traces that did not reach the collector."""
        return {
            Dropped.QUEUE_FULL: self.refused,
            Dropped.REFUSED: self._not_taken,
            Dropped.STOPPED: self._stopped,
        }

    @property
    def lost(self) -> int:
        return sum(self.dropped.values())

    @property
    def problem(self) -> Problem | None:
        """That of the last turn: each message has a time-out, so that many of them are no stall."""
        return self._problem

    # --- the thread's side ---------------------------------------------------------------------------

    def write(self) -> Problem | None:
        """Send all that waits now, or as much as the collector takes. Later traces are for the next time: a message for each
        would cost more than all else."""
        problem = None if self.waiting else self._problem  # until traces are sent again
        for _ in range(0, self.waiting, BATCH):
            if self.writer is not None and self.writer.stopping:
                break
            problem = self._send(TIMEOUT_S) or problem
        return problem

    def end(self, until: float) -> Problem | None:
        problem = None
        try:
            while self.waiting and (left_s := until - time.monotonic()) > 0:
                problem = self._send(min(TIMEOUT_S, left_s))
        finally:
            self._collector.close()
        return problem

    def _send(self, timeout_s: float) -> Problem | None:
        """One message. Raises LauncherError where the collector is to be left alone for a while."""
        if not self._message:
            self._message = self._encoded(self.take(BATCH))
        reply = self._collector.send(self._message, timeout_s)
        if reply.taken is Taken.LATER:
            raise self._error(reply.why)
        count, self._message = len(self._taken) - self._unfit, b""
        self._not_taken += self._unfit
        self.done()
        if reply.taken is Taken.NO:
            self._not_taken += count
            raise self._error(reply.why)
        rejected = min(count, reply.rejected)
        self.exported += count - rejected
        self._not_taken += rejected
        if reply.rejected:
            return self.failed(self._error(f"it rejected {reply.rejected} spans: {reply.why}"))
        return None

    def _error(self, why: str) -> LauncherError:
        return LauncherError(
            f"cannot send {self.title}: {why}",
            "start the collector, or correct [telemetry] otlp_endpoint and restart the daemon",
        )

    def recovered(self) -> str:
        return f"{self.title} are sent again; dropped so far: {self.lost}"

    def given_up(self, left: int) -> None:
        self._stopped += left
        log.warning("%s: %d were not sent before the daemon's exit", self.title, left)

    def _encoded(self, traces: Sequence[EndedRequest]) -> bytes:
        spans, unfit = [], 0
        for number, trace in enumerate(traces):
            try:
                spans += spans_of(trace)
            except Exception:  # one trace must not keep the others from being sent
                log.exception("traces: one cannot be encoded")
                unfit += 1
            if number % SLICE == 0:
                time.sleep(0)  # the event loop takes its turn
        self._unfit = unfit
        return encode(self._resource, self._scope, spans)
