"""What the Grafana dashboard asks Prometheus, and which metrics exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.prometheus import MONITORING

from launcher.telemetry.machine_metrics import MetricKind
from launcher.telemetry.metrics import TABLE
from launcher.telemetry.timings import Timings

VLLM = Path(__file__).parents[1] / "telemetry" / "vllm-0.32.0.metrics.txt"
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
# What Grafana puts in for the variables while "All" is chosen.
_ALL = {"$instance": ".*", "$model": ".*"}


def expressions() -> list[str]:
    """Of panels and annotations, as Grafana sends them."""
    return list(dict.fromkeys(map(_filled, _raw())))


def _raw() -> Iterator[str]:
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["expr"]


def _filled(expression: str) -> str:
    for name, value in _ALL.items():
        expression = expression.replace(name, value)
    return expression


def known() -> set[str]:
    """Names of series: ours, and those of a real vLLM's page."""
    ours = {f"{spec.name}_total" if spec.kind is MetricKind.COUNTER else spec.name for spec in TABLE}
    ours |= {f"{each.name}_{part}" for each in Timings().all() for part in ("bucket", "count", "sum")}
    families = text_string_to_metric_families(VLLM.read_text(encoding="utf-8"))
    return ours | {sample.name for family in families for sample in family.samples}


def metrics_in(expression: str) -> set[str]:
    """Names of series in an expression."""
    return set(re.findall(r"\b(?:numa_launcher[_:]|vllm:)[\w:]*|\bup\b", re.sub(r'"[^"]*"', "", expression)))
