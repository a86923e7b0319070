"""Plain requests to the endpoint under test: is it there, what does it serve, and its metrics page."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import Any, Final

from launcher.bench.target import Target
from launcher.errors import LauncherError, reason

TIMEOUT_S: Final = 10.0
MAX_PAGE_BYTES: Final = 64 << 20


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
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return []


def metrics_page(target: Target) -> str | None:
    """None where the endpoint has none, or does not answer in time."""
    try:
        return _read(target, "/metrics").decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return None


def _read(target: Target, path: str) -> bytes:
    headers = {"Authorization": f"Bearer {target.key}"} if target.key else {}
    request = urllib.request.Request(f"{target.url}{path}", headers=headers)  # noqa: S310  the operator's own URL
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
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
