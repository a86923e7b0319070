"""Traces of requests in the daemon: made from [telemetry], shown in metrics and `status`."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import launcher
from launcher.config.schema import Config
from launcher.proxy.accounting import Accounting
from launcher.proxy.observability.tracing import RequestTracing
from launcher.telemetry import metrics
from launcher.telemetry.spec import Values
from launcher.tracing.exporter import Dropped, Exporter


class TraceAccount:
    """Does nothing without [telemetry] otlp_endpoint. Raises LauncherError for unusable headers in the environment."""

    def __init__(self, config: Config) -> None:
        endpoint, self._share = config.telemetry.otlp_endpoint, config.telemetry.otlp_sampling
        self._endpoint = endpoint
        self._exporter = Exporter(endpoint, launcher.__version__) if endpoint else None

    def joined(self, accounting: Accounting) -> Accounting:
        """With tracing."""
        exporter = self._exporter
        if exporter is None:
            return accounting
        tracing = RequestTracing(self._share, random.Random().getrandbits, exporter.export)  # noqa: S311  no secrets
        return replace(accounting, tracing=tracing)

    def start(self) -> None:
        if self._exporter is not None:
            self._exporter.start()

    async def stop(self) -> None:
        """After the last request has ended. Also without `start`."""
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.stop)

    def values(self) -> Values:
        """For the metrics page."""
        if self._exporter is None:
            return {}
        dropped = self._exporter.dropped
        return {
            metrics.TRACES_EXPORTED: {(): float(self._exporter.exported)},
            metrics.TRACES_DROPPED: {(reason.value,): float(dropped[reason]) for reason in Dropped},
            metrics.TRACES_WAITING: {(): float(self._exporter.waiting)},
        }

    def warnings(self) -> tuple[str, ...]:
        """For `status`."""
        exporter = self._exporter
        if exporter is None or not exporter.problem:
            return ()
        counts = f"{exporter.waiting} wait, {exporter.dropped.total()} were dropped"
        remedy = "start the collector, or correct [telemetry] otlp_endpoint and restart the daemon"
        return (f"cannot send traces to '{self._endpoint}': {exporter.problem}; {counts}; {remedy}",)
