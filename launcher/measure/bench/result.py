"""What a measurement found: the values that `bench` stores, prints, reports and compares.

Times are in seconds, rates per second, shares from 0 to 1. A figure that was not measured is None, never 0."""

from __future__ import annotations

from typing import Any

import msgspec

from launcher.machine.hardware import Hardware


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of one latency over the completed requests (of the inter-token latency: over all gaps)."""

    mean: float
    p50: float
    p95: float
    p99: float


class ClientCost(msgspec.Struct, frozen=True, kw_only=True):
    """What the load generator itself used while it measured."""

    cpu_s: float
    """CPU time of its processes between the first request and the last answer."""
    share: float
    """The busiest process's CPU time over the wall time: 1.0 is one core, all that a single-threaded client has."""
    wait_share: float = 0.0
    """Time that its main thread waited for a cpu over the wall time."""
    limited: bool
    """The client, not the endpoint, may have set the pace: the figures are not the endpoint's."""

    def __str__(self) -> str:
        return f"the load generator used {self.share:.0%} of a core and waited for a cpu {self.wait_share:.0%} of the time"


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """What a load generator counts and times in one run."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    """Tokens, as rates and latencies, are those of completed requests: see `outcomes`."""
    asked_tokens: int | None = None
    """Output tokens that all requests asked for, the failed ones included; None: answers of no exact length."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None


class Point(Totals, frozen=True, kw_only=True):
    """One run of a load generator: one workload at one load with one seed."""

    concurrency: int | None
    """Requests kept in flight (closed loop), or the most at once under `rate`; None: no bound."""
    rate: float | None
    """Requests started a second (open loop, Poisson); None: closed loop."""
    seed: int
    goodput_per_s: float | None
    """Completed requests a second that met every limit of the SLO; None without an SLO."""
    kv_use_max: float | None
    """Highest KV cache use of any instance, seen at the samples taken."""
    prefix_hit_share: float | None
    """Prompt tokens found in the prefix cache, over those looked up, during this point."""
    requests_by_instance: dict[str, int] | None
    """Requests that each instance ended during this point."""
    client: ClientCost
    ttft_samples_s: list[float]
    """Time to the first token of each completed request, for distributions and intervals; may be thinned."""
    itl_samples_s: list[float]
    e2e_samples_s: list[float]
    driver_file: str
    """The load generator's own result file, beside this result; "" if it wrote none."""
    fault: str = ""
    """Why the run has failed, whatever its figures: the endpoint counted failures that the load generator did not see."""


class Software(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of what ran; None: not installed, or another engine."""

    numa_launcher: str
    engine: str
    vllm: str | None
    torch: str | None
    zentorch: str | None
    python: str | None
    engine_version: str | None = None
    """The engine's own, as its program prints it; vLLM's is `vllm`."""


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One `numa-launcher bench`: what was measured on what, and its points in the order they ran."""

    schema: int = 1
    id: str
    started_at: str
    """ISO 8601 with the zone."""
    url: str
    model: str
    workload: str
    workload_options: dict[str, Any]
    driver: str
    driver_version: str
    slo: dict[str, float]
    """Limits by name: "ttft_p99" -> seconds; empty without an SLO."""
    cores: int | None
    """Cores that the instances run on, for tokens a second per core; None for a foreign endpoint."""
    hardware: Hardware | None
    software: Software | None
    plan: dict[str, Any] | None
    """As `numa-launcher plan --json` prints it; None for a foreign endpoint."""
    picture_svg: str | None
    """The machine's picture as `plan --svg` draws it."""
    points: list[Point]
    notes: list[str] = []
    """What a reader has to know beside the figures, such as failures and a load generator that was not pinned."""
    complete: bool = True
    """False: interrupted, or the load generator failed; `points` has what was measured before."""
