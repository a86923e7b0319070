"""What a report of the usage ledger holds: the types of `GET /v1/usage`, `GET /v1/usage/requests` and
`usage` in `GET /v1/status`. Pure.

Amounts of money are decimal numbers as text, exact to a pico: a sum of floats would not be.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Requests that ended, of one key, model, instance, overflow endpoint, day or hour. Latencies are within 5 %."""

    name: str
    """Name of the key, the model or the overflow endpoint; number of the slot; day (2026-11-01) or begin of the hour (ISO
    8601). Empty: without key, for no known model, answered by no instance, not sent to an overflow endpoint."""
    requests: int
    """Requests: `completed` + `client_aborted` + `rejected` + `failed`."""
    completed: int
    """A whole response was delivered."""
    client_aborted: int
    """The client left first."""
    rejected: int
    """Refused by the proxy: limits, budgets, no such model, no ready instance."""
    failed: int
    """Answered with a 5xx, or broken off."""
    continued: int
    """Continued on another instance after the first token."""
    overflowed: int
    """Sent to an overflow endpoint."""
    estimated: int
    """Requests whose tokens are estimated, because no upstream counted them."""
    prompt_tokens: int
    """Tokens of prompts, the cached ones included."""
    cached_tokens: int
    """Prompt tokens found in a prefix cache."""
    output_tokens: int
    """Generated tokens."""
    charged: str
    """Amount taken from budgets: at [cost.price], and at the prices of the overflow endpoints."""
    overflow_cost: str
    """Amount that the overflow endpoints charge."""
    first_byte_p50_s: float | None
    """Seconds from the arrival of a request to the first byte of its response (of a stream: the first token), median; null
    without responses."""
    first_byte_p90_s: float | None
    """The same, 90th percentile."""
    first_byte_p99_s: float | None
    """The same, 99th percentile."""
    duration_p50_s: float | None
    """Seconds from the arrival of a request to its end, median."""
    duration_p99_s: float | None
    """The same, 99th percentile."""
    ready_s: int | None
    """Seconds in which instances were ready, summed over the instances; null for keys, models and endpoints."""
    busy_s: int | None
    """Of these, seconds with one request or more in flight."""
    utilisation: float | None
    """`busy_s` ÷ `ready_s`; null without an instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageReport:
    """`GET /v1/usage`. Times are Unix seconds."""

    since: int
    """Begin of the report: a full hour."""
    until: int
    """End of the report."""
    zone: str
    """Time zone of days and hours."""
    began: float
    """The ledger has no requests from before."""
    by: str | None
    """What a row is: key, model, instance, overflow, day or hour; null: there are no rows."""
    key: str | None
    """Only requests of this key; null: all."""
    model: str | None
    """Only requests for this model; null: all."""
    currency: str
    """Currency of the amounts."""
    lost: int
    """Requests of this time, of whatever key or model, that are missing: the ledger could not be written, and the memory for
    them was full."""
    rows: tuple[UsageRow, ...]
    """Days and hours in order, others by tokens, the most first."""
    total: UsageRow
    """All requests of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageToday:
    """Requests that ended since the last midnight in [usage] zone."""

    since: int
    """That midnight, Unix seconds."""
    requests: int
    """Requests, whatever their outcome."""
    prompt_tokens: int
    """Tokens of prompts, the cached ones included."""
    output_tokens: int
    """Generated tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRequest:
    """One request. Texts are empty where there is none."""

    time: float
    """Its end."""
    request_id: str
    """Its X-Request-Id."""
    key: str
    """Name of its API key."""
    model: str
    """The model that it named."""
    adapter: str
    """The LoRA adapter that it named."""
    path: str
    """Its route."""
    status: int
    """Status of the response; 0: none was sent."""
    outcome: str
    """completed, client_aborted, rejected or failed."""
    slot: int | None
    """The last instance that worked on it; null: none did."""
    prompt_tokens: int
    """Tokens of its prompt, the cached ones included."""
    cached_tokens: int
    """Prompt tokens found in a prefix cache."""
    output_tokens: int
    """Generated tokens."""
    estimated: bool
    """Whether its tokens are estimated, because no upstream counted them."""
    queued_s: float | None
    """Seconds from its arrival until an instance was asked; null: none was."""
    first_byte_s: float | None
    """Seconds from its arrival to the first byte of its response; of a stream, to the first token."""
    duration_s: float
    """Seconds from its arrival to its end."""
    attempts: int
    """Attempts on upstreams."""
    continued: int
    """Continuations on other instances."""
    overflow: str
    """Name of the overflow endpoint that it was sent to."""
    overflow_reason: str
    """Why: full or predicted."""
    predicted_s: float | None
    """Time to the first token that was predicted at its arrival; null: not predicted."""
    charged: str
    """Amount at [cost.price], or at the prices of the overflow endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRequests:
    """`GET /v1/usage/requests`. Times are Unix seconds."""

    since: float
    """Begin of the time asked for."""
    until: float
    """Its end."""
    zone: str
    """Time zone of [usage]."""
    currency: str
    """Currency of the amounts."""
    left_out: str | None
    """Why earlier requests of this time may be left out: limit (as many were found), or search (a million were searched, or
    20 s passed); null: none is."""
    requests: tuple[UsageRequest, ...]
    """The latest requests, the latest last."""
