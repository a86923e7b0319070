"""What `GET /v1/status` says of queue, tokens and keys: sums since the proxy's start, and the queue now."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from launcher.proxy.auth.api_keys import ApiKeys
from launcher.proxy.balancing.admission_queue import AdmissionQueue
from launcher.proxy.observability.counters import Counters
from launcher.proxy.request.record import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueState:
    """Requests that wait for an instance."""

    requests: int
    """Their number."""
    bytes: int
    """Sum of their bodies."""
    oldest_s: float | None
    """Time since the arrival of the oldest one; null: the queue is empty."""
    limit_requests: int
    """`queue_max_requests`: more are refused, or sent to an overflow endpoint."""
    limit_bytes: int
    """`queue_max_bytes`, likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTotals:
    """Tokens of the requests that ended since the daemon's start."""

    prompt: int
    """Of prompts, cached ones included."""
    cached: int
    """Of these, found in an instance's prefix cache."""
    output: int
    """Generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTotals:
    """Requests of one API key since the daemon's start."""

    accepted: int
    """Requests that were admitted or refused."""
    in_flight: int
    """Requests that have not ended."""
    tokens: int
    """Prompt and output tokens of those that have ended."""
    prompt_tokens: int
    """The prompts' part of them."""
    output_tokens: int
    """The generated part of them."""


def queue_state(queue: AdmissionQueue, waiting: Collection[Request], now: float) -> QueueState:
    """`now`: the event loop's time."""
    oldest = min((request.started for request in waiting), default=None)
    return QueueState(
        requests=len(waiting), bytes=queue.bytes, oldest_s=None if oldest is None else now - oldest,
        limit_requests=queue.max_requests, limit_bytes=queue.max_bytes,
    )  # fmt: skip


def tokens_by_model(counters: Counters) -> dict[str, TokenTotals]:
    return {
        model: TokenTotals(prompt=sums.prompt, cached=sums.cached, output=sums.output)
        for model, sums in sorted(counters.tokens.items())
    }


def token_sum(models: Iterable[TokenTotals]) -> TokenTotals:
    every = list(models)
    return TokenTotals(
        prompt=sum(of.prompt for of in every), cached=sum(of.cached for of in every),
        output=sum(of.output for of in every),
    )  # fmt: skip


def key_totals(keys: ApiKeys) -> dict[str, KeyTotals]:
    """By name of the key; empty where no keys are needed."""
    return {
        name: KeyTotals(
            accepted=of.accepted,
            in_flight=of.in_flight,
            tokens=of.tokens,
            prompt_tokens=of.prompt_tokens,
            output_tokens=of.output_tokens,
        )
        for name, of in sorted(keys.sums.items())
    }
