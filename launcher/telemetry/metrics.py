"""The metrics of the proxy and its accounts: names and meanings. Those of the slots and the machine: machine_metrics.py;
those of the instances are merged beside them (merge.py).

Counters are plain integers where they are counted; a scrape turns them into samples (rendering.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from launcher.telemetry import machine_metrics
from launcher.telemetry.machine_metrics import MetricKind, Spec, Values, counter, gauge
from launcher.telemetry.timings import Histogram, Histograms, Timings

METRICS_AGE_S = 1.0
"""The instances' part of a metrics page may be this old."""

ACCEPTED = "numa_launcher_requests_accepted"
ENDED = "numa_launcher_requests_ended"
IN_FLIGHT = "numa_launcher_requests_in_flight"
RETRIED = "numa_launcher_requests_retried"
SLOT_SENT = "numa_launcher_slot_requests_sent"
SLOT_BROKEN = "numa_launcher_slot_requests_broken"
SLOT_ENDED = "numa_launcher_slot_requests_ended"
SLOT_IN_FLIGHT = "numa_launcher_slot_requests_in_flight"
SLOT_READY = "numa_launcher_slot_ready"
READY = "numa_launcher_ready_instances"
QUEUED = "numa_launcher_queue_requests"
QUEUED_BYTES = "numa_launcher_queue_bytes"
QUEUE_OLDEST = "numa_launcher_queue_oldest_seconds"
QUEUE_MAX = "numa_launcher_queue_max_requests"
QUEUE_REJECTED = "numa_launcher_queue_rejected"
PARKED = "numa_launcher_parked_requests"
CONTINUED = "numa_launcher_streams_continued"
SLOT_EJECTED = "numa_launcher_slot_ejected"
SLOT_EJECTIONS = "numa_launcher_slot_ejections"
SLOT_WEIGHT = "numa_launcher_slot_weight"
UNAUTHORIZED = "numa_launcher_requests_unauthorized"
KEY_ACCEPTED = "numa_launcher_key_requests_accepted"
KEY_ENDED = "numa_launcher_key_requests_ended"
KEY_REFUSED = "numa_launcher_key_requests_refused"
KEY_IN_FLIGHT = "numa_launcher_key_requests_in_flight"
KEY_TOKENS = "numa_launcher_key_tokens"
KEY_PROMPT_TOKENS = "numa_launcher_key_prompt_tokens"
KEY_OUTPUT_TOKENS = "numa_launcher_key_output_tokens"
PROMPT_TOKENS = "numa_launcher_prompt_tokens"
CACHED_TOKENS = "numa_launcher_cached_prompt_tokens"
OUTPUT_TOKENS = "numa_launcher_output_tokens"
KEY_BUDGET_SPENT = "numa_launcher_key_budget_spent_ratio"
OVERFLOW_SENT = "numa_launcher_overflow_requests_sent"
OVERFLOW_ENDED = "numa_launcher_overflow_requests_ended"
OVERFLOW_IN_FLIGHT = "numa_launcher_overflow_requests_in_flight"
OVERFLOW_COST = "numa_launcher_overflow_cost"
OVERFLOW_CAPPED = "numa_launcher_overflow_requests_capped"
OVERFLOW_WITHOUT_USAGE = "numa_launcher_overflow_responses_without_usage"
OVERFLOW_SPENT = "numa_launcher_overflow_spent_today"
OVERFLOW_RESERVED = "numa_launcher_overflow_reserved"
OVERFLOW_MAX_PER_DAY = "numa_launcher_overflow_max_per_day"
UPLOAD_BYTES = "numa_launcher_upload_bytes"
UPLOADS_WAITING = "numa_launcher_uploads_waiting"
UPLOADS_REFUSED = "numa_launcher_uploads_refused"
CONNECTIONS = "numa_launcher_connections"
FILE_USABLE = "numa_launcher_file_usable"
CERTIFICATE_END = "numa_launcher_tls_certificate_not_after_timestamp_seconds"
CONNECTIONS_REFUSED = "numa_launcher_connections_refused"
SLOW_CLIENTS = "numa_launcher_slow_clients"
SLOW_CLIENT_BYTES = "numa_launcher_slow_client_bytes"
SLOW_CLIENTS_GIVEN_UP = "numa_launcher_slow_clients_given_up"
AUDIT_ENTRIES = "numa_launcher_audit_entries"
AUDIT_LOST = "numa_launcher_audit_lost"
AUDIT_OK = "numa_launcher_audit_ok"
COST = "numa_launcher_cost"
COST_PER_MILLION = "numa_launcher_cost_per_million_output_tokens"
ENERGY = "numa_launcher_energy_joules"
LEDGER_OK = "numa_launcher_usage_ledger_ok"
LEDGER_ENTRIES = "numa_launcher_usage_ledger_entries"
LEDGER_LOST = "numa_launcher_usage_ledger_entries_lost"
LEDGER_WAITING = "numa_launcher_usage_ledger_entries_waiting"
LEDGER_BYTES = "numa_launcher_usage_ledger_bytes"
TRACES_EXPORTED = "numa_launcher_traces_exported"
TRACES_DROPPED = "numa_launcher_traces_dropped"
TRACES_WAITING = "numa_launcher_traces_waiting"
LOG_LINES_DROPPED = "numa_launcher_log_lines_dropped"

TABLE: tuple[Spec, ...] = (
    counter(
        ACCEPTED,
        "Requests whose route and API key were good, /health, /metrics and /v1/models not counted; also those that end "
        "as rejected.",
    ),
    counter(
        ENDED,
        "Accepted requests that ended, by outcome. Their sum and the requests in flight equal the accepted requests.",
        "outcome",
    ),
    gauge(IN_FLIGHT, "Accepted requests that have not ended."),
    counter(RETRIED, "Attempts repeated on another instance before the first byte of a response."),
    counter(SLOT_SENT, "Attempts sent to a slot.", "slot", "model"),
    counter(SLOT_BROKEN, "Attempts that failed before the first byte of a response.", "slot", "model"),
    counter(SLOT_ENDED, "Ended requests by their last slot and outcome.", "slot", "model", "outcome"),
    gauge(SLOT_IN_FLIGHT, "Requests that the slot's instance processes.", "slot", "model"),
    gauge(SLOT_READY, "1 while the slot's instance may get requests.", "slot", "model"),
    gauge(READY, "Instances that may get requests.", "model"),
    gauge(QUEUED, "Requests that wait for an instance.", "model"),
    gauge(QUEUED_BYTES, "Size of the waiting requests' bodies."),
    gauge(QUEUE_OLDEST, "Age of the oldest request that waits for an instance; 0 while none waits.", "model"),
    gauge(QUEUE_MAX, "Most requests that may wait ([proxy] queue_max_requests)."),
    counter(
        QUEUE_REJECTED,
        "Requests rejected because the queue was full (requests, bytes) or they waited in it too long (deadline).",
        "reason",
    ),
    gauge(PARKED, "Requests that wait while no instance of their model is ready.", "model"),
    counter(
        CONTINUED,
        "Streams cut after their first byte: continued on another instance (continued), ended with an error because the "
        "continuation would not be exact (unfit), or cut there too (failed).",
        "outcome",
    ),
    gauge(SLOT_EJECTED, "1 while the slot is ejected after failures.", "slot", "model"),
    counter(SLOT_EJECTIONS, "Ejections of the slot after failures.", "slot", "model"),
    gauge(
        SLOT_WEIGHT,
        "Share of requests that the slot gets, compared to its siblings: less than 1 for a straggler.",
        "slot",
        "model",
    ),
    counter(UNAUTHORIZED, "Requests without a valid API key (401). They are not accepted requests."),
    counter(KEY_ACCEPTED, "Accepted requests by API key.", "key"),
    counter(KEY_ENDED, "Accepted requests that ended, by API key and outcome.", "key", "outcome"),
    counter(
        KEY_REFUSED,
        "Requests refused by a limit of their API key: concurrency, requests_per_minute, tokens_per_minute, model, budget.",
        "key",
        "limit",
    ),
    gauge(KEY_IN_FLIGHT, "Waiting and running requests by API key.", "key"),
    counter(KEY_TOKENS, "Prompt and output tokens by API key.", "key"),
    counter(KEY_PROMPT_TOKENS, "Of these, prompt tokens.", "key"),
    counter(KEY_OUTPUT_TOKENS, "Of these, output tokens.", "key"),
    counter(PROMPT_TOKENS, "Prompt tokens of ended requests, as the usage ledger enters them.", "model"),
    counter(CACHED_TOKENS, "Of these, tokens that an instance had in its prefix cache.", "model"),
    counter(
        OUTPUT_TOKENS,
        "Output tokens of ended requests, as the usage ledger enters them: those that were generated for clients, also "
        "for streams that were continued or aborted.",
        "model",
    ),
    gauge(
        KEY_BUDGET_SPENT,
        "What an API key has spent of its budget in the current period: 1 is all of it. No sample while it is unknown.",
        "key",
    ),
    counter(OVERFLOW_SENT, "Requests sent to an overflow endpoint.", "endpoint", "model"),
    counter(
        OVERFLOW_ENDED,
        "Requests for an overflow endpoint that ended, by outcome. rejected: not sent, because max_requests were there "
        "already.",
        "endpoint",
        "model",
        "outcome",
    ),
    gauge(OVERFLOW_IN_FLIGHT, "Requests at an overflow endpoint.", "endpoint"),
    counter(
        OVERFLOW_COST,
        "Cost of the ended requests at an overflow endpoint that has prices, since the daemon's start, in cost.currency.",
        "endpoint",
    ),
    counter(
        OVERFLOW_CAPPED,
        "Requests that an overflow endpoint did not get because of its max_per_day.",
        "endpoint",
    ),
    counter(
        OVERFLOW_WITHOUT_USAGE,
        "Responses of an overflow endpoint that say no usage, or more than was asked for. They count at the most that they "
        "may have cost.",
        "endpoint",
    ),
    gauge(
        OVERFLOW_SPENT,
        "Cost of the requests at an overflow endpoint that ended today, in cost.currency; with max_per_day only.",
        "endpoint",
    ),
    gauge(
        OVERFLOW_RESERVED,
        "The most that requests at an overflow endpoint may still cost; with max_per_day only.",
        "endpoint",
    ),
    gauge(OVERFLOW_MAX_PER_DAY, "The cap of an overflow endpoint's cost a day.", "endpoint"),
    gauge(CONNECTIONS, "Client connections."),
    gauge(UPLOAD_BYTES, "Memory for request bodies over 64 KiB that are being received."),
    gauge(UPLOADS_WAITING, "Request bodies that wait for this memory."),
    counter(UPLOADS_REFUSED, "Requests that got 503 because their bodies waited for this memory too long."),
    counter(CONNECTIONS_REFUSED, "Connections closed at once because max_connections were open."),
    gauge(
        CERTIFICATE_END,
        "End of the TLS certificate in force, seconds since the epoch: the earliest of its chain. With [proxy] "
        "tls_certificate only.",
    ),
    gauge(
        FILE_USABLE,
        "1 while a file that is read again when it changes is in use, 0 when it cannot be used or has expired: TLS "
        "certificate, API keys, key of the overflow endpoint NAME.",
        "file",
    ),
    gauge(SLOW_CLIENTS, "Clients that read their responses slowly."),
    gauge(SLOW_CLIENT_BYTES, "Response data buffered for slow clients."),
    counter(
        SLOW_CLIENTS_GIVEN_UP,
        "Clients disconnected for reading below client_min_bytes_per_s, by reason: waiting (requests waited for the "
        "instance), memory (slow_client_buffer_bytes was full), timeout (client_stall_timeout_s).",
        "reason",
    ),
    counter(
        COST, "Bill of the machine by [cost] since the daemon's start, in units of the currency.", "currency"
    ),
    gauge(
        COST_PER_MILLION,
        "Allocated cost of a million output tokens in the last hour, or since the daemon's start: the whole bill over what "
        "was served here. No sample while nothing was served.",
        "currency",
    ),
    counter(
        ENERGY, 'Energy of a processor package since the daemon\'s start, with watts = "measured".', "package"
    ),
    gauge(
        LEDGER_OK,
        "1 while the usage ledger can be written and no entry is lost. No sample where [usage] disables it.",
    ),
    counter(LEDGER_ENTRIES, "Ended requests written to the usage ledger."),
    counter(LEDGER_LOST, "Ended requests that are not in the usage ledger: they could not be written."),
    gauge(LEDGER_WAITING, "Ended requests that wait in memory to be written to the usage ledger."),
    gauge(LEDGER_BYTES, "Size of the usage ledger's file and its write-ahead log."),
    counter(
        AUDIT_ENTRIES,
        "Requests and control actions that the audit trail has on the disk; with [audit] path only.",
    ),
    counter(AUDIT_LOST, "Requests and control actions that could not be written to the audit trail."),
    gauge(AUDIT_OK, "1 while the audit trail can be written."),
    counter(
        TRACES_EXPORTED,
        "Traces of requests that the OpenTelemetry collector has taken; with [telemetry] otlp_endpoint only.",
    ),
    counter(
        TRACES_DROPPED,
        "Traces that it has not, by reason: queue_full (too many waited for it), refused (it answered with an error, or "
        "rejected spans), stopped (the daemon exited).",
        "reason",
    ),
    gauge(TRACES_WAITING, "Traces that wait in memory to be sent."),
    counter(
        LOG_LINES_DROPPED,
        "Lines of the daemon's log, of the access log and of instances' output that were not written: stderr or the journal "
        "did not take them.",
    ),
    *machine_metrics.TABLE,
)


# --- The launcher's metrics as Prometheus' text, and as docs/metrics.md. ---

_INTRO = """# Metrics

<!-- Generated by scripts/docs from launcher/telemetry/metrics.py; edit that. -->

`GET /metrics` returns the launcher's own metrics and those of every instance, in Prometheus' text format. Metrics of
instances keep their names (such as `vllm:num_requests_running`) and get the labels `slot`, `numa_node` and `model`; a
label of theirs with one of these names becomes `exported_NAME`. Their counters and histograms continue when an instance
restarts, so `rate()` and sums over slots are correct. Instances are asked at most once a second; if one does not answer
within 2 s, its gauges are missing.

Alerts, rules and a Grafana dashboard: [monitoring](monitoring.md).

`slot` is the number that `numa-launcher status` shows. `key` is an API key's name, never the key.

```promql
sum by (model) (rate(vllm:generation_tokens_total[1m]))
sum by (numa_node) (vllm:num_requests_running)
sum(rate(numa_launcher_requests_ended_total{outcome="failed"}[5m]))
```
"""


class _Snapshot:
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def render(values: Values, timings: Timings) -> str:
    """The launcher's metrics in Prometheus' text format. A metric without values has no samples."""
    families = [_family(spec, values.get(spec.name, {})) for spec in TABLE]
    return generate_latest(_Snapshot([*families, *map(_histogram_family, timings.all())])).decode()


def to_markdown() -> str:
    """docs/metrics.md: every metric of the launcher, its labels and its meaning."""
    lines = [_INTRO, "| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for spec in TABLE:
        name = f"{spec.name}_total" if spec.kind is MetricKind.COUNTER else spec.name
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        lines.append(f"| `{name}` | {spec.kind} | {labels} | {spec.help} |")
    for each in Timings().all():
        label = f"`{each.label}`" if isinstance(each, Histograms) else ""
        lines.append(f"| `{each.name}` | histogram | {label} | {each.help} |")
    return "\n".join(lines) + "\n"


def _family(spec: Spec, values: Mapping[tuple[str, ...], float]) -> Metric:
    kind = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(spec.name, spec.help, labels=spec.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _histogram_family(found: Histogram | Histograms) -> Metric:
    if isinstance(found, Histogram):
        family = HistogramMetricFamily(found.name, found.help)
        _add(family, {}, found)
        return family
    family = HistogramMetricFamily(found.name, found.help, labels=[found.label])
    for value, histogram in found.items():
        _add(family, {found.label: value}, histogram)
    return family


def _add(family: HistogramMetricFamily, labels: dict[str, str], histogram: Histogram) -> None:
    names = [*map(floatToGoString, histogram.bounds), "+Inf"]
    sums = accumulate(map(float, histogram.counts))
    family.add_metric(list(labels.values()), list(zip(names, sums, strict=True)), histogram.sum)
    family.add_sample(f"{histogram.name}_created", labels, histogram.created)
