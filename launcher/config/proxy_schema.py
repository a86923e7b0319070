"""The tables `[proxy]` and `[[proxy.overflow]]` of the configuration."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from launcher.config.values import (
    REMOVED_POLICIES,
    NonNegativeInt,
    Policy,
    PositiveInt,
    Seconds,
    Section,
    doc,
)

_MIB = 1024 * 1024
# Defaults of settings that no longer have an effect.
SLOW_START_S = 20.0
SESSION_HEADER = "X-Session-Id"


_WHEN: Final = re.compile(r"full|predicted_ttft\s*>\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>ms|s)")
Amount = Annotated[float, Meta(ge=0, le=1_000_000)]
Price = Annotated[float, Meta(ge=0, le=10_000)]
EndpointName = Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class Overflow(Section, frozen=True):
    """`[[proxy.overflow]]`: external OpenAI-compatible endpoints for requests that the queue would reject, tried in
    order. A single one may be written as `[proxy.overflow]`."""

    url: Annotated[
        str,
        doc(
            "Base URL including /v1. Requests sent there leave this host.",
            pattern="^https?://",
            examples=["https://host/v1"],
        ),
    ]
    models: Annotated[
        dict[str, str],
        doc(
            "Models whose requests may be sent there: local model name to the name used there.",
            min_length=1,
            examples=[{"our-name": "their-name"}],
        ),
    ]
    name: Annotated[
        EndpointName | None,
        doc(
            "Name in logs, metrics and `X-Served-By`. Default: the host of `url`.",
            examples=["other-cloud"],
        ),
    ] = None
    api_key_file: Annotated[
        str | None, doc("File with the API key for that endpoint. The client's own key is never sent.")
    ] = None
    max_requests: Annotated[
        PositiveInt, doc("Concurrent requests to that endpoint. Further requests get 429.")
    ] = 64
    when: Annotated[
        str,
        doc(
            'When requests go there: "full", instead of 429 or 503; or also when their first token is predicted to come too '
            'late, such as "predicted_ttft > 4s".',
            examples=["predicted_ttft > 4s"],
        ),
    ] = "full"
    input: Annotated[
        Price | None, doc("Its price of a million prompt tokens, in `cost.currency`.", examples=[0.15])
    ] = None
    output: Annotated[Price | None, doc("Its price of a million output tokens.", examples=[0.6])] = None
    cached: Annotated[
        Price | None,
        doc("Its price of a million cached prompt tokens. Default: that of prompt tokens."),
    ] = None
    max_per_day: Annotated[
        Amount | None,
        doc(
            "Most that it may cost from midnight to midnight in `usage.zone`. Needs prices and the usage ledger. "
            "Default: no cap."
        ),
    ] = None
    max_output_tokens: Annotated[
        PositiveInt,
        doc(
            "Most output tokens of a response there whose request names no `max_tokens`. Their price is reserved from "
            "`max_per_day` until the response has ended."
        ),
    ] = 16384

    @property
    def endpoint(self) -> str:
        """Its name. Raises ValueError for a `url` whose host is none."""
        return self.name or (urlsplit(self.url).hostname or "").encode("idna").decode()

    @property
    def predicted_s(self) -> float | None:
        """Seconds of `when = "predicted_ttft > ..."`; None: "full". Raises ValueError for other text."""
        found = _WHEN.fullmatch(self.when.strip())
        if found is None:
            raise ValueError(f"{self.when!r} is no condition")
        if found["number"] is None:
            return None
        return float(found["number"]) / (1000 if found["unit"] == "ms" else 1)


class Proxy(Section, frozen=True):
    """`[proxy]`: the OpenAI endpoint."""

    listen: Annotated[
        tuple[str, ...],
        doc('Addresses to listen on: "HOST:PORT", "[IPV6]:PORT" or "unix:/path".', min_length=1),
    ] = ("127.0.0.1:8000",)
    tls_certificate: Annotated[
        str | None, doc("PEM certificate chain for the TCP listeners; reloaded when the file changes.")
    ] = None
    tls_key: Annotated[str | None, doc("PEM private key. Default: the key in tls_certificate.")] = None
    api_keys_file: Annotated[
        str | None,
        doc(
            "File of API keys that clients must send (`numa-launcher key add`). Default: no API key is required."
        ),
    ] = None
    cors_origins: Annotated[
        tuple[str, ...], doc('Origins that browsers may send requests from, or "*". Default: none.')
    ] = ()
    trusted_proxies: Annotated[
        tuple[str, ...],
        doc(
            'Addresses, networks ("10.0.0.0/8") or "unix": peers whose X-Forwarded-*, Forwarded and X-Numa-Slot '
            "headers are accepted. The headers of other peers are dropped."
        ),
    ] = ()
    policy: Annotated[
        Policy,
        doc(
            "How an instance is chosen for a request: prefix-aware, least-requests or round-robin. "
            "least-tokens and session, of earlier versions, mean prefix-aware."
        ),
    ] = Policy.PREFIX_AWARE
    session_header: Annotated[str, doc("Ignored. Belonged to the policy session.", min_length=1)] = (
        SESSION_HEADER
    )
    queue_max_requests: Annotated[
        NonNegativeInt, doc("Requests that may wait for an instance. Further requests get 429.")
    ] = 4096
    queue_max_bytes: Annotated[
        NonNegativeInt, doc("Total size of the waiting requests' bodies. Further requests get 429.")
    ] = 512 * _MIB
    queue_timeout_s: Annotated[Seconds, doc("Longest wait in the queue; then the request gets 429.")] = 600.0
    park_timeout_s: Annotated[
        Seconds,
        doc(
            "Longest wait while no instance of the model is ready, provided one has been ready before; then the request "
            "gets 503."
        ),
    ] = 300.0
    max_body_bytes: Annotated[PositiveInt, doc("Largest request body. Larger ones get 413.")] = 64 * _MIB
    upload_max_bytes: Annotated[
        PositiveInt,
        doc(
            "Memory for request bodies over 64 KiB while they are received, of all clients together. "
            "At least max_body_bytes."
        ),
    ] = 512 * _MIB
    upload_wait_s: Annotated[
        Seconds,
        doc(
            "Longest time that a request body waits for this memory, all its waits together; then it gets 503."
        ),
    ] = 30.0
    max_connections: Annotated[
        PositiveInt, doc("Client connections open at once. Further connections are closed.")
    ] = 16384
    connect_timeout_s: Annotated[Seconds, doc("Longest time to connect to an instance.")] = 5.0
    first_token_timeout_s: Annotated[
        Seconds, doc("Longest time from sending a request to an instance to the first output of its stream.")
    ] = 300.0
    first_token_timeout_per_1k_s: Annotated[
        Seconds, doc("Added to first_token_timeout_s for each 1,000 tokens of the prompt (estimated).")
    ] = 60.0
    answer_timeout_s: Annotated[
        Seconds,
        doc(
            "Longest time to the first byte of a response that is not streamed, and longest silence of a stream while its "
            "engine's counters rise."
        ),
    ] = 3600.0
    idle_timeout_s: Annotated[
        Seconds,
        doc("Longest pause between two reads of a response, while no counter of its engine's metrics rises."),
    ] = 300.0
    hung_timeout_s: Annotated[
        Seconds,
        doc(
            "An instance whose streams and whose engine make no progress for this long, while streams of others do, counts "
            "as hung. An instance with requests that sends nothing for this long is probed by the supervisor."
        ),
    ] = 60.0
    keepalive_comment_s: Annotated[
        Seconds,
        doc("Longest time for which a stream sends its client nothing: then an SSE comment goes."),
    ] = 15.0
    eject_failures: Annotated[
        PositiveInt, doc("Consecutive failures that take an instance out of rotation for eject_s.")
    ] = 3
    eject_s: Annotated[
        Seconds, doc("How long an ejected instance gets no requests; then one request tries it.")
    ] = 10.0
    slow_start_s: Annotated[
        Seconds, doc("Ignored. New instances get their full share at once: requests are bound late.")
    ] = SLOW_START_S
    header_timeout_s: Annotated[
        Seconds, doc("Longest time for a client to send its request line and headers.")
    ] = 30.0
    body_timeout_s: Annotated[
        Seconds,
        doc(
            "Longest pause while a client sends a request body, and longest time below body_min_bytes_per_s; then the "
            "request gets 408."
        ),
    ] = 60.0
    body_min_bytes_per_s: Annotated[
        PositiveInt, doc("Lowest rate of a request body that is not limited by body_timeout_s.")
    ] = 1000
    client_keepalive_s: Annotated[Seconds, doc("How long an idle client connection stays open.")] = 75.0
    slow_client_buffer_bytes: Annotated[
        NonNegativeInt,
        doc(
            "Memory for responses that clients read slowly, so that instances need not wait; one response may use an "
            "eighth. When it is full, the instance waits for its client."
        ),
    ] = 256 * _MIB
    client_min_bytes_per_s: Annotated[
        PositiveInt, doc("Lowest rate at which a client with unread response data must read it.")
    ] = 1000
    client_grace_s: Annotated[
        Seconds,
        doc(
            "How long a client may read below client_min_bytes_per_s while requests wait for its instance, or while "
            "slow_client_buffer_bytes is full; then its connection is closed."
        ),
    ] = 10.0
    client_stall_timeout_s: Annotated[
        Seconds,
        doc(
            "How long a client may read below client_min_bytes_per_s otherwise; then its connection is closed."
        ),
    ] = 300.0
    access_log: Annotated[Literal["all", "errors", "off"], doc("Requests that get an access log line.")] = (
        "all"
    )
    log_prompts: Annotated[
        bool, doc("Also log request bodies, at level debug. They contain users' texts.")
    ] = False
    overflow: Annotated[
        tuple[Overflow, ...], doc("External endpoints for overload, tried in order. Default: none.")
    ] = ()

    @property
    def outdated(self) -> tuple[str, ...]:
        """Warnings for settings of earlier versions that have no effect."""
        found: list[str] = []
        if self.policy in REMOVED_POLICIES:
            was = f'[proxy] policy = "{self.policy}" is no longer available'
            found.append(f"{was}: prefix-aware is used, which was never slower in simulation")
        if self.session_header != SESSION_HEADER:
            was = f'[proxy] session_header = "{self.session_header}" is ignored'
            found.append(f"{was}: it belonged to the policy session, which is no longer available")
        if self.slow_start_s != SLOW_START_S:
            was = f"[proxy] slow_start_s = {self.slow_start_s:g} is ignored"
            found.append(f"{was}: requests are bound late, so that a new instance is not flooded without it")
        return tuple(found)
