"""The load of the whole host as one vLLM would report it: one series per family, for gateways that choose among hosts.

The Gateway API inference extension's endpoint picker reads these names of vLLM (its model server protocol): gauges, of each
family one series, of adapters the one with the latest time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from launcher.telemetry.vllm_metrics import ADAPTERS, KV_USAGE, RUNNING, WAITING

_ADAPTER_LABELS: Final = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")


@dataclass(frozen=True, slots=True)
class HostView:
    running: int
    waiting: int  # in the proxy's queue, and inside the instances
    kv_usage: float  # 0 to 1
    max_adapters: int = 0  # that can run at once
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()


class _Families:
    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(view: HostView, unix_time: float) -> str:
    """Prometheus' text format. The value of the adapters' series is a time, as in vLLM (v1/metrics/loggers.py of 0.32)."""
    adapters = GaugeMetricFamily(ADAPTERS, "LoRA adapters of requests on this host.", labels=_ADAPTER_LABELS)
    names = (",".join(view.waiting_adapters), ",".join(view.running_adapters))
    adapters.add_metric((str(view.max_adapters), *names), unix_time)
    return generate_latest(
        _Families(
            GaugeMetricFamily(WAITING, "Requests that wait on this host.", value=view.waiting),
            GaugeMetricFamily(RUNNING, "Requests that run on this host.", value=view.running),
            GaugeMetricFamily(KV_USAGE, "Share of the KV cache in use on this host.", value=view.kv_usage),
            adapters,
        )
    ).decode()
