"""Plain requests to the endpoint under test: is it there, what does it serve, and its metrics page."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

import msgspec

from launcher.base.errors import LauncherError, reason
from launcher.measure.bench.load_generator import Target
from launcher.proxy.sse.ends import StreamEnd, brings_output
from launcher.telemetry import engine_metrics
from launcher.telemetry.metrics import METRICS_AGE_S, SLOT_ENDED

TIMEOUT_S: Final = 10.0
PROBE_S: Final = 120.0  # for eight tokens of an engine that may be cold
MAX_PAGE_BYTES: Final = 64 << 20
UNANSWERED: Final = (OSError, http.client.HTTPException, ValueError, LookupError, TypeError, AttributeError)
"""No answer, or one in another form than the API's."""


def check(target: Target) -> int | None:
    """Raises LauncherError unless the endpoint answers and serves the model; its longest context, where it says so."""
    try:
        page = json.loads(_read(target, "/v1/models"))
        models: dict[str, Any] = {str(model["id"]): model for model in page["data"]}
    except urllib.error.HTTPError as error:
        raise _refused(target, error) from None
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(target, error) from None
    except (ValueError, KeyError, TypeError):
        raise LauncherError(
            f"cannot measure {target.url}: /v1/models is no list of models",
            "give the URL of an OpenAI endpoint, without /v1",
        ) from None
    if target.model not in models:
        raise LauncherError(
            f"cannot measure {target.url}: it does not serve model '{target.model}'",
            f"give --model with one of {', '.join(models) or 'no model (none is served)'}",
        )
    longest = models[target.model].get("max_model_len")
    return longest if isinstance(longest, int) else None


def models(target: Target) -> list[str]:
    """Names that the endpoint serves; empty when it cannot be asked: `check` says why."""
    try:
        return [str(model["id"]) for model in json.loads(_read(target, "/v1/models"))["data"]]
    except UNANSWERED:
        return []


def metrics_page(target: Target) -> str | None:
    """None where the endpoint has none, or does not answer in time."""
    try:
        return _read(target, "/metrics").decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return None


def opening_events(target: Target, api: str) -> int:
    """Events of a stream of this API that bring a choice, and come before its first output: one request tells.

    Of a chat, the chunk with the role alone: an API server may write it before its engine has computed anything, and
    `vllm bench serve` (0.32) takes it for the first token. 0 also where there is no answer: the warm-up says why."""
    if api != "chat":
        return 0
    body = {
        "model": target.model, "messages": [{"role": "user", "content": "Name a colour."}], "max_completion_tokens": 8,
        "stream": True,
    }  # fmt: skip
    request = _request(target, "/v1/chat/completions", body)
    opening = 0
    try:
        with urllib.request.urlopen(request, timeout=PROBE_S) as response:  # noqa: S310
            for line in response:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if not data.startswith(b"{"):
                    continue
                if brings_output(StreamEnd.DONE, data):
                    return opening
                opening += _has_role(json.loads(data))
    except UNANSWERED:
        return 0
    return 0


def _has_role(chunk: dict[str, Any]) -> bool:
    """An event with no text and no role is of a token that has none by itself."""
    return any(choice["delta"].get("role") is not None for choice in chunk.get("choices") or ())


def greedy(target: Target, prompt: str, tokens: int) -> str:
    """Text of the most likely completion. Raises UNANSWERED."""
    body = {"model": target.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = json.loads(_read(target, "/v1/completions", body, timeout_s=PROBE_S))
    return str(answer["choices"][0]["text"])


def _request(target: Target, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
    """A GET, or a POST of `body` as JSON."""
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        headers["Content-Type"] = "application/json"
    return urllib.request.Request(f"{target.url}{path}", data, headers)  # noqa: S310  the operator's own URL


def _read(
    target: Target, path: str, body: dict[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S
) -> bytes:
    try:
        with urllib.request.urlopen(_request(target, path, body), timeout=timeout_s) as response:  # noqa: S310
            data: bytes = response.read(MAX_PAGE_BYTES)
            return data
    except urllib.error.HTTPError as error:
        error.close()  # it is the response, with its connection
        raise


def _refused(target: Target, error: urllib.error.HTTPError) -> LauncherError:
    if error.code in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
        given = "the API key is not accepted" if target.key else "it needs an API key"
        return LauncherError(
            f"cannot measure {target.url}: {given} (status {error.code})",
            "give --key-file with a file that contains a valid key (`numa-launcher key add` creates one)",
        )
    return LauncherError(
        f"cannot measure {target.url}: /v1/models answers with status {error.code}",
        "give the URL of an OpenAI endpoint, without /v1",
    )


def _unreachable(target: Target, error: Exception) -> LauncherError:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLError):
        why = cause.verify_message if isinstance(cause, ssl.SSLCertVerificationError) else str(cause)
        return LauncherError(
            f"cannot measure {target.url}: TLS failed: {why}",
            "name the certificate's host in --url, and set SSL_CERT_FILE to the certificate of its authority",
        )
    if isinstance(cause, TimeoutError):
        why = f"no answer within {TIMEOUT_S:g} s"
    else:
        why = reason(cause) if isinstance(cause, OSError) else str(cause)
    return LauncherError(
        f"cannot measure {target.url}: {why}",
        "start the endpoint (`numa-launcher serve`), or give its URL with --url",
    )


# --- What the endpoint's metrics say about a point: KV cache use, prefix hits, and requests per instance.

# Of vLLM, on the proxy's page with the slot as a label. The proxy's own counter also counts /tokenize, which the load
# generator (vllm bench serve 0.32, _align_prompts_to_server_tokenizer) asks once before its first request. It asks
# llama-server once for each prompt besides, because that does not read the field `prompt`.
_FINISHED: Final = "vllm:request_success_total"
_ENDED: Final = f"{SLOT_ENDED}_total"

Read = Callable[[], str | None]
"""Reads the metrics page; None when there is none."""


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """None: the endpoint does not publish it."""

    kv_use_max: float | None = None
    prefix_hit_share: float | None = None
    requests_by_instance: dict[str, int] | None = None
    failed_at_endpoint: int = 0
    """Requests that the proxy ended as failed. A load generator may count a stream that breaks off as completed."""


class Observer:
    """Reads the page before, during and after one point."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._first = read()
        self._kv_use: float | None = None

    def sample(self, *, measuring: bool) -> None:
        """Before the first request: the page that growth is counted from; the one read at the start may lack the last
        requests of the point before. During the point: the KV cache's use is a gauge."""
        if self._first is None:
            return
        page = self._read()
        if measuring:
            self._take(page)
        elif page is not None:
            self._first = page

    def end(self) -> Observed:
        """After the point, with all of its requests counted."""
        first = self._first
        if first is None:
            return Observed()
        time.sleep(METRICS_AGE_S)
        last = self._read()
        if last is None:
            return Observed()
        self._take(last)
        ended = _growth(first, last, _FINISHED, "slot") or _growth(first, last, _ENDED, "slot")
        outcomes = _growth(first, last, _ENDED, "outcome")
        return Observed(
            kv_use_max=self._kv_use, prefix_hit_share=_hit_share(first, last),
            requests_by_instance=ended or None, failed_at_endpoint=outcomes.get("failed", 0),
        )  # fmt: skip

    def _take(self, page: str | None) -> None:
        metrics = None if page is None else engine_metrics.parse(page)
        if metrics is not None and metrics.kv_usage is not None:
            self._kv_use = max(self._kv_use or 0.0, metrics.kv_usage)


def _growth(first: str, last: str, name: str, label: str) -> dict[str, int]:
    """Requests counted between two pages, by one label."""
    before = engine_metrics.sums_by_label(first, name, label)
    after = engine_metrics.sums_by_label(last, name, label)
    return {key: int(value - before.get(key, 0)) for key, value in after.items()}


def _hit_share(first: str, last: str) -> float | None:
    before, after = engine_metrics.parse(first), engine_metrics.parse(last)
    if before is None or after is None:
        return None
    queries = after.prefix_queries - before.prefix_queries
    return (after.prefix_hits - before.prefix_hits) / queries if queries > 0 else None
