"""The one exception that carries an error response of the proxy's own; proxy/error_forms.py writes it for each API."""

from __future__ import annotations

from typing import Final

# The lowest status of a request's own fault, and of the server's.
CLIENT_ERROR: Final = 400
TOO_MANY: Final = 429
SERVER_ERROR: Final = 500
NEVER_REPEATED: Final = frozenset({501, 505})
"""Not implemented, by any instance: the same request fails again."""
_MAY_PASS: Final = frozenset({408, 409, TOO_MANY})  # 4xx that the same request may get past
SHOULD_RETRY: Final = "X-Should-Retry"
"""OpenAI's and Anthropic's SDKs repeat 408, 409, 429 and 5xx where it does not say "false" (_base_client.py of both);
Claude Code 2.1 repeats 401, too, for three minutes."""


def blames_request(status: int) -> bool:
    """Whether a response says that its request is at fault, and not the server."""
    return CLIENT_ERROR <= status < SERVER_ERROR or status in NEVER_REPEATED


def blames_server(status: int) -> bool:
    """Whether a response says that its server is at fault."""
    return status >= SERVER_ERROR and status not in NEVER_REPEATED


def may_pass(status: int) -> bool:
    """Whether the same request may get another answer later."""
    return not blames_request(status) or status in _MAY_PASS


class HttpError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | int | None = None,
        headers: dict[str, str] | None = None,
        close: bool = False,
        repeatable: bool = True,
    ) -> None:
        """`repeatable`: False where the same request would fail again, although its status does not say so."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type_
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.repeatable = repeatable and may_pass(status)
        if not self.repeatable:
            self.headers[SHOULD_RETRY] = "false"
        self.close = close  # what follows on the connection cannot be trusted, or will not be read

    def closing(self) -> HttpError:
        """The same, as the connection's last response."""
        self.close = True
        return self


def unavailable(message: str, retry_after_s: int, *, close: bool = False) -> HttpError:
    """503: no instance can take the request now."""
    headers = {"Retry-After": str(retry_after_s)}
    type_, code = "service_unavailable", "no_instance_ready"
    return HttpError(503, message, type_=type_, code=code, headers=headers, close=close)


def unrecorded(reason: str, retry_after_s: int) -> HttpError:
    """503: [audit] strict, and the audit trail cannot be written."""
    message, headers = f"the audit trail cannot be written: {reason}", {"Retry-After": str(retry_after_s)}
    return HttpError(503, message, type_="service_unavailable", code="audit_unavailable", headers=headers)


def too_many(reason: str, retry_after_s: int) -> HttpError:
    """429: the queue is full, or the request waited in it for as long as it may."""
    message, headers = f"the server is at its limit: {reason}", {"Retry-After": str(retry_after_s)}
    return HttpError(429, message, type_="rate_limit_error", code="queue_full", headers=headers)
