"""Which requests a figure is of: what each asked for, what came, and how it ended; and whether a run is the workload. Pure.

One rule for every figure, table, comparison, search and exit code:

1. A request has failed when the load generator says so, or when it brought fewer output tokens than its workload asks for
   exactly. `vllm bench serve` (0.32, benchmarks/lib/endpoint_request_func.py) takes a stream for completed once its first
   event came: after an error event, without an end, or cut by the server.
2. Rates, latencies, samples and goodput are of completed requests.
3. A run whose requests failed at the endpoint, while the load generator counts them as completed, is a failed run.
4. What was completed must be what was asked for, within `TOLERANCE`: else the figures are those of other work, and nothing
   is ranked by them. Failed requests leave more of the machine to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import msgspec
import numpy as np

from launcher.base.text import counted
from launcher.measure.bench.result import ClientCost, Percentiles, Totals

# Of output tokens, or of requests where their answers have no exact length.
TOLERANCE: Final = 0.01
# Why a run has no figures: capitals, because a reader must not miss it.
LIMITED: Final = "CLIENT-LIMITED"
NONE_COMPLETED: Final = "ALL FAILED"
FAILED_RUN: Final = "RUN FAILED"


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of one request, in seconds."""

    ttft: float | None
    """To the first event with output. None: the response was not streamed, or brought none."""
    e2e: float
    output_tokens: int
    itl: list[float]
    """Gaps between the parts of the stream; vLLM sends one part per token unless it falls behind."""

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a run, as the load generator saw it."""

    prompt_tokens: int
    asked: int | None
    """Output tokens that its answer must have exactly; None: it ends where the model ends it."""
    times: RequestTimes
    error: str | None
    """The load generator's reason for its failure; "" where it names none. None: it takes it for completed."""

    @property
    def failure(self) -> str | None:
        """Why it has failed; None: it is completed."""
        if self.error is not None:
            return self.error or "no reason given"
        if self.asked is not None and self.times.output_tokens < self.asked:
            return f"{self.times.output_tokens:,} of {self.asked:,} output tokens came"
        return None


class Figures(Totals, frozen=True, kw_only=True):
    """The figures of one run, with the requests that they are of."""

    requests: list[RequestTimes]
    """Completed requests; empty where the load generator has no single ones."""
    error: str | None = None
    """The most frequent reason of the failed requests."""


def figures_of(sent: Sequence[Sent], duration_s: float) -> Figures:
    """`duration_s`: from the first request sent to the last response."""
    completed = [each for each in sent if each.failure is None]
    reasons = Counter(each.failure for each in sent if each.failure is not None)
    times = [each.times for each in completed]
    inputs, outputs = (
        sum(each.prompt_tokens for each in completed),
        sum(each.output_tokens for each in times),
    )
    asked = [each.asked for each in sent if each.asked is not None]
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return Figures(
        duration_s=duration_s, completed=len(completed), failed=len(sent) - len(completed), input_tokens=inputs,
        output_tokens=outputs, asked_tokens=sum(asked) if asked and len(asked) == len(sent) else None,
        requests_per_s=len(completed) * per_s, output_tokens_per_s=outputs * per_s,
        total_tokens_per_s=(inputs + outputs) * per_s,
        ttft_s=_percentiles(each.ttft for each in times), tpot_s=_percentiles(each.tpot for each in times),
        itl_s=_percentiles(gap for each in times for gap in each.itl), e2e_s=_percentiles(each.e2e for each in times),
        requests=times, error=reasons.most_common(1)[0][0] if reasons else None,
    )  # fmt: skip


def _percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """As numpy interpolates them, which is how vLLM makes its own. None without values."""
    found = [value for value in values if value is not None]
    if not found:
        return None
    p50, p95, p99 = (float(each) for each in np.percentile(found, [50, 95, 99]))
    return Percentiles(mean=float(np.mean(found)), p50=p50, p95=p95, p99=p99)


def disagreement(figures: Totals, failed_at_endpoint: int) -> str:
    """Why a run has failed though the load generator does not know; "" where the endpoint's own count does not say so.

    The endpoint may also count requests of other clients: these do not belong into a measurement either."""
    if failed_at_endpoint <= figures.failed:
        return ""
    return (
        f"the proxy counts {counted(failed_at_endpoint, 'failed request')}, the load generator {figures.failed:,}: "
        "streams that broke off count as completed there, and other clients' requests are not counted"
    )


# --- A run: has it figures, and may they be ranked? ---


class Run(Protocol):
    """What is asked of a `result.Point`."""

    @property
    def completed(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def asked_tokens(self) -> int | None: ...
    @property
    def fault(self) -> str: ...
    @property
    def client(self) -> ClientCost: ...


def without_figures(run: Run) -> str:
    """Why it has none: the client set the pace, no request was completed, or the run failed. "": it has."""
    if run.fault:
        return FAILED_RUN
    if not run.completed:
        return NONE_COMPLETED
    return LIMITED if run.client.limited else ""


def other_work(runs: Iterable[Run]) -> str:
    """Why these runs of one load are not the measurement that was asked for; "": they are."""
    its = list(runs)
    failed = [run.fault for run in its if run.fault]
    if failed:
        return f"{len(failed)} of {counted(len(its), 'run')} failed: {failed[0]}"
    if its and all(run.asked_tokens for run in its):
        asked, came = sum(run.asked_tokens or 0 for run in its), sum(run.output_tokens for run in its)
        what = "output tokens"
    else:
        came = sum(run.completed for run in its)
        asked, what = came + sum(run.failed for run in its), "requests"
    if not asked or abs(came - asked) <= TOLERANCE * asked:
        return ""
    return f"{came:,} {what} were completed, {asked:,} asked for"


def per_answer(runs: Sequence[Run]) -> float | None:
    """Output tokens of a completed request, where the workload asks for no exact number; None: it does, or none came."""
    completed = sum(run.completed for run in runs)
    if not completed or any(run.asked_tokens is not None for run in runs):
        return None
    return sum(run.output_tokens for run in runs) / completed or None
