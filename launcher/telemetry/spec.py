"""One row of the tables of metrics, and what a scrape fills in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

Values = Mapping[str, Mapping[tuple[str, ...], float]]  # metric -> label values -> value


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Spec:
    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


def counter(name: str, text: str, *labels: str) -> Spec:
    return Spec(name, MetricKind.COUNTER, text, labels)


def gauge(name: str, text: str, *labels: str) -> Spec:
    return Spec(name, MetricKind.GAUGE, text, labels)
